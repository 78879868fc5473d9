"""metrics.jsonl: the source of truth that report, comparison and trackers read."""

import time
from typing import Any

from transformers import TrainerCallback

from pipeline.run_dir.rows import append_row
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.training.meters import StepMeter


def stamp(meter: StepMeter, step: int, attempt: int) -> dict[str, Any]:
    """Return the columns that every row begins with. step: optimizer steps made."""
    return {"step": step, "attempt": attempt, "time": time.time(), "tokens": meter.tokens_at(step)}


class MetricsFile(TrainerCallback):
    """Appends every logged row."""

    def __init__(self, run: RunDirectory, *, attempt: int, meter: StepMeter):
        self.run, self.attempt, self.meter = run, attempt, meter

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and logs:
            append_row(self.run.metrics, stamp(self.meter, state.global_step, self.attempt) | logs)
