"""Callbacks that say how a run goes: the console's lines, the row of metrics.jsonl, warnings of slow ranks,
samples."""

import time
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from pipeline.evals.bpb import EvaluationInterrupted
from pipeline.metrics import is_evaluation, metric_of
from pipeline.process.progress import seconds_text, waiting, write
from pipeline.run_dir.rows import append_row, counts, read_rows
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.training.distributed import on_rank_0, preserved_rng
from pipeline.training.metrics import StepMeter, has_evaluation
from pipeline.training.trainer import forward_only

# The console: one line a logged step, in the exact shape that people's parsers read, and one for each evaluation.


def step_line(row: dict, *, step: int, max_steps: int) -> str:
    """Return the line of one logged step; `step` counts from zero."""
    mfu, eta = row.get("perf/bf16_mfu_pct"), row.get("perf/eta_s")
    return (
        f"step {step:05d}/{max_steps:05d} ({100 * step / max_steps:.2f}%) | loss: {row['train/loss_ema']:.6f} | lrm: "
        f"{row['optim/lrm']:.2f} | dt: {1000 * row['perf/step_s']:.2f}ms | tok/sec: {int(row['perf/tok_per_s']):,} | "
        f"bf16_mfu: {'n/a' if mfu is None else f'{mfu:.2f}'} | epoch: {row.get('data/epoch', 1)} pq: "
        f"{row.get('data/pq', 0)} rg: {row.get('data/rg', 0)} | total time: {row['perf/total_s'] / 60:.2f}m | eta: "
        f"{'n/a' if eta is None else f'{eta / 60:.1f}m'}"
    )


LEGEND = (
    "a step's line: its loss (smoothed), lrm = share of the peak learning rate, dt = time of the step, bf16_mfu = % "
    "of the device's peak, pq and rg = file and part of it that is read, eta = time left; of an evaluation: bpb = "
    "bits per byte of held-out text, lower is better"
)


class Console(TrainerCallback):
    """Prints and keeps the lines in console.log."""

    def __init__(self, log: Path):
        self.log = log

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            write(LEGEND)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or not logs:
            return
        if "train/loss" in logs:
            self.print_line(step_line(logs, step=state.global_step - 1, max_steps=state.max_steps))
        scores = " | ".join(
            f"{name}: {value:.6f}"
            for name, value in logs.items()
            if is_evaluation(name)
            and name.count("/") == 1  # of a mixture's sources the whole stands for all
            and ((metric := metric_of(name)) is None or metric.console)
        )
        if scores:
            self.print_line(f"step {state.global_step:05d} | {scores}")

    def print_line(self, line: str) -> None:
        write(line)
        with open(self.log, "a", encoding="utf-8") as file:
            file.write(line + "\n")


# The first step under torch.compile takes longest, and says nothing by itself.

UNKNOWN = "takes from seconds to a few minutes"


class Compiling(TrainerCallback):
    """Says before the first step that it is compiled and how long that took last, and shows the time until it is done.

    cache: the folder of the compiled kernels, where the time is kept for the next start; None: nowhere.
    """

    def __init__(self, cache: Path | None):
        self.cache_file = cache / "first_step_s.txt" if cache else None
        self.shown, self.began = ExitStack(), 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        if self.began or not args.torch_compile or not state.is_world_process_zero:
            return
        self.began = time.monotonic()
        write(f"compiling: the first step of a start {self._last() or UNKNOWN}; the others are faster for it")
        self.shown.enter_context(waiting("compiling", after_s=1.0))

    def on_step_end(self, args, state, control, **kwargs):
        if self.began and self.cache_file:
            with suppress(OSError):  # a full or read-only disk: then the next start does not know
                self.cache_file.parent.mkdir(parents=True, exist_ok=True)
                self.cache_file.write_text(f"{time.monotonic() - self.began:.0f}")
            self.cache_file = None
        self.shown.close()

    def on_train_end(self, args, state, control, **kwargs):
        self.shown.close()

    def _last(self) -> str | None:
        """Return how long the last compiled first step took on this machine, where one is known."""
        with suppress(OSError, ValueError):
            if self.cache_file:
                return f"takes longer, about {seconds_text(max(float(self.cache_file.read_text()), 1))} as last time"
        return None


