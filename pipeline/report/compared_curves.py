"""Curves of several runs over each other: on common axes, as panels and as tables of the losses."""

import math
from collections.abc import Sequence

import numpy as np

from pipeline.metrics import SFT_BPB, VAL_BPB, VAL_BPB_DOCUMENTS
from pipeline.report.curves import LOOKS, POINTS, WITHOUT_COMPILING, Curve, Panel, points_of, style_of, thin
from pipeline.report.markdown import joined, number, table, titled
from pipeline.report.run_data import RunData

SECTION = "Curves"
TABLE_POINTS = 8  # rows of a table
POINTS_OF_ALL = 20_000  # of all curves together: half a megabyte, however many runs there are
COMPARED_BPB = (VAL_BPB_DOCUMENTS, VAL_BPB, SFT_BPB)
COMPARED_AXES = {
    "step": "optimizer step",
    "tokens": "tokens (row positions)",
    "time": "minutes in steps",
    "flops": "training FLOPs",
}
# Title, unit, name, logarithmic. The training loss is drawn before them, bits per byte under one protocol after it.
METRICS = (
    ("Smoothed training loss", "nats per token", "train/loss_ema", False),
    ("Gradient norm before clipping", "L2 norm", "optim/grad_norm", True),
    ("Learning rate of the first parameter group", "", "optim/lr", False),
    ("Multiplier of all learning rates", "", "optim/lrm", False),
    ("Throughput", "tokens/s", "perf/tok_per_s", False),
)
Places = dict[str, tuple[np.ndarray, np.ndarray]]  # by axis: steps, and where each is


