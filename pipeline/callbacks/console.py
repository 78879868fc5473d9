"""The console's lines, one a logged step in the exact shape that people's parsers read, and one for each evaluation."""

import shutil
import sys
from pathlib import Path

from transformers import TrainerCallback
from transformers.utils import is_in_notebook

from pipeline.metrics import is_evaluation, metric_of
from pipeline.process.progress import write


def step_line(row: dict, *, step: int, max_steps: int) -> str:
    """Return the line of one logged step; `step` counts from zero."""
    mfu, eta = row.get("perf/bf16_mfu_pct"), row.get("perf/eta_s")
    mfu_text = "n/a" if mfu is None else f"{mfu:.2f}"
    eta_text = "n/a" if eta is None else f"{eta / 60:.1f}m"
    return (
        f"step {step:05d}/{max_steps:05d} ({100 * step / max_steps:.2f}%) | loss: {row['train/loss_ema']:.6f} | lrm: "
        f"{row['optim/lrm']:.2f} | dt: {1000 * row['perf/step_s']:.2f}ms | tok/sec: {int(row['perf/tok_per_s']):,} | "
        f"bf16_mfu: {mfu_text} | epoch: {row.get('data/epoch', 1)} pq: {row.get('data/pq', 0)} rg: "
        f"{row.get('data/rg', 0)} | total time: {row['perf/total_s'] / 60:.2f}m | eta: {eta_text}"
    )


def scores_line(row: dict, *, step: int) -> str | None:
    """Return the line of an evaluation after `step` steps; None for a row without results to show."""
    shown = []
    for name, value in row.items():
        metric = metric_of(name)
        of_a_source = name.count("/") > 1  # the whole mixture is shown, and not each of its sources
        if is_evaluation(name) and not of_a_source and (metric is None or metric.console):
            shown.append(f"{name}: {value:.6f}")
    return f"step {step:05d} | {' | '.join(shown)}" if shown else None


# What a narrow terminal has no room for, the least wanted first; the step and its loss stay.
DROPPED_FIRST = ("epoch", "total time", "lrm", "dt", "bf16_mfu", "tok/sec", "eta")


def fitted(line: str, columns: int) -> str:
    """Return the line in at most that many columns: without some of its fields, the last ones of an evaluation."""
    fields = line.split(" | ")
    names = [field.partition(":")[0] for field in fields]
    dropped = [*(name for name in DROPPED_FIRST if name in names), *reversed(names[2:])]
    for name in dropped:
        if len(" | ".join(fields)) <= columns:
            break
        fields = [field for field in fields if not field.startswith(f"{name}:")]
    return " | ".join(fields)


LEGEND = (
    "a step's line: its number, from 0; its loss (smoothed), lrm = share of the peak learning rate, dt = time of the "
    "step, bf16_mfu = % of the device's peak, pq and rg = file and part of it that is read, eta = time left; of an "
    "evaluation: the steps made before it; bpb = bits per byte of held-out text, lower is better"
)


class Console(TrainerCallback):
    """Prints the lines, and keeps them in console.log. In a notebook a table takes their place (tandem/notebook.py)."""

    def __init__(self, log: Path):
        self.log = log
        self.prints = not is_in_notebook()

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero and self.prints:
            write(LEGEND)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or not logs:
            return
        if "train/loss" in logs:
            self.print_line(step_line(logs, step=state.global_step - 1, max_steps=state.max_steps))
        if scores := scores_line(logs, step=state.global_step):
            self.print_line(scores)

    def print_line(self, line: str) -> None:
        if self.prints:
            is_seen = sys.stdout.isatty()  # what is no terminal gets the whole line, which programs read
            write(fitted(line, shutil.get_terminal_size().columns) if is_seen else line)
        with open(self.log, "a", encoding="utf-8") as file:
            file.write(line + "\n")
