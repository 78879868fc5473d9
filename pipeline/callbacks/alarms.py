"""Lines that warn while a run trains: spikes of the loss, ranks that are slow."""

import math
import time
from typing import Literal

from transformers import TrainerCallback

from pipeline.process.errors import DivergedError
from pipeline.process.progress import write
from pipeline.run_dir.rows import append_row, last_attempts, read_rows
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.training.guard import WATCHED
from pipeline.training.recent import RecentValues

# A loss or a gradient norm far outside its recent values: printed, recorded, and by recipe the end of the run.


class Spikes(TrainerCallback):
    """Compares what is logged anyway: no step waits for it. Every rank sees the same numbers, so that all stop as one.

    monitor.on_spike: skip needs every step's numbers before its update: that is the guard's (training/guard.py).
    """

    def __init__(self, run: RunDirectory, *, policy: Literal["warn", "stop"], attempt: int):
        self.run, self.policy, self.attempt = run, policy, attempt
        self.recent = {name: RecentValues() for name in WATCHED}

    def on_train_begin(self, args, state, control, **kwargs):
        for row in last_attempts(read_rows(self.run.metrics)):
            for name in WATCHED:
                if math.isfinite(row.get(name, math.nan)):
                    self.recent[name].append(row[name])

    def on_log(self, args, state, control, logs=None, **kwargs):
        for name in WATCHED:
            value = (logs or {}).get(name, math.nan)
            if not math.isfinite(value):  # not logged, or a step that the fp16 loss scaler skipped: optim/skipped_steps
                continue
            highest = self.recent[name].highest_usual()
            if highest is not None and value > highest:
                self._report(name, value, highest, state)
            self.recent[name].append(value)

    def _report(self, name: str, value: float, highest: float, state) -> None:
        spike = f"step {state.global_step}: {name} is {value:.4g}, above {highest:.4g}, the highest usual by its last {len(self.recent[name])} values"
        if state.is_world_process_zero:
            write(
                f"spike: step {state.global_step}: {name} is {value:.4g}, usually {highest:.4g} at most. A single one is harmless while the loss goes on "
                "falling; the report counts them"
            )
            row = {"event": "spike", "step": state.global_step, "attempt": self.attempt, "time": time.time()}
            append_row(self.run.metrics, row | {"name": name, "value": value, "highest_usual": highest})
        if self.policy == "stop":
            error = DivergedError(
                f"{spike}; monitor.on_spike is stop. The checkpoints before it are whole. Lower the learning rates in a new run with "
                f"run.fork_from={self.run.name}@STEP, or set monitor.on_spike: warn to go on."
            )
            error.facts = {"step": state.global_step, "name": name, "value": value, "highest_usual": highest}
            raise error


# A rank that keeps all others waiting: printed and recorded once for each time that it lasts.

RATIO = 1.5  # times the mean of the other ranks
INTERVALS = 3  # logged in a row; a single one is noise of the machine


class Stragglers(TrainerCallback):
    """Reads what training/metrics.py measures; on rank 0."""

    def __init__(self, run: RunDirectory, *, attempt: int):
        self.run, self.attempt = run, attempt
        self.rank, self.ratios = -1, list[float]()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or not logs or "perf/slowest_rank" not in logs:
            return
        rank, ratio = logs["perf/slowest_rank_id"], logs["perf/slowest_rank"]
        if ratio <= RATIO or rank != self.rank:
            self.rank, self.ratios = rank, []
        if ratio > RATIO:
            self.ratios.append(ratio)
        if len(self.ratios) == INTERVALS:
            self._report(state.global_step, rank, sum(self.ratios) / INTERVALS)

    def _report(self, step: int, rank: int, ratio: float) -> None:
        print(
            f"straggler: rank {rank} takes {ratio:.1f}x as long for its share of a step as the others, who wait for it (step {step})",
            flush=True,
        )
        row = {"event": "straggler", "step": step, "attempt": self.attempt, "time": time.time()}
        append_row(self.run.metrics, row | {"rank": rank, "ratio": ratio})
