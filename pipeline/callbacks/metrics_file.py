"""metrics.jsonl: the source of truth that report, comparison and trackers' catching up read."""

import time

from transformers import TrainerCallback

from pipeline.artifacts.rows import append_row
from pipeline.artifacts.run_directory import RunDirectory


class MetricsFile(TrainerCallback):
    """Appends every logged row with step (optimizer steps made), attempt, time and tokens."""

    def __init__(self, run: RunDirectory, *, attempt: int, batch_tokens: int):
        self.run, self.attempt, self.batch_tokens = run, attempt, batch_tokens

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and logs:
            stamp = {
                "step": state.global_step,
                "attempt": self.attempt,
                "time": time.time(),
                "tokens": state.global_step * self.batch_tokens,
            }
            append_row(self.run.metrics, stamp | logs)
