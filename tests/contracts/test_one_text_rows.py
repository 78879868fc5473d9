"""Contracts 1 and 2 on rows of one conversation each, of a model that carries a state from one text of a row into the next."""

import json

import pytest

from pipeline.run_dir.checkpoints import by_step
from tests.training.test_isolation import recipe_for

SAID = "rows: texts that share one see each other in a Qwen3_5ForCausalLM (tried on two), so each row holds one conversation, padded"


def test_losses_of_one_text_rows_survive_any_shape_and_a_kill(runner, tmp_path):
    recipe = recipe_for(tmp_path, tmp_path / "cache", "qwen3_5", "sft")
    overrides = (
        "train.max_steps=6",
        f"run.directory={runner.folder / 'runs'}",
        "run.code_folder=" + str(runner.folder),
    )
    whole = runner.train(recipe, *overrides, "run.name=whole", stage="sft")
    assert SAID in whole.output
    assert "% of the positions of these rows are padding" in whole.output
    manifest = json.loads((whole.directory / "run_manifest.json").read_text())
    assert manifest["inputs"]["one_text_rows"] is True
    for name, rows, ranks in (("few", 3, 1), ("two", 2, 2)):
        one = f"train.per_device_train_batch_size={rows}"
        other = runner.train(recipe, *overrides, f"run.name={name}", one, stage="sft", ranks=ranks)
        assert other.values("train/loss") == pytest.approx(whole.values("train/loss"), rel=1e-5)
        assert other.values("val/loss") == pytest.approx(whole.values("val/loss"), rel=1e-5)
    directory = runner.kill(recipe, *overrides, name="cut", after_step=3, stage="sft")
    newest = by_step(directory / "checkpoints")[-1].name
    cut = runner.train(recipe, *overrides, "run.name=cut", stage="sft")
    assert f"going on from {newest}" in cut.output
    assert cut.values("train/loss") == whole.values("train/loss")
    a, b = ((run.directory / "model" / "model.safetensors").read_bytes() for run in (cut, whole))
    assert a == b


def test_a_run_that_began_with_packed_rows_ends_with_them(runner, tmp_path):
    recipe = recipe_for(tmp_path, tmp_path / "cache", "bloom", "sft")
    overrides = (
        "train.max_steps=6",
        f"run.directory={runner.folder / 'runs'}",
        "run.code_folder=" + str(runner.folder),
    )
    directory = runner.kill(recipe, *overrides, name="cut", after_step=3, stage="sft")
    path = directory / "run_manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["inputs"]["one_text_rows"]  # as a version wrote it that packed every model's rows
    path.write_text(json.dumps(manifest))
    ended = runner.train(recipe, *overrides, "run.name=cut", stage="sft")
    assert (
        "note: texts that share a row see each other in a BloomForCausalLM; this run continues as it began"
        in ended.output
    )
    shares = json.loads(path.read_text())["shares"]
    assert shares["chat"]["lost"]["padded"] < 0.2
