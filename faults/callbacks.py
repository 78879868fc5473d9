"""A user's callbacks and task, by which a campaign cuts or watches a run at an exact place: run.callbacks is an extension point.

They are copied beside the recipes; the environment says what they do.
"""

import os
import signal
import time
from pathlib import Path

from transformers import TrainerCallback

WHERE, STEP = os.environ.get("FAULTS_CUT", ""), int(os.environ.get("FAULTS_CUT_STEP", -1))
PHASE_FILE = os.environ.get("FAULTS_PHASE_FILE")


class Cut(TrainerCallback):
    """SIGKILL for the process group, or with FAULTS_CUT_ALONE for this rank, at one place of one step."""

    def cut(self, where: str, step: int) -> None:
        if (where, step) == (WHERE, STEP):
            alone = os.environ.get("FAULTS_CUT_ALONE")
            os.kill(os.getpid(), signal.SIGKILL) if alone else os.killpg(0, signal.SIGKILL)

    def on_substep_end(self, args, state, control, **kwargs):
        self.cut("accumulation", state.global_step)

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if args.gradient_accumulation_steps == 1:  # then the middle of a step is before its update
            self.cut("accumulation", state.global_step)

    def on_evaluate(self, args, state, control, **kwargs):
        self.cut("evaluation", state.global_step)

    def on_save(self, args, state, control, **kwargs):
        self.cut("save", state.global_step)


class SaveFirst(TrainerCallback):
    """A checkpoint after the first step, beside those of the cadence."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = control.should_save or state.global_step == 1


def _say(phase: str) -> None:
    if PHASE_FILE and os.environ.get("RANK", "0") == "0":
        Path(PHASE_FILE).write_text(phase)


class Phases(TrainerCallback):
    """Writes down what the run is doing, and stays there for a moment, so that a signal can meet it."""

    def on_step_begin(self, args, state, control, **kwargs):
        _say("step")
        time.sleep(0.03)

    def on_substep_end(self, args, state, control, **kwargs):
        _say("accumulation")
        time.sleep(0.03)


def slow_task(model, tokenizer) -> dict[str, float]:
    """An evaluation that takes two seconds."""
    _say("evaluation")
    for _ in range(20):
        time.sleep(0.1)
    return {}
