"""The console's line and the row of metrics.jsonl."""

import time
from pathlib import Path

from transformers import TrainerCallback

from pipeline.metrics import is_evaluation, metric_of
from pipeline.process.progress import write
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


class Console(TrainerCallback):
    """Prints and keeps the lines in console.log."""

    def __init__(self, log: Path):
        self.log = log

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


# metrics.jsonl: the source of truth that report, comparison and trackers' catching up read.


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
