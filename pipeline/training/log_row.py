"""The row of a logged step: every number of docs/metrics.md that the training itself knows."""

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from pipeline.data.rows import Consumed
from pipeline.metrics import Numbers, is_validation
from pipeline.process.network import retries
from pipeline.recipe.schema import Hub
from pipeline.run_dir.rows import first_start, last_attempts, lost_steps, read_rows
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.training.checkpoint import CheckpointSaver
from pipeline.training.distributed import numbers_of_every_rank
from pipeline.training.guard import StepGuard
from pipeline.training.meters import GIB, DeviceMemory, RankStepTimer, StepMeter, UpdateNumbers, slowest
from pipeline.training.train_bpb import TrainBpbMeter, bits_per_byte

UPDATE_EVERY = 10  # steps
# Summed over the ranks; of the other numbers the largest of all ranks is logged.
SUMS_OF_RANKS = ("mem/alloc_retries", "mem/ooms", "data/retries")


def measures_update(step: int, *, max_steps: int, logging_steps: int) -> bool:
    """Return whether that step (one-based) will be logged and its update is worth the passes over memory: where every
    step is logged, every tenth is, and the last one."""
    if step >= max_steps:
        return True
    return step % logging_steps == 0 and (logging_steps >= UPDATE_EVERY or step % UPDATE_EVERY == 0)