# metrics.jsonl: the source of truth that report, comparison and trackers' catching up read.


def stamp(meter: StepMeter, step: int, attempt: int) -> dict[str, Any]:
    """Return what every row begins with. step: optimizer steps made."""
    return {"step": step, "attempt": attempt, "time": time.time(), "tokens": meter.tokens_at(step)}


class MetricsFile(TrainerCallback):
    """Appends every logged row."""

    def __init__(self, run: RunDirectory, *, attempt: int, meter: StepMeter):
        self.run, self.attempt, self.meter = run, attempt, meter

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and logs:
            append_row(self.run.metrics, stamp(self.meter, state.global_step, self.attempt) | logs)


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
            f"straggler: rank {rank} takes {ratio:.1f}x as long for its share of a step as the others, who wait for "
            f"it (step {step})",
            flush=True,
        )
        self.run.add_event("straggler", step=step, attempt=self.attempt, rank=rank, ratio=ratio)


# Texts generated while training, with fixed prompts: to samples.jsonl, the console and the trackers.


class Samples(TrainerCallback):
    """Completes the prompts at every evaluation, or every `every_steps`; the training's random state does not move.

    complete(model, prompts=prompts) -> texts; on a signal it raises EvaluationInterrupted, and the samples are made
    first after the resume. all_ranks: complete is called on every rank, as the forward of a sharded model needs; the
    first one writes. writers: the trackers that are given them (`add_samples(step, prompts, texts)`).
    """

    def __init__(
        self,
        run: RunDirectory,
        *,
        complete: Callable[..., list[str]],
        prompts: list[str],
        every_steps: int | None,
        chat: bool,
        attempt: int,
        meter: StepMeter,
        writers: list[Any],
        all_ranks: bool = False,
    ):
        self.run, self.complete, self.prompts, self.every_steps, self.chat = run, complete, prompts, every_steps, chat
        self.all_ranks, self.attempt, self.meter, self.writers = all_ranks, attempt, meter, writers

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        step = state.global_step
        there = on_rank_0(lambda: self._recorded(step) if step and self._due(step) else set(self.prompts))
        if not there.issuperset(self.prompts):
            self.sample(state, model, there=there)

    def _due(self, step: int) -> bool:
        """Return whether the checkpoint's step has samples; those of an evaluation that is due come with it."""
        if self.every_steps is not None:
            return self.every_steps > 0 and step % self.every_steps == 0
        return has_evaluation(self.run, step)

    def _recorded(self, step: int) -> set[str]:
        """Return the prompts whose samples of a step are there and count: no later attempt went on from before it."""
        attempts = [row for row in read_rows(self.run.metrics) if row.get("event") == "attempt"]
        return {row["prompt"] for row in read_rows(self.run.samples) if row["step"] == step and counts(row, attempts)}

    def on_evaluate(self, args, state, control, model=None, **kwargs):
        if self.every_steps is None:
            self.sample(state, model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if self.every_steps and state.global_step % self.every_steps == 0:
            self.sample(state, model)

    def sample(self, state, model, *, there: Collection[str] = ()) -> None:
        """Write the samples of this step. there: prompts whose samples of this step were written before a kill."""
        first = state.is_world_process_zero
        if not (first or self.all_ranks) or not self.prompts or self.every_steps == 0:
            return
        training = model.training
        try:
            with self.meter.pause(), preserved_rng(), forward_only(model), torch.no_grad():
                model.eval()
                texts = self.complete(model, prompts=self.prompts)
        except EvaluationInterrupted:
            return
        finally:
            model.train(training)
        for prompt, text in zip(self.prompts, texts, strict=True):
            if prompt in there or not first:
                continue
            write(f"  {prompt!r} -> {text!r}")
            row = stamp(self.meter, state.global_step, self.attempt)
            append_row(self.run.samples, row | {"prompt": prompt, "text": text, "chat": self.chat})
        for writer in self.writers if first else []:
            writer.add_samples(state.global_step, self.prompts, texts)
