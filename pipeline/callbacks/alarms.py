"""Alarms of a run: a rank that keeps all others waiting."""

from transformers import TrainerCallback

from pipeline.run_dir.run_directory import RunDirectory

RATIO = 1.5  # times the mean of the other ranks
INTERVALS = 3  # logged in a row; a single one is noise of the machine


class SlowRank(TrainerCallback):
    """Prints and records the rank that RankStepTimer finds slow, once for each time that it lasts; on rank 0."""

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
            f"straggler: rank {rank} takes {ratio:.1f}x as long for its share of a step as the others, who wait for "
            f"it (step {step})",
            flush=True,
        )
        self.run.add_event("straggler", step=step, attempt=self.attempt, rank=rank, ratio=ratio)
