"""CORE and chat tasks while training: after the checkpoint, by all ranks, and never the end of a run."""

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch

from pipeline.callbacks.stop_signals import StopSignals
from pipeline.evals.bpb import EvaluationInterrupted
from pipeline.evals.tasks import OtherRankFailed, append_entry, entry_of, in_precision
from pipeline.process.progress import progress
from pipeline.run_dir.rows import last_attempts, read_rows
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.training.distributed import on_every_rank, on_rank_0, preserved_rng
from pipeline.training.trainer import StepCallback, TandemTrainer, forward_only

FAILED = "evaluation_failed"


class Benchmark(Protocol):
    """name: the group of its metrics. watched_texts: of all items, by task, what the training text is searched for.
    require_ready raises, before step 1, what score would. score gives rows for evals.json, values the same on every
    rank; findings, on the first, are what that search found. An error on one rank, EvaluationInterrupted too, is
    raised on all."""

    name: str
    every_steps: int
    at_start: bool  # before the first step too
    generates: bool  # answers, token by token

    def watched_texts(self) -> dict[str, list[str]]: ...

    def require_ready(self, tokenizer: Any) -> None: ...

    def score(self, model: Any, tokenizer: Any, **where: Any) -> list[dict[str, Any]]: ...


@contextmanager
def in_float32(model: Any) -> Iterator[None]:
    """Let the model compute in its weights' float32: without the autocast that Accelerate puts around its forward."""
    wrapped = vars(model).get("forward")
    if wrapped is None or "_original_forward" not in vars(model):
        yield
        return
    model.forward = model._original_forward
    try:
        yield
    finally:
        model.forward = wrapped


class Benchmarks(StepCallback):
    """Scores each benchmark at its cadence and at the end of the run. What was due and is not recorded, as after a
    kill, is done first after a resume.

    stop: what batches go through, so that a signal ends the scoring.
    """

    def __init__(
        self,
        trainer: TandemTrainer,
        run: RunDirectory,
        benchmarks: list[Benchmark],
        *,
        attempt: int,
        stop: StopSignals,
    ):
        self.trainer, self.run, self.benchmarks, self.attempt, self.stop = trainer, run, benchmarks, attempt, stop
        # One rank's word: the others may read the file a moment later.
        self.done: dict[str, int] = on_rank_0(lambda: {b.name: self._recorded(b.name) for b in benchmarks})

    def due(self, step: int, *, last: bool) -> list[Benchmark]:
        """Return those whose newest cadence up to this step is not scored yet."""
        found = []
        for benchmark in self.benchmarks:
            newest = step if last else step // benchmark.every_steps * benchmark.every_steps
            if self.done[benchmark.name] < newest:
                found.append(benchmark)
        return found

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step:
            self.on_step_done(args, state, control)
            return
        for benchmark in (b for b in self.benchmarks if b.at_start):
            try:
                self.score(benchmark, 0, None)
            except EvaluationInterrupted:
                self.stop.give_up(self.trainer.control)
                return

    def on_step_end(self, args, state, control, **kwargs):
        if self.due(state.global_step, last=False):
            control.should_save = True  # before them, also where no save was due

    def on_step_done(self, args, state, control):
        trainer, step = self.trainer, state.global_step
        due = self.due(step, last=step >= state.max_steps)
        if not due:
            return
        # The checkpoint is on the disk before anything can fail.
        trainer.log_written(on_every_rank(trainer.saver.wait)[0])
        with trainer.meter.pause():
            findings = self._findings()
        for benchmark in due:
            try:
                self.score(benchmark, step, findings)
            except EvaluationInterrupted:  # the step is saved, and this is scored first after the resume
                self.stop.give_up(trainer.control)
                return

    def score(self, benchmark: Benchmark, step: int, findings: dict[str, Any] | None) -> None:
        """Score one benchmark; every rank calls it. A failure is printed and recorded; EvaluationInterrupted is
        raised."""
        trainer, started = self.trainer, time.perf_counter()
        args, is_first = trainer.args, trainer.is_world_process_zero()
        # 1. The precision. On a CPU answers are generated in float32, as `python -m pipeline.evals` does: products of a
        # single position are no faster in bfloat16 there, and oneDNN keeps a kernel of some 90 KB for each length of a
        # row until the process ends (docs/log.md, 2026-11-24).
        leaves_autocast = benchmark.generates and args.device.type == "cpu"
        precision = "float32"
        if args.bf16 and not leaves_autocast:
            precision = "bfloat16"
        elif args.fp16 and not leaves_autocast:
            precision = "float16"
        autocast = in_float32(trainer.model) if leaves_autocast else trainer.compute_loss_context_manager()

        # 2. The share of each rank. Of a sharded model each forward needs every rank: all of them score everything.
        rank, world_size, interruptible = args.process_index, args.world_size, self.stop.on_this_rank
        if trainer.is_sharded:
            rank, world_size, interruptible = 0, 1, partial(self.stop.on_every_rank, lockstep=True)

        def watched(batches: Iterable) -> Iterable:
            return interruptible(progress(batches, name=benchmark.name, shown=is_first))

        # 3. The scores: recorded before they are logged, which is what a resume goes by.
        try:
            with (
                trainer.meter.pause(),
                preserved_rng(),
                forward_only(trainer.model),
                torch.no_grad(),
                autocast,
            ):
                results = benchmark.score(
                    trainer.model,
                    trainer.processing_class,
                    findings=findings,
                    device=args.device,
                    rank=rank,
                    world_size=world_size,
                    watched=watched,
                )
            if is_first:
                rows = in_precision(results, precision)
                entry = entry_of(subject=f"step {step}", step=step, device=str(args.device), results=rows)
                append_entry(self.run, entry)
        except EvaluationInterrupted:
            raise
        except Exception as error:
            self._report_failure(benchmark.name, step, error)
            torch.cuda.empty_cache()  # nothing without CUDA
        else:
            numbers = {row["name"]: row["value"] for row in results}
            trainer.log(numbers | {f"{benchmark.name}/eval_s": time.perf_counter() - started})
        self.done[benchmark.name] = step

    def _findings(self) -> dict[str, Any] | None:
        """Return, on the first rank, which writes evals.json, what the training text holds of the items. At the last
        step that is all the text of the run."""
        if not self.trainer.is_world_process_zero():
            return None
        from pipeline.contrib.contaminated_items import record_findings

        return record_findings(self.run, self.trainer.rows.plan, self.benchmarks)

    def _report_failure(self, name: str, step: int, error: Exception) -> None:
        """Report on the rank that failed, else on the first one."""
        # Of a sharded model all ranks score the same, and fail the same.
        of_all_ranks = getattr(error, "of_all_ranks", self.trainer.is_sharded)
        if (of_all_ranks or isinstance(error, OtherRankFailed)) and not self.trainer.is_world_process_zero():
            return
        reason = f"{type(error).__name__}: {error}"
        print(
            f"step {step:05d} | {name} was not scored ({reason}); the training continues", file=sys.stderr, flush=True
        )
        self.run.add_event(FAILED, step=step, attempt=self.attempt, name=name, reason=reason)

    def _recorded(self, name: str) -> int:
        """Return the newest step at which it was scored, or failed, by the attempts that count; 0 when never."""
        newest = 0
        for row in last_attempts(read_rows(self.run.metrics)):
            has_failed = row.get("event") == FAILED and row.get("name") == name
            if has_failed or f"{name}/eval_s" in row:
                newest = max(newest, row["step"])
        return newest
