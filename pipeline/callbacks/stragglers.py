"""A rank that keeps all others waiting: said and recorded once for each time that it lasts."""

import time

from transformers import TrainerCallback

from pipeline.artifacts.rows import append_row
from pipeline.artifacts.run_directory import RunDirectory

RATIO = 1.5  # times the mean of the other ranks
INTERVALS = 3  # logged in a row; a single one is noise of the machine


class Stragglers(TrainerCallback):
    """Reads what training/own_time.py measures; on rank 0."""

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