def positions(data: RunData, x: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (steps, where each is on the axis); both empty where the run does not tell it."""
    if x == "step":
        steps, _ = data.curve("step")
        return steps, steps.astype(float)
    if x == "time":
        # Time in steps, without evaluations and saves: the two cost what a run's cadence makes of them.
        steps, seconds = data.curve("perf/total_s")
        if len(steps) and steps[0] > 0:  # the evaluation before step 1 took no time in steps
            steps, seconds = np.insert(steps, 0, 0), np.insert(seconds, 0, 0)
        return steps, seconds / 60
    steps, tokens = data.curve("tokens")
    if x == "tokens":
        return steps, tokens.astype(float)
    flops = flops_per_token(data)
    if not flops:
        return np.empty(0, int), np.empty(0)
    return steps, tokens * float(flops)


def curve_over(data: RunData, x: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (places, values) of the metric over one of COMPARED_AXES, ascending; empty for a run that cannot tell
    both."""
    at, places = positions(data, x)
    steps, values = data.curve(name)
    # Only steps that have both: a row of an evaluation alone has no time, one of a step no validation.
    _, placed, measured = np.intersect1d(at, steps, return_indices=True)
    places, values = places[placed], values[measured]
    order = np.argsort(places, kind="stable")
    return places[order], values[order]


def flops_per_token(data: RunData) -> float | None:
    """Return a run's by our formula (exact matmuls, causal attention once); an imported log's as the log gives it."""
    # 1. The two rates of one logged step, where TFLOP/s are by our formula: their quotient is exact.
    if data.meaning_of("perf/tflops_per_gpu") is None:
        (at, rates), (steps, tflops) = data.curve("perf/tok_per_s_per_gpu"), data.curve("perf/tflops_per_gpu")
        at, rates = at[rates != 0], rates[rates != 0]
        _, rated, measured = np.intersect1d(at, steps, return_indices=True)
        if len(measured):
            return float(tflops[measured[0]] * 1e12 / rates[rated[0]])
    # 2. The plan's total over its tokens: a device without a known peak logs no TFLOP/s.
    flops, tokens = data.fact("plan.flops"), data.fact("plan.tokens")
    if isinstance(flops, (int, float)) and tokens:
        return flops / tokens
    # 3. What a log of another program says of itself.
    return data.fact("imported.flops_per_token")


def legends(runs: Sequence[RunData]) -> list[str]:
    """Return name, dtype and hardware of each run: curves were taken for another run's by their colour alone."""
    found = []
    for data in runs:
        trained = data.trained_on
        found.append(f"{data.name} ({trained})" if trained else data.name)
    return found


def loss_of_all(runs: Sequence[RunData]) -> str | None:
    """Return the training loss that all runs have; None where they have not one of the same name."""
    for name in ("train/loss", "train/loss_ema"):
        if all(data.last(name) is not None for data in runs):
            return name
    return None


def one_protocol(runs: Sequence[RunData], name: str) -> bool:
    """Return whether all runs that have the metric were scored on the same, and say so."""
    protocols = {data.protocol(name) for data in runs if data.last(name) is not None}
    return len(protocols) == 1 and None not in protocols


def comparison_panels(runs: Sequence[RunData]) -> tuple[list[Panel], dict[str, str]]:
    """Return the panels of what at least two runs have, or any run of the training loss; and the labels of their x
    axes."""
    runs = runs[:LOOKS]  # of more, curves could not be distinguished
    # 1. What is drawn: the training loss, bits per byte that compare, then what is left of METRICS.
    loss = loss_of_all(runs)
    title = METRICS[0][0] if loss == "train/loss_ema" else "Training loss"
    kinds: list[tuple[str, str, str | None, bool]] = [(title, "nats per token", loss, False)]
    kinds += [(name, "bits per byte", name, False) for name in COMPARED_BPB if one_protocol(runs, name)]
    kinds += [kind for kind in METRICS if kind[2] != loss]
    # 2. How finely, and over what.
    points = min(POINTS, POINTS_OF_ALL // max(len(runs) * len(kinds), 1))
    placed, unit = _places(runs)
    labels = dict(COMPARED_AXES)
    if unit:
        labels["flops"] += f", in 10^{unit}"
    # 3. A curve of each run that has the metric, in the place of its run: a run looks the same in every panel.
    panels = []
    for title, measured, name, log in kinds:
        curves, without = [], []
        for place, (label, data) in enumerate(zip(legends(runs), runs, strict=True)):
            steps, values = points_of(data, name or data.loss_name())
            if len(steps):
                thinned = thin(steps, values, points)
                curves.append(_curve(label, *thinned, place, placed[place], name or "train/loss"))
            else:
                without.append(data.name)
        # One curve compares nothing, but the training loss is drawn in any case.
        needed = 1 if name == loss else 2
        if sum(len(curve.y) > 1 for curve in curves) >= needed:
            log = log and all((curve.y > 0).all() for curve in curves)
            panels.append(Panel(SECTION, title, measured, log, curves, note=_note(runs, name, without)))
    return panels, labels


def _places(runs: Sequence[RunData]) -> tuple[list[Places], int]:
    """Return each run's places on each axis, and the power of ten in which its FLOPs are given."""
    placed, most = [], 1.0
    for data in runs:
        places = {axis: positions(data, axis) for axis in COMPARED_AXES}
        most = places["flops"][1].max(initial=most)
        placed.append(places)
    unit = int(math.log10(most) // 3 * 3)  # three by three, so that labels are short
    for places in placed:
        steps, flops = places["flops"]
        places["flops"] = steps, flops / 10.0**unit
    return placed, unit


def _curve(label: str, steps: np.ndarray, values: np.ndarray, place: int, placed: Places, name: str) -> Curve:
    """Return the curve. Between two steps that have a place on the axis a point is interpolated, outside of them it
    has none."""
    x = {}
    for axis, (at, places) in placed.items():
        if len(at):
            x[axis] = np.interp(steps, at, places, left=np.nan, right=np.nan)
            if np.isnan(x[axis]).all():
                del x[axis]
    return Curve(label, x, values, place, style_of(name, len(steps)))


def _note(runs: Sequence[RunData], name: str | None, without: list[str]) -> str:
    """Return whose number has another definition by that name, and which run has none."""
    sentences = []
    if name and name.startswith("perf/"):
        sentences.append(WITHOUT_COMPILING)
    for data in runs:
        own = name or data.loss_name()
        if name is None:
            sentences.append(f"{data.name}: {own}.")
        if meaning := data.meaning_of(own):
            sentences.append(f"{data.name}: {meaning}.")
    if without:
        sentences.append(f"Not recorded by {', '.join(without)}.")
    return " ".join(sentences)


def aligned_text(runs: Sequence[RunData]) -> str:
    """Return tables of the losses at common points of each axis, interpolated linearly, with differences from the
    first run."""
    parts = [table_of(runs, x, name) for name in _losses(runs) for x in COMPARED_AXES]
    parts += [table_of(runs, "tokens", name) for name in COMPARED_BPB if one_protocol(runs, name)]
    tokenizers = {data.fact("inputs.tokenizer.identity") for data in runs}
    if len(tokenizers - {None}) > 1:
        parts.append(
            "The tokenizers differ: a loss per token is not the same measure in these runs; bits per byte of whole "
            "documents are.\n"
        )
    return joined(*parts)


def table_of(runs: Sequence[RunData], x: str, name: str) -> str:
    """Return the table; "" when fewer than two of the runs have the metric on a common stretch of the axis."""
    curves = []
    for data in runs:
        places, values = curve_over(data, x, name)
        if len(places) > 1:
            curves.append((data.name, places, values))
    if len(curves) < 2:
        return ""
    # The stretch that all of them have: beyond its own points a curve is not known.
    start = max(places[0] for _, places, _ in curves)
    end = min(places[-1] for _, places, _ in curves)
    if start >= end:
        return ""
    common = np.linspace(start, end, TABLE_POINTS)
    if x == "step":
        common = np.unique(common.round())
    first, *others = [np.interp(common, places, values) for _, places, values in curves]
    columns = [[*map(_place, common.tolist())]]
    columns += [_formatted(values, ".4f") for values in (first, *others)]
    columns += [_formatted(values - first, "+.4f") for values in others]
    first_name, *names = [run for run, _, _ in curves]
    head = [COMPARED_AXES[x], first_name, *names, *(f"{run} - {first_name}" for run in names)]
    return titled(f"{name} by {COMPARED_AXES[x]}", table(head, list(zip(*columns, strict=True))))


def _formatted(values: np.ndarray, form: str) -> list[str | None]:
    return [format(value, form) for value in values.tolist()]


def _losses(runs: Sequence[RunData]) -> list[str]:
    """Return the losses to put side by side: that of the steps, and the smoothed one where a run has only that."""
    names = {data.loss_name() for data in runs}
    return sorted(name for name in names if sum(data.last(name) is not None for data in runs) > 1)


def _place(value: float) -> str | None:
    if value >= 1e10:
        return f"{value:.3e}"
    return number(round(value) if value >= 100 else round(value, 2))
