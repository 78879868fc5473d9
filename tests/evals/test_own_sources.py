import yaml

from pipeline.evals.texts import sources_of_run
from pipeline.run_dir.run_directory import RunDirectory


def test_the_hub_datasets_of_a_run_are_read_at_its_commits(tmp_path, monkeypatch):
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
    monkeypatch.setattr(
        "pipeline.sources.open.open_sources", lambda settings: ([settings.kind], settings.data.sources)
    )
    recipe, (kind, _) = sources_of_run(run)
    assert kind == ["text"]
    assert [spec.revision for spec in [*recipe.data.sources, *recipe.data.validation]] == ["1" * 40, "2" * 40]


def test_a_run_keeps_the_held_out_files_it_began_with(tmp_path):
    """Which files of a folder are held out has changed; what a run began with is trained on by now."""
    from pipeline.recipe import read_recipe
    from pipeline.recipe.schema import with_values
    from pipeline.run.checks import reading_findings
    from pipeline.sources.open import open_sources, with_recorded_inputs

    folder = tmp_path / "books"
    folder.mkdir()
    for n in range(40):
        (folder / f"{n:02d}.txt").write_text(f"Book {n}. " + "It is about nothing. " * 20)
    run = RunDirectory(tmp_path / "runs" / "old")
    held = {"name": "books", "id": None, "revision": None, "files": [{"label": "39.txt", "sha256": "", "bytes": 400}]}
    run.update_manifest(inputs={"sources": [], "validation": [held]})
    recipe = {
        "run": {"stage": "pretrain", "directory": str(tmp_path / "runs"), "name": "old"},
        "data": {"sources": [{"files": str(folder)}], "batch_tokens": 2048, "cache_dir": str(tmp_path / "cache")},
        "model": {"n_layer": 1, "n_embd": 32, "n_head": 1},
        "train": {"max_steps": 1},
    }
    run.recipe.write_text(yaml.safe_dump(recipe))

    def labels(sources):
        return [file.label for file in sources[1][0].files]

    assert labels(sources_of_run(run)[1]) == ["39.txt"]
    again = read_recipe([str(run.recipe)], stage=None)
    assert len(labels(open_sources(again.source_settings()))) > 1
    data = with_recorded_inputs(again.data, run.read_manifest()["inputs"])
    again = with_values(again, {"data": data})
    assert labels(open_sources(again.source_settings())) == ["39.txt"]
    assert reading_findings(again, only=["sources"])[0] == []
