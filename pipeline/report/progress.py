"""How the training went, in numbers beside the plots: learning rate, losses, gradient norm, system."""

from typing import Any

import numpy as np

from pipeline.report.run_data import RunData
from pipeline.report.scores import protocols_text
from pipeline.report.tables import filled_table, number, spread, table

ROWS_OF_A_TABLE = 16


def learning_rate_text(data: RunData) -> str:
    """Peak and last rate of each group, and where the peak was reached."""
    names = [name for name in data.columns.names() if name.startswith("optim/lr/")] or ["optim/lr"]
    names = [name for name in names if len(data.curve(name)[0])]
    if not names:
        return ""
    rows = []
    for name in names:
        steps, rates = data.curve(name)
        highest = int(rates.argmax())
        group = name.removeprefix("optim/lr").strip("/") or "all parameters"
        rows.append([group, f"{rates[highest]:.3g}", number(steps[highest].item()), f"{rates[-1]:.3g}"])
    return table(["learning rate of", "peak", "first at step", "last"], rows)


def losses_text(data: RunData) -> str:
    """What the loss began and ended with, its course, and the bits per byte."""
    steps, losses = data.curve("train/loss")
    if not len(steps):
        return "No step was logged.\n" + _bpb(data)
    of = f" of {number(data.max_steps())}" if data.max_steps() else ""
    facts: list[list[Any]] = [
        ["steps", f"{number(data.step())}{of}"],
        ["tokens (row positions)", number(data.tokens())],
        ["train/loss, first and last logged", f"{losses[0]:.4f}, {losses[-1]:.4f}"],
    ]
    for name in ("val/loss", "val/bpb", "val/bpb_documents", "sft/assistant_bpb"):
        at, values = data.curve(name)
        if len(at):
            facts.append(
                [
                    f"{name}, first, lowest, last",
                    f"{values[0]:.4f}, {values.min():.4f} (step {at[values.argmin()]:,}), {values[-1]:.4f}",
                ]
            )
    return "\n".join(part for part in (table(["what", "value"], facts), _history(data), _bpb(data)) if part)


def _history(data: RunData) -> str:
    """Some of the logged steps, evenly spaced."""
    names = ("tokens", "train/loss", "train/loss_ema", "optim/lr", "optim/grad_norm", "perf/tok_per_s", "perf/mfu_pct")
    steps = spread(data.curve("train/loss")[0].tolist(), ROWS_OF_A_TABLE)
    rows = [[step, *(number(_at(step, *data.curve(name)), 5) for name in names)] for step in steps]
    return filled_table(["step", *names], rows)


def _at(step: int, steps: np.ndarray, values: np.ndarray) -> float | None:
    place = np.searchsorted(steps, step)
    return values[place].item() if place < len(steps) and steps[place] == step else None


def _bpb(data: RunData) -> str:
    scores = data.scores()
    if not scores:
        return ""
    by_name: dict[tuple[str, str | None], list[Any]] = {}
    for score in scores:
        by_name.setdefault((score.name, score.of), []).append(score)
    rows = [
        [score.name, score.step, f"{score.value:.6f}", score.protocol, number(score.bytes), score.of]
        for group in by_name.values()
        for score in spread(group, ROWS_OF_A_TABLE)
    ]
    note = "### Bits per byte\n\nTwo figures compare only when their protocol is the same: it names what was scored and how.\n\n"
    table_of_scores = filled_table(["metric", "step", "value", "protocol", "bytes", "of"], rows)
    return "\n".join(part for part in (note + table_of_scores, protocols_text(scores)) if part)


def gradient_norm_text(data: RunData) -> str:
    """The norm before clipping, and what was clipped or left out."""
    steps, norms = data.curve("optim/grad_norm")
    if not len(steps):
        return ""
    highest = int(norms.argmax())
    rows: list[list[Any]] = [
        [
            "gradient norm before clipping: median, largest",
            f"{np.median(norms):.3g}, {norms[highest]:.3g} (step {steps[highest]:,})",
        ]
    ]
    limit = (data.recipe.get("train") or {}).get("max_grad_norm")
    if limit:
        rows.append(["clipped to (train.max_grad_norm)", number(limit)])
        rows.append(["logged steps above it", f"{number(int((norms > limit).sum()))} of {number(len(norms))}"])
    rows += [
        [name, number(data.last(name))]
        for name in ("optim/clip_frac", "optim/skipped_steps", "optim/nonfinite_steps")
        if data.last(name) is not None
    ]
    return table(["what", "value"], rows)


def system_text(data: RunData) -> str:
    """Median, lowest and highest of each number of the machine. The first logged interval, which compiles, is left out of rates."""
    rows = []
    for name in data.columns.names():
        if not name.startswith(("perf/", "mem/", "gpu/", "host/", "disk/", "net/", "data/wait_", "ckpt/")):
            continue
        _, values = data.curve(name)
        if name in ("perf/total_s", "perf/eta_s", "perf/first_step_s"):  # one of each says all
            rows.append([name, None, None, None, number(values[-1].item())])
            continue
        of_rates = values[1:] if name.startswith("perf/") and len(values) > 1 else values
        if len(of_rates):
            figures = (float(np.median(of_rates)), of_rates.min().item(), of_rates.max().item(), values[-1].item())
            rows.append([name, *map(number, figures)])
    return table(["number", "median", "lowest", "highest", "last"], rows) if rows else ""