class LogRow:
    """The numbers of a logged step, from the meters of the training. Made on every rank in the same step: numbers of
    all ranks are gathered once, and the first rank's row is written.

    state_dict: what no row can be derived from by the step alone.
    """

    def __init__(
        self,
        run: RunDirectory,
        *,
        device: torch.device,
        is_first: bool,
        rows: Any,
        meter: StepMeter,
        guard: StepGuard,
        timer: RankStepTimer,
        train_bpb: TrainBpbMeter,
        saver: CheckpointSaver,
        stage: str,
        hub: Hub,
    ):
        self.device, self.is_first, self.rows = device, is_first, rows
        self.meter, self.guard, self.timer, self.train_bpb, self.saver = meter, guard, timer, train_bpb, saver
        self.bpb_name = "train/bpb" if stage == "pretrain" else "train/assistant_bpb"
        self.hub = hub
        self.update, self.memory = UpdateNumbers(), DeviceMemory(device)
        self.before_s = 0.0  # of perf/total_s, in the run that this one was forked from
        self.first_start: float | None = None
        self.lost_steps = 0
        if is_first:
            recorded = read_rows(run.metrics)
            self.first_start, self.lost_steps = first_start(recorded), lost_steps(recorded)
        self.published_file = run.hub_queue / "published.jsonl"
        self._published: tuple[int, list[int]] = 0, []  # bytes of the file, and the steps that it names

    def state_dict(self) -> Numbers:
        return {"before_s": self.before_s, "peak_bytes": self.memory.run_peak}

    def load_state_dict(self, state: Numbers, *, is_fork: bool) -> None:
        """Take over the state of a checkpoint of this run, or of the one that it is forked from."""
        if is_fork:
            self.before_s = self.meter.total_s
        elif state:
            self.before_s, self.memory.run_peak = state["before_s"], int(state["peak_bytes"])

    def row(
        self,
        *,
        step: int,
        losses: Sequence[float | None],
        rates: Numbers,
        parameters: Sequence[Tensor],
        wait_s: float,
        max_norm: float,
    ) -> dict[str, Any]:
        """Return the row. losses: of the steps since the last row; rates: of this step; wait_s: for rows, in all."""
        # 1. The loss, and the numbers that every rank has: all ranks come here, and gather theirs once.
        finite = [loss for loss in losses if loss is not None]
        loss = fmean(finite)
        row: dict[str, Any] = {"train/loss": loss}
        with suppress(OverflowError):
            row["train/perplexity"] = math.exp(loss)
        row |= self.meter.read(step=step, losses=finite, wait_s=wait_s)
        row |= self._of_all_ranks(row)
        # 2. The update: rates, norms, how much of each parameter it changed.
        row |= rates
        row |= self.guard.read(max_norm=max_norm)
        row |= self.update.read(parameters)
        # 3. The place in the data; what each source gave and what is on the disk are for the first rank to say.
        position = self.rows.position(step)
        for name in ("epoch", "pq", "rg"):
            if name in position:
                row[f"data/{name}"] = position[name]
        row["data/tokens"] = self.meter.targets
        row["data/samples"] = self.meter.tokens_at(step) // self.rows.row_tokens
        if self.is_first:
            row["data/retries"] += self.rows.num_retries()
            row |= data_numbers(self.rows.consumed(step), row_tokens=self.rows.row_tokens)
            row |= self._of_attempts(row["perf/total_s"])
            row |= self._of_checkpoints(step)
        return row

    def _of_all_ranks(self, row: dict[str, Any]) -> dict[str, Any]:
        own = {"own_s": self.timer.read(), "data/wait_s": row["data/wait_s"], **self.memory.read()}
        own |= {"data/retries": retries(), **self.train_bpb.read()}
        ranks = numbers_of_every_rank(own, self.device)
        numbers: dict[str, Any] = {}
        for name in own:
            if "/" in name:  # the others are no metrics yet
                values = [rank[name] for rank in ranks]
                numbers[name] = sum(values) if name in SUMS_OF_RANKS else max(values)
        if "mem/run_peak_allocated_gib" in numbers:  # of all ranks: from it a resumed run continues
            self.memory.run_peak = round(numbers["mem/run_peak_allocated_gib"] * GIB)
        numbers[self.bpb_name] = bits_per_byte(ranks)
        numbers["data/wait_frac"] = min(numbers["data/wait_s"] / row["perf/step_s"], 1.0)
        times = [rank["own_s"] for rank in ranks if not math.isnan(rank["own_s"])]
        if len(times) > 1:
            numbers |= slowest(times)
        return numbers

    def _of_attempts(self, total_s: float) -> Numbers:
        numbers: Numbers = {"perf/lost_steps": self.lost_steps}
        if self.first_start is not None:
            since = max(time.time() - self.first_start, 1e-9)
            numbers["perf/goodput_pct"] = 100 * (total_s - self.before_s) / since
        return numbers

    def _of_checkpoints(self, step: int) -> Numbers:
        last_step, size = self.saver.last_good or (0, 0)
        numbers: Numbers = {"ckpt/age_steps": step - last_step}
        if size:
            numbers |= {"ckpt/last_good_step": last_step, "ckpt/bytes": size}
        if self.hub.id is not None and self.hub.strategy != "end":
            numbers["ckpt/hub_lag_steps"] = step - self._published_step(self.hub.id, step)
        return numbers

    def _published_step(self, repo_id: str, step: int) -> int:
        """Return the newest step that the Hub has; 0 while it has none. The file is read when it has grown."""
        path = self.published_file
        size = path.stat().st_size if path.exists() else 0
        if size != self._published[0]:
            self._published = size, [row["step"] for row in read_rows(path) if row.get("repo_id") == repo_id]
        steps = [published for published in self._published[1] if published <= step]  # later: the run went back since
        return max(steps, default=0)


def data_numbers(consumed: dict[str, Consumed], *, row_tokens: int) -> Numbers:
    """Return data/* of what each source gave; documents only where all sources count them."""
    samples = bad_rows = padded = num_documents = 0
    counts_documents = True
    for source in consumed.values():
        samples += source.samples
        bad_rows += source.bad_rows
        padded += source.padded
        num_documents += source.documents or 0
        counts_documents &= source.documents is not None
    numbers: Numbers = {
        "data/bad_rows": bad_rows,
        "data/pad_frac": padded / max(samples * row_tokens, 1),  # of row positions
    }
    if counts_documents:
        numbers["data/documents"] = num_documents
    if len(consumed) > 1:
        for name, source in consumed.items():
            numbers[f"data/source/{name}/tokens"] = source.tokens
            numbers[f"data/source/{name}/samples"] = source.samples
            if source.documents is not None:
                numbers[f"data/source/{name}/documents"] = source.documents
    return numbers


def has_evaluation(run: RunDirectory, step: int) -> bool:
    """Return whether a validation of that step is recorded, by an attempt that counts."""
    for row in last_attempts(read_rows(run.metrics)):
        if row.get("step") == step and any(map(is_validation, row)):
            return True
    return False
