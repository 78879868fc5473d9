"""Trackers hold the same numbers under the same names as metrics.jsonl, over a restart too."""

import json

import pytest

event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def scalars(folder):
    accumulator = event_accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {tag: {e.step: e.value for e in accumulator.Scalars(tag)} for tag in accumulator.Tags()["scalars"]}


def test_tensorboard_and_an_offline_wandb_run_follow_a_run_over_a_restart(runner):
    recipe = runner.recipe(
        "tracked",
        "gpt2",
        monitor={"trackers": ["tensorboard", "wandb"]},
        samples={"prompts": ["The path"], "max_new_tokens": 4, "every_steps": None},
    )
    environment = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    directory = runner.kill(recipe, name="tracked", after_step=12, **environment)
    first_id = json.loads((directory / "run_manifest.json").read_text())["wandb_id"]
    run = runner.train(recipe, **environment)
    tags = scalars(directory / "tensorboard")
    for name in ("train/loss", "optim/lr", "val/bpb", "data/tokens"):
        assert tags[name] == pytest.approx(run.values(name), rel=1e-6), name
    assert json.loads((directory / "run_manifest.json").read_text())["wandb_id"] == first_id
    assert len({p.name.rsplit("-", 1)[-1] for p in (directory / "wandb").glob("offline-run-*")}) == 1
    samples = [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]
    assert [s["prompt"] for s in samples] == ["The path"]
