"""The console's lines and the row of metrics.jsonl."""

import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from transformers import TrainerCallback

from pipeline.metrics import is_evaluation, metric_of
from pipeline.process.progress import seconds_text, waiting, write
from pipeline.run_dir.rows import append_row
from pipeline.run_dir.run_directory import RunDirectory

# The console: one line a logged step, in the exact shape that people's parsers read, and one for each evaluation.


def step_line(row: dict, *, step: int, max_steps: int) -> str:
    """Return the line of one logged step; `step` counts from zero."""
    mfu, eta = row.get("perf/bf16_mfu_pct"), row.get("perf/eta_s")
    return (
        f"step {step:05d}/{max_steps:05d} ({100 * step / max_steps:.2f}%) | loss: {row['train/loss_ema']:.6f} | lrm: {row['optim/lrm']:.2f} | "
        f"dt: {1000 * row['perf/step_s']:.2f}ms | tok/sec: {int(row['perf/tok_per_s']):,} | bf16_mfu: {'n/a' if mfu is None else f'{mfu:.2f}'} | "
        f"epoch: {row.get('data/epoch', 1)} pq: {row.get('data/pq', 0)} rg: {row.get('data/rg', 0)} | "
        f"total time: {row['perf/total_s'] / 60:.2f}m | eta: {'n/a' if eta is None else f'{eta / 60:.1f}m'}"
    )


LEGEND = (
    "a step's line: its loss (smoothed), lrm = share of the peak learning rate, dt = time of the step, bf16_mfu = % of the device's peak, "
    "pq and rg = file and part of it that is read, eta = time left; of an evaluation: bpb = bits per byte of held-out text, lower is better"
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


class MetricsFile(TrainerCallback):
    """Appends every logged row with step (optimizer steps made), attempt, time and tokens."""

    def __init__(self, run: RunDirectory, *, attempt: int, tokens_at: Callable[[int], int]):
        self.run, self.attempt, self.tokens_at = run, attempt, tokens_at

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and logs:
            stamp = {
                "step": state.global_step,
                "attempt": self.attempt,
                "time": time.time(),
                "tokens": self.tokens_at(state.global_step),
            }
            append_row(self.run.metrics, stamp | logs)
