"""Runs on a common axis: by step, tokens, time or FLOPs."""

from collections.abc import Sequence

import numpy as np

from pipeline.metrics import SFT_BPB, VAL_BPB, VAL_BPB_DOCUMENTS
from pipeline.report.imported_logs import meaning_of
from pipeline.report.run_data import RunData, number, table

POINTS = 8  # rows of a table
COMPARED_BPB = (VAL_BPB_DOCUMENTS, VAL_BPB, SFT_BPB)
COMPARED_AXES = {
    "step": "optimizer step",
    "tokens": "tokens (row positions)",
    "time": "minutes in steps",
    "flops": "training FLOPs",
}


def curves_of(
    runs: Sequence[RunData], x: str = "tokens", name: str | None = None
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return {legend: (x, y)} of the metric over one of AXES, ascending; a run that cannot tell both is left out.

    name: default the training loss under the name that each run has it by. The legend carries dtype and hardware.
    """
    found = {}
    for label, data in zip(legends(runs), runs, strict=True):
        at, places = positions(data, x)
        steps, values = data.curve(name or data.loss_name())
        placed, measured = _in_both(at, steps)
        if len(measured):
            order = np.argsort(places[placed], kind="stable")
            found[label] = places[placed][order], values[measured][order]
    return found


def positions(data: RunData, x: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (steps, where each is on the axis); both empty where the run does not tell it."""
    if x == "step":
        steps, _ = data.curve("step")
        return steps, steps.astype(float)
    if x == "time":  # without evaluations and saves; a row of an evaluation alone is where its step ended
        steps, seconds = data.curve("perf/total_s")
        start = [0] if len(steps) and steps[0] > 0 else []
        return np.concatenate([start, steps]).astype(int), np.concatenate([start, seconds / 60])
    steps, tokens = data.curve("tokens")
    if x == "tokens":
        return steps, tokens.astype(float)
    flops = flops_per_token(data)
    return (steps, tokens * float(flops)) if flops else (np.empty(0, int), np.empty(0))


def _in_both(at: np.ndarray, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where the steps that are in both stand in each; both ascend."""
    places = np.searchsorted(at, steps)
    found = np.flatnonzero(places < len(at))
    found = found[at[places[found]] == steps[found]]
    return places[found], found


def flops_per_token(data: RunData) -> float | None:
    """Return a run's by our formula (exact matmuls, causal attention once); an imported log's as the log gives it."""
    if meaning_of(data, "perf/tflops_per_gpu") is None:
        (at, rates), (steps, tflops) = data.curve("perf/tok_per_s_per_gpu"), data.curve("perf/tflops_per_gpu")
        rated, measured = _in_both(at[rates != 0], steps)
        if len(measured):
            return float(tflops[measured[0]] * 1e12 / rates[rates != 0][rated[0]])
    plan = data.manifest.get("plan") or {}
    if isinstance(plan.get("flops"), (int, float)) and plan.get("tokens"):
        return plan["flops"] / plan["tokens"]
    return (data.manifest.get("imported") or {}).get("flops_per_token")


def legends(runs: Sequence[RunData]) -> list[str]:
    """Return name, dtype and hardware of each run: curves were taken for another run's by their colour alone."""
    return [f"{data.name} ({trained})" if (trained := trained_on(data)) else data.name for data in runs]


def trained_on(data: RunData) -> str | None:
    """Return dtype and hardware, as far as they are known."""
    shape = data.manifest.get("shape") or {}
    count, device = shape.get("processes"), shape.get("device")
    facts = [shape.get("dtype"), f"{count} x {device}" if device and count else device]
    return ", ".join(str(fact) for fact in facts if fact) or None


def aligned_text(runs: Sequence[RunData]) -> str:
    """Return tables of the losses at common points of each axis, interpolated linearly, with differences from the first run."""
    parts = [table_of(runs, x, name) for name in _losses(runs) for x in COMPARED_AXES]
    parts += [table_of(runs, "tokens", name) for name in COMPARED_BPB if one_protocol(runs, name)]
    tokenizers = {((data.manifest.get("inputs") or {}).get("tokenizer") or {}).get("identity") for data in runs}
    if len(tokenizers - {None}) > 1:
        parts.append(
            "The tokenizers differ: a loss per token is not the same measure in these runs; bits per byte of whole documents are.\n"
        )
    return "\n".join(part for part in parts if part)


def one_protocol(runs: Sequence[RunData], name: str) -> bool:
    """Return whether all runs that have the metric were scored on the same, and say so."""
    protocols = {data.protocol(name) for data in runs if data.last(name) is not None}
    return len(protocols) == 1 and None not in protocols


def table_of(runs: Sequence[RunData], x: str, name: str) -> str:
    """Return the table; "" when fewer than two of the runs have the metric on a common stretch of the axis."""
    curves = {data.name: c for data in runs for c in curves_of([data], x, name).values() if len(c[0]) > 1}
    if len(curves) < 2:
        return ""
    start, end = max(xs[0] for xs, _ in curves.values()), min(xs[-1] for xs, _ in curves.values())
    if start >= end:
        return ""
    places = np.linspace(start, end, POINTS)
    if x == "step":
        places = np.unique(np.round(places))
    values = [np.interp(places, xs, ys) for xs, ys in curves.values()]
    rows = [
        [_place(place), *(f"{v[i]:.4f}" for v in values), *(f"{v[i] - values[0][i]:+.4f}" for v in values[1:])]
        for i, place in enumerate(places.tolist())
    ]
    names = list(curves)
    head = [COMPARED_AXES[x], *names, *(f"{name} - {names[0]}" for name in names[1:])]
    return f"### {name} by {COMPARED_AXES[x]}\n\n" + table(head, rows)


def _losses(runs: Sequence[RunData]) -> list[str]:
    """Return the losses to put side by side: that of the steps, and the smoothed one where a run has only that."""
    names = [data.loss_name() for data in runs]
    several = [name for name in dict.fromkeys(names) if sum(data.last(name) is not None for data in runs) > 1]
    return sorted(several)


def _place(value: float) -> str | None:
    return f"{value:.3e}" if value >= 1e10 else number(round(value) if value >= 100 else round(value, 2))
