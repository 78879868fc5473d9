"""The row of a logged step: every number of docs/metrics.md that the training itself knows."""

import math
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from pipeline.artifacts.hub_queue import HubQueue
from pipeline.artifacts.retries import retries
from pipeline.artifacts.rows import read_rows
from pipeline.artifacts.run_directory import RunDirectory
from pipeline.data.consumed import Consumed
from pipeline.training.agreement import numbers_of_every_rank
from pipeline.training.attempts import first_start, lost_steps
from pipeline.training.device_memory import GIB, DeviceMemory
from pipeline.training.own_time import slowest
from pipeline.training.schedules import logged_rates
from pipeline.training.trained_text import bits_per_byte
from pipeline.training.update_numbers import UpdateNumbers

UPDATE_EVERY = 10  # steps
# Of the others the rank's that has most.
SUMS_OF_RANKS = ("mem/alloc_retries", "mem/ooms", "data/retries")


class LogRow:
    """Made on every rank in the same step: what is of all ranks is gathered once. The first rank's row is written.

    What no row of numbers can be derived from by the step alone is in state_dict.
    """

    def __init__(self, run: RunDirectory, args: TrainingArguments):
        self.update, self.memory = UpdateNumbers(), DeviceMemory(args.device)
        self.before_s = 0.0  # of perf/total_s, in the run that this one was forked from
        self.first_start: float | None = None
        self.lost_steps = 0
        if args.process_index == 0:
            rows = read_rows(run.metrics)
            self.first_start, self.lost_steps = first_start(rows), lost_steps(rows)
        self.queue = HubQueue(run)
        self._published: tuple[int, list[int]] = 0, []  # bytes of the file, and the steps that it names

    def state_dict(self) -> dict[str, float]:
        return {"before_s": self.before_s, "peak_bytes": self.memory.run_peak}

    def resume(self, trainer: Any, checkpoint: Path, state: dict[str, float]) -> None:
        """Go on from a checkpoint of this run, or of the one that it is forked from."""
        if checkpoint.parent != trainer.run.checkpoints:
            self.before_s = trainer.meter.total_s
        elif state:
            self.before_s, self.memory.run_peak = state["before_s"], int(state["peak_bytes"])
        if trainer.args.process_index == 0:
            trainer.saver.note_good(checkpoint)

    def measures_update(self, trainer: Any) -> bool:
        """Whether the step that is being made will be logged, as transformers' DefaultFlowCallback and the trainer decide, and
        its update is worth the passes over memory: where every step is logged, every tenth."""
        step, state = trainer.state.global_step + 1, trainer.state
        if step >= state.max_steps:
            return True
        return step % state.logging_steps == 0 and (state.logging_steps >= UPDATE_EVERY or step % UPDATE_EVERY == 0)

    def row(self, trainer: Any, logs: dict[str, float]) -> dict[str, Any]:
        """logs: Trainer's, of this step. None is a number that this row leaves out."""
        step, args, loss, norm = trainer.state.global_step, trainer.args, logs["loss"], logs.get("grad_norm")
        row: dict[str, Any] = {"train/loss": loss}
        with suppress(OverflowError):
            row["train/perplexity"] = math.exp(loss)
        row |= trainer.meter.read(step=step, loss=loss, wait_s=trainer.loader.wait_s if trainer.loader else 0.0)
        row |= self._of_all_ranks(trainer, row)
        row["optim/grad_norm"] = norm if norm is not None and math.isfinite(norm) else None  # of a skipped step
        row |= logged_rates(
            trainer.lr_scheduler,
            trainer_rate=logs["learning_rate"],
            peak=args.learning_rate,
            skipped=trainer.accelerator.optimizer_step_was_skipped,
        )
        row |= trainer.guard.read(max_norm=args.max_grad_norm)
        if not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):  # there a rank holds a part of each parameter
            row |= self.update.read([p for group in trainer.optimizer.param_groups for p in group["params"]])
        position = trainer.rows.position(step)
        row |= {f"data/{name}": position[name] for name in ("epoch", "pq", "rg") if name in position}
        row |= {"data/tokens": trainer.meter.targets, "data/samples": step * trainer.rows.rows_per_step}
        if args.process_index == 0:
            row["data/retries"] += trainer.rows.num_retries()
            row |= data_numbers(trainer.rows.consumed(step), row_tokens=trainer.rows.row_tokens)
            row |= self._of_attempts(row["perf/total_s"])
            row |= self._of_checkpoints(trainer, step)
        return row

    def _of_all_ranks(self, trainer: Any, row: dict[str, Any]) -> dict[str, Any]:
        own = {"own_s": trainer.own_time.read(), "data/wait_s": row["data/wait_s"], **self.memory.read()}
        own |= {"data/retries": retries(), **trainer.text.read()}
        ranks = numbers_of_every_rank(own, trainer.args.device)
        numbers: dict[str, Any] = {
            name: (sum if name in SUMS_OF_RANKS else max)(rank[name] for rank in ranks) for name in own if "/" in name
        }
        if peak := numbers.get("mem/run_peak_allocated_gib"):
            self.memory.run_peak = round(peak * GIB)  # of all ranks, which a resumed run goes on from
        numbers["train/bpb" if trainer.recipe.stage == "pretrain" else "train/assistant_bpb"] = bits_per_byte(ranks)
        numbers["data/wait_frac"] = min(numbers["data/wait_s"] / row["perf/step_s"], 1.0)
        times = [rank["own_s"] for rank in ranks if not math.isnan(rank["own_s"])]
        return numbers | (slowest(times) if len(times) > 1 else {})

    def _of_attempts(self, total_s: float) -> dict[str, float]:
        numbers: dict[str, float] = {"perf/lost_steps": self.lost_steps}
        if self.first_start is not None:
            since = max(time.time() - self.first_start, 1e-9)
            numbers["perf/goodput_pct"] = 100 * (total_s - self.before_s) / since
        return numbers

    def _of_checkpoints(self, trainer: Any, step: int) -> dict[str, float]:
        last_step, size = trainer.saver.last_good or (0, 0)
        numbers: dict[str, float] = {"ckpt/age_steps": step - last_step}
        if size:
            numbers |= {"ckpt/last_good_step": last_step, "ckpt/bytes": size}
        hub = trainer.recipe.hub
        if hub.id is not None and hub.strategy != "end":
            numbers["ckpt/hub_lag_steps"] = step - self._published_step(hub.id, step)
        return numbers

    def _published_step(self, repo_id: str, step: int) -> int:
        """The newest step that the Hub has; 0 while it has none. The file is read when it has grown."""
        path = self.queue.published
        size = path.stat().st_size if path.exists() else 0
        if size != self._published[0]:
            self._published = size, [row["step"] for row in read_rows(path) if row.get("repo_id") == repo_id]
        # One beyond this step was published before the run went back.
        return max((published for published in self._published[1] if published <= step), default=0)


def data_numbers(consumed: dict[str, Consumed | None], *, row_tokens: int) -> dict[str, float]:
    """data/* of what each source gave; the sums only where all of them are known."""
    known = {name: source for name, source in consumed.items() if source is not None}
    sources, numbers = list(known.values()), dict[str, float]()
    if len(known) == len(consumed):
        positions = row_tokens * sum(source.samples for source in sources)
        numbers["data/bad_rows"] = sum(source.bad_rows for source in sources)
        numbers["data/pad_frac"] = sum(source.padded for source in sources) / max(positions, 1)
        documents = [source.documents for source in sources if source.documents is not None]
        if len(documents) == len(sources):
            numbers["data/documents"] = sum(documents)
    if len(consumed) > 1:
        for name, source in known.items():
            numbers[f"data/source/{name}/tokens"] = source.tokens
            numbers[f"data/source/{name}/samples"] = source.samples
            if source.documents is not None:
                numbers[f"data/source/{name}/documents"] = source.documents
    return numbers
