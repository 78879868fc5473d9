"""CORE while a run trains: at its cadence and at the end, after the checkpoint, by all ranks, and never the run's end."""

import json

import pytest

from pipeline.run_dir.rows import read_rows
from tests.evals.core_items import write_bundle

# A callback that breaks the model for every look at it from the third step to the fifth, as a lack of memory would, and others.
BREAKS = """
import os
import signal
import time

from transformers import TrainerCallback


class Breaks(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step in (3, 5):
            if state.global_step == 3:
                self.forward = model.forward

                def forward(*arguments, **inputs):
                    if not model.training:
                        raise MemoryError("no room for this")
                    return self.forward(*arguments, **inputs)

                forward.__signature__ = __import__("inspect").signature(self.forward)
                model.forward = forward
            else:
                model.forward = self.forward


class Signalled(TrainerCallback):
    # The last rank gets a signal in the second forward of step 4's scoring.

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        seen = []

        def signal_once(module, inputs):
            if not model.training and state.global_step == 4:
                seen.append(1)
                if len(seen) == 2 and args.process_index == args.world_size - 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                    time.sleep(1)

        model.get_input_embeddings().register_forward_pre_hook(signal_once)
"""


@pytest.fixture
def runner(runner):
    return runner


def recipe_of(runner, name, model="gpt2", **evals):
    bundle = write_bundle(runner.folder / "bundle", 4)
    core = {"every_steps": 4, "bundle": str(bundle), "max_per_task": 2}
    recipe = runner.recipe(
        name, model, train={"max_steps": 10}, evals={"bpb": {"tokens": 1024, "at_start": False}, "core": core | evals}
    )
    (runner.folder / "breaks.py").write_text(BREAKS)
    return recipe


def events(run, name):
    return [row for row in read_rows(run.directory / "metrics.jsonl") if row.get("event") == name]


@pytest.mark.full_except("modern")
@pytest.mark.parametrize("model", [pytest.param("gpt2", marks=pytest.mark.slow), "modern"])
def test_core_is_scored_at_its_cadence_and_end_and_changes_nothing(runner, model):
    run = runner.train(recipe_of(runner, "scored", model))
    assert sorted(run.values("core_partial/v1")) == [4, 8, 10]
    assert set(run.values("core_partial/v1")) == set(run.values("core/copa")) == set(run.values("core/eval_s"))
    console = (run.directory / "console.log").read_text()
    assert "step 00004 | core_partial/v1: " in console
    assert "core/eval_s: " in console
    assert "core/copa" not in console  # the tasks of CORE stand in metrics.jsonl
    entries = json.loads((run.directory / "report" / "evals.json").read_text())["entries"]
    assert [(entry["step"], entry["results"][0]["value"]) for entry in entries] == sorted(
        run.values("core_partial/v1").items()
    )
    saved = [row["step"] for row in run.rows() if "ckpt/save_s" in row]
    assert saved == [4, 5, 8, 10]  # each step is saved before it is scored, and as the recipe says
    plain = runner.train(recipe_of(runner, "plain", model, every_steps=None))
    assert plain.values("train/loss") == run.values("train/loss")


@pytest.mark.full
def test_two_ranks_have_the_score_of_one(runner):
    one = runner.train(recipe_of(runner, "one"))
    two = runner.train(recipe_of(runner, "two"), ranks=2)
    assert len(one.values("core/copa")) == 3
    for name in ("core_partial/v1", "core_partial/v2", "core/copa", "core/squad"):
        assert two.values(name) == one.values(name)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_failing_benchmark_is_reported_and_the_run_goes_on(runner, ranks):
    recipe = recipe_of(runner, "broken")
    run = runner.train(recipe, "run.callbacks=[breaks:Breaks]", ranks=ranks)
    assert sorted(run.values("core_partial/v1")) == [8, 10]
    assert "step 00004 | core was not scored (MemoryError: no room for this); the training continues" in run.output
    assert {(row["step"], row["name"]) for row in events(run, "evaluation_failed")} == {(4, "core")}
    assert (run.directory / "model" / "config.json").exists()


@pytest.mark.full
def test_the_report_lists_scores_by_step_and_what_was_not_scored(runner):
    run = runner.train(recipe_of(runner, "failing"), "run.callbacks=[breaks:Breaks]")
    text = (run.directory / "report" / "report.md").read_text()
    section = text.split("## Evaluations\n")[1].split("\n## ")[0]
    v1, v2 = run.values("core_partial/v1"), run.values("core_partial/v2")
    assert "### core_partial: step 10\n" in section
    assert f"| step 8 | {v1[8]:.6f} | {v2[8]:.6f} |\n| step 10 | {v1[10]:.6f} | {v2[10]:.6f} |" in section
    assert f"| copa | {run.values('core/copa')[10]:.4f} | " in section
    assert "This is not CORE: none of the files is the published one." in section
    assert "| 4 | core | MemoryError: no room for this |" in section
    assert "core/copa" not in text.split("## Time, cost and energy\n")[1].split("\n## ")[0]


def test_an_unwritable_record_is_reported_without_stopping_the_run(runner):
    recipe = recipe_of(runner, "damaged")
    report = runner.folder / "runs" / "damaged" / "report"
    report.mkdir(parents=True)
    (report / "evals.json").write_text("{")
    run = runner.train(recipe)
    assert "core was not scored (DamagedFileError: " in run.output
    assert not run.values("core_partial/v1")
    assert (run.directory / "model" / "config.json").exists()


@pytest.mark.full
def test_what_was_due_and_not_scored_is_scored_first_after_a_kill(runner):
    whole = runner.train(recipe_of(runner, "whole"))
    recipe = recipe_of(runner, "cut")
    runner.kill(
        recipe, name="cut", after_step=7
    )  # its last checkpoint is of step 5, whose cadence of step 4 is scored
    run = runner.train(recipe, "run.callbacks=[]")
    assert run.values("core_partial/v1") == whole.values("core_partial/v1")
    lost = recipe_of(runner, "lost")
    runner.kill(lost, "evals.core.every_steps=null", name="lost", after_step=6)
    run = runner.train(lost, "run.callbacks=[]")
    assert sorted(run.values("core_partial/v1")) == [5, 8, 10]  # the checkpoint's step, before the next one is made


@pytest.mark.full
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_step_interrupted_while_scoring_is_scored_first_after_the_resume(runner, ranks):
    recipe = recipe_of(runner, "cut")
    whole = runner.train(recipe, "run.name=whole", ranks=ranks)
    cut = runner.train(recipe, "run.callbacks=[breaks:Signalled]", status=75, ranks=ranks)
    assert "SIGTERM at step 4; checkpoint-4 is whole. Run the same command again" in cut.output
    assert not cut.values("core_partial/v1")
    assert not events(cut, "evaluation_failed")
    resumed = runner.train(recipe, ranks=ranks)
    assert resumed.values("core_partial/v1") == whole.values("core_partial/v1")


@pytest.mark.full
def test_a_broken_bundle_ends_the_start_before_the_first_step(runner):
    recipe = recipe_of(runner, "page")
    file = runner.folder / "bundle" / "eval_data" / "commonsense_reasoning" / "copa.jsonl"
    file.write_text("<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>")
    refused = runner.train(recipe, status=65)
    assert "copa.jsonl looks like an XML error page (AccessDenied)" in refused.output
    assert "step 0000" not in refused.output
