"""Which curves of several runs are drawn over each other: one panel a metric, one look a run, on the axes of aligned.py."""

import math
from collections.abc import Sequence

import numpy as np

from pipeline.report.aligned import AXES, COMPARED_BPB, legends, one_protocol, positions
from pipeline.report.curves import POINTS, Curve, Panel, finite, style_of, thin
from pipeline.report.imports.imported_run import meaning_of
from pipeline.report.palette import LOOKS
from pipeline.report.run_data import RunData

SECTION = "Curves"
POINTS_OF_ALL = 20_000  # of all curves together: half a megabyte, however many runs there are
# Title, unit, name, logarithmic. The training loss stands before them, bits per byte under one protocol behind it.
METRICS = (
    ("Smoothed training loss", "nats per token", "train/loss_ema", False),
    ("Gradient norm before clipping", "L2 norm", "optim/grad_norm", True),
    ("Learning rate of the first parameter group", "", "optim/lr", False),
    ("Multiplier of all learning rates", "", "optim/lrm", False),
    ("Throughput", "tokens/s", "perf/tok_per_s", False),
)
Places = dict[str, tuple[np.ndarray, np.ndarray]]  # by axis: steps, and where each lies


def drawn(runs: Sequence[RunData]) -> Sequence[RunData]:
    """The runs whose curves can be told apart."""
    return runs[:LOOKS]


def drawn_text(runs: Sequence[RunData]) -> str:
    """Which runs have no curves; "" where all have."""
    if len(runs) <= LOOKS:
        return ""
    return (
        f"Drawn are the first {LOOKS} of the {len(runs)} runs, more could not be told apart; the tables hold all.\n\n"
    )


def loss_of_all(runs: Sequence[RunData]) -> str | None:
    """The training loss that all runs have; None where they have not one of the same name."""
    return next(
        (name for name in ("train/loss", "train/loss_ema") if all(data.last(name) is not None for data in runs)), None
    )


def comparison_panels(runs: Sequence[RunData]) -> tuple[list[Panel], dict[str, str]]:
    """The panels of what at least two runs have, or any run of the training loss; and the labels of their x axes."""
    runs = drawn(runs)
    loss = loss_of_all(runs)
    title = METRICS[0][0] if loss == "train/loss_ema" else "Training loss"
    kinds: list[tuple[str, str, str | None, bool]] = [(title, "nats per token", loss, False)]
    kinds += [(name, "bits per byte", name, False) for name in COMPARED_BPB if one_protocol(runs, name)]
    kinds += [kind for kind in METRICS if kind[2] != loss]
    having = [[data for data in runs if len(finite(data, _name(data, name))[0]) > 1] for _, _, name, _ in kinds]
    kinds = [kind for n, kind in enumerate(kinds) if len(having[n]) > 1 or (n == 0 and having[n])]
    points = min(POINTS, POINTS_OF_ALL // max(len(runs) * len(kinds), 1))
    placed = [{axis: positions(data, axis) for axis in AXES} for data in runs]
    unit = _thousands(max((flops[-1] for at in placed if len(flops := at["flops"][1])), default=1.0))
    for at in placed:
        at["flops"] = at["flops"][0], at["flops"][1] / 10.0**unit
    panels = []
    for title, measured, name, log in kinds:
        curves = [
            _curve(data, label, _name(data, name), place, points, placed[place])
            for place, (label, data) in enumerate(zip(legends(runs), runs, strict=True))
            if len(finite(data, _name(data, name))[0])
        ]
        log = log and all((curve.y > 0).all() for curve in curves)
        panels.append(Panel(SECTION, title, measured, log, curves, note=_note(runs, name)))
    return panels, AXES | ({"flops": f"{AXES['flops']}, in 10^{unit}"} if unit else {})


def _name(data: RunData, name: str | None) -> str:
    return name or data.loss_name()


def _curve(data: RunData, label: str, name: str, place: int, points: int, placed: Places) -> Curve:
    """Between two steps that have a place on the axis a point lies between them; before the first and behind the last, nowhere."""
    steps, values = thin(*finite(data, name), points)
    x = {
        axis: np.interp(steps, at, places, left=np.nan, right=np.nan)
        for axis, (at, places) in placed.items()
        if len(at)
    }
    known = {axis: places for axis, places in x.items() if np.isfinite(places).any()}
    return Curve(label, known, values, place, style_of(name, len(steps)))


def _thousands(most: float) -> int:
    """The exponent of ten, three by three, in which so many are a number for people."""
    return int(math.log10(max(most, 1.0)) // 3 * 3)


def _note(runs: Sequence[RunData], name: str | None) -> str:
    """Whose number is another one by that name, and who has none."""
    names = {data.name: _name(data, name) for data in runs}
    told = [f"{data.name}: {names[data.name]}." for data in runs] if name is None else []
    told += [f"{data.name}: {meaning}." for data in runs if (meaning := meaning_of(data, names[data.name]))]
    without = [data.name for data in runs if not len(finite(data, names[data.name])[0])]
    told += [f"Not told by {', '.join(without)}."] if without else []
    return " ".join(told)
