"""Contract 2: a run that was cut goes on bitwise as if it had not been; on other shapes no row is repeated or skipped."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from pipeline.artifacts.checkpoints import by_step


def weights(directory: Path) -> dict:
    return load_file(directory / "model" / "model.safetensors")


def assert_same_weights(one: Path, two: Path) -> None:
    a, b = weights(one), weights(two)
    assert a.keys() == b.keys()
    different = [name for name in a if a[name].numpy().tobytes() != b[name].numpy().tobytes()]
    assert not different


@pytest.mark.parametrize("model", ["gpt2", "modern"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_killed_in_the_middle_ends_bitwise_as_the_uncut_one(runner, model, ranks):
    # GPT-2 keeps its dropout here: the random state must survive too.
    dropout = {"model": {"n_layer": 4, "n_embd": 32, "n_head": 2, "options": {}}} if model == "gpt2" else {}
    recipe = runner.recipe("resume", model, **dropout)
    uncut = runner.train(recipe, "run.name=uncut", ranks=ranks)
    directory = runner.kill(recipe, name="cut", after_step=12, ranks=ranks)
    newest = by_step(directory / "checkpoints")[-1].name
    cut = runner.train(recipe, "run.name=cut", ranks=ranks)
    assert f"going on from {newest}" in cut.output
    assert cut.values("train/loss") == uncut.values("train/loss")
    assert cut.values("train/loss_ema") == uncut.values("train/loss_ema")
    assert_same_weights(cut.directory, uncut.directory)
