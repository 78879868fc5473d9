import yaml

from pipeline.artifacts.run_directory import RunDirectory
from pipeline.evals import own_sources


def test_a_runs_hub_datasets_are_read_at_the_commits_that_it_began_with(tmp_path, monkeypatch):
    run = RunDirectory(tmp_path / "run")
    data = {"sources": [{"id": "org/text"}], "validation": [{"id": "org/held", "revision": "main"}]}
    run.update_manifest(inputs={"sources": [{"id": "org/text", "revision": "1" * 40}], "validation": [{"id": "org/held", "revision": "2" * 40}]})  # fmt: skip
    recipe = {
        "run": {"stage": "pretrain"},
        "model": {"n_layer": 1, "n_embd": 32, "n_head": 1},
        "train": {"max_steps": 1},
    }
    run.recipe.write_text(yaml.safe_dump({**recipe, "data": {**data, "batch_tokens": 2048}}))
    # No Hub is asked: what it would be asked for is enough.
    monkeypatch.setattr(own_sources, "open_sources", lambda recipe, kind: ([kind], recipe.data.sources))
    recipe, (kind, _) = own_sources.own_sources(run)
    assert kind == ["text"]
    assert [spec.revision for spec in [*recipe.data.sources, *recipe.data.validation]] == ["1" * 40, "2" * 40]
