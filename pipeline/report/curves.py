"""Curves of runs, thinned for drawing and on a common axis."""

from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from pipeline.metrics import METRICS, is_evaluation, metric_of
from pipeline.report.run_data import RunData
from pipeline.report.run_metrics import RunMetrics
from pipeline.report.scores import MEANS

# How curves are distinguished: one colour and dash for each place in a legend, the same in every plot, picture and
# page.

# Colours that the colour-blind can distinguish (Okabe and Ito 2008) and on white as on black: the first, a blue, is
# lighter than theirs, which was dim on black.
COLOURS = ("#2382cc", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f7f")
DASHES = ("solid", "dashed", "dotted")  # as Bokeh, matplotlib and CSS call them
LOOKS = len(COLOURS) * len(DASHES)  # of more curves two would look the same


POINTS = 800  # of a curve; its lowest and highest value in each of half as many stretches
CURVES_OF_A_PANEL = 8  # as lines; of bars all
POINTS_OF_ALL = 16_000  # of all curves together, so that the page stays small however many there are


WITHOUT_COMPILING = "The first logged value of each start, which holds compilation, is left out."
FIRST_SCREEN = ""  # stands for a section where a panel is drawn above all of them


@dataclass(frozen=True)
class Kind:
    """A panel that a run may have: its section and y axis. The registry says which metrics it draws.

    rather: where a run has some of these metrics, the panel's others are not drawn.
    """

    section: str
    title: str
    unit: str
    log: bool = False
    rather: tuple[str, ...] = ()


KINDS = (
    Kind(FIRST_SCREEN, "Loss", "nats per token"),
    Kind("Curves", "Bits per byte", "bits per byte"),
    Kind("Curves", "Learning rate", "", rather=("optim/lr/<group>",)),
    Kind("Curves", "Gradient norm before clipping", "L2 norm", log=True),
    Kind("System", "Throughput", "tokens/s"),
    Kind("System", "Step time", "s"),
    Kind("System", "Share of the peak FLOP/s", "%"),
    Kind("System", "Memory", "GiB"),
    Kind("System", "Power", "W"),
    Kind("System", "Utilisation", "%"),
    Kind("System", "Temperature", "degrees Celsius"),
    Kind("Evaluations", "Benchmarks", "score", rather=MEANS),
)
SHOWN_POINTS = 60  # of an evaluation, which is measured now and then: where they are few, each point is shown


@dataclass(frozen=True)
class Curve:
    """x: the position of each point on each axis that is known, by the axis's name. place: in the legend, which gives
    its look."""

    name: str
    x: dict[str, np.ndarray]
    y: np.ndarray
    place: int
    style: str = "line"  # line, thin (a raw number behind its mean), points, level

    @property
    def colour(self) -> str:
        return COLOURS[self.place % len(COLOURS)]

    @property
    def dash(self) -> str:
        """Return solid for the first curves, which reads best: they differ by colour alone."""
        if self.style == "level":
            return "dashed"
        return DASHES[self.place // len(COLOURS) % len(DASHES)]


@dataclass(frozen=True)
class Panel:
    """marks: where the run was restarted and where it spiked, by the axis's name. note: what its numbers are not."""

    section: str
    title: str
    unit: str
    log: bool
    curves: list[Curve]
    marks: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    note: str = ""

    @property
    def is_bars(self) -> bool:
        """Return whether it has a first and a last value of each evaluation and nothing between: two points are no
        curve. The first screen keeps its place for the loss."""
        short = all(curve.style == "points" and len(curve.y) <= 2 for curve in self.curves)
        return short and self.section != FIRST_SCREEN


AXES = {"step": "optimizer step", "tokens": "tokens (row positions)", "hours": "hours running, all attempts"}


def panels_of(data: RunData) -> list[Panel]:
    """Return the panels for which the run has at least one curve of two points."""
    found = []
    for kind in KINDS:
        lengths = {name: len(points_of(data, name)[0]) for name in _names(data, kind)}
        if max(lengths.values(), default=0) > 1:
            found.append((kind, [name for name, length in lengths.items() if length]))
    # The more curves there are, the fewer points each may have: the page is at most 2 MB.
    count = sum(len(names) for _, names in found)
    points = min(POINTS, POINTS_OF_ALL // max(count, 1))
    axes = _Axes(data)
    marks = {kind: axes.of(steps) for kind, steps in _marks(data).items()}
    panels = []
    for kind, names in found:
        log, curves = _drawn(data, kind, names, axes, points)
        note = WITHOUT_COMPILING if names[0].startswith("perf/") else ""
        panel = Panel(kind.section, kind.title, kind.unit, log, curves, marks, note)
        if len(curves) > CURVES_OF_A_PANEL and not panel.is_bars:
            rest = ", ".join(names[CURVES_OF_A_PANEL:])
            panel = replace(panel, curves=curves[:CURVES_OF_A_PANEL], note=f"Not drawn: {rest}. {note}")
        panels.append(panel)
    return panels


def _names(data: RunData, kind: Kind) -> list[str]:
    """Return what the run has of the kind's metrics, in the registry's order."""
    places = list(METRICS)
    drawn: dict[str, str] = {}  # name -> its metric, which may be a family's
    for name in data.columns.names():
        metric = metric_of(name)
        if metric is not None and metric.panel == kind.title:
            drawn[name] = metric.name
    found = sorted(drawn, key=lambda name: places.index(drawn[name]))
    preferred = [name for name in found if drawn[name] in kind.rather]
    return preferred or found


def finite(data: RunData, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the curve of a metric without what is no number."""
    steps, values = data.curve(name)
    known = np.isfinite(values)
    return steps[known], values[known]


def points_of(data: RunData, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return what is drawn of a metric; of speed without the first step of each start, beside which no other is
    seen."""
    if name.startswith("perf/"):
        timed = RunMetrics(data).timed(name)
        return timed.steps, timed.values
    return finite(data, name)


def _drawn(data: RunData, kind: Kind, names: list[str], axes: "_Axes", points: int) -> tuple[bool, list[Curve]]:
    curves = []
    for place, name in enumerate(names):
        steps, values = thin(*points_of(data, name), points)
        style = style_of(name, len(steps))
        if name == "train/loss" and "train/loss_ema" in names:
            style = "thin"
        curves.append(Curve(name, axes.of(steps), values, place, style))
    # The limit as a level in its panel, from the first point to the last: what is above it was clipped.
    limit = data.setting("train.max_grad_norm")
    if kind.title == "Gradient norm before clipping" and isinstance(limit, (int, float)) and limit > 0:
        ends = {axis: x[[0, -1]] for axis, x in curves[0].x.items()}
        curves.append(Curve("train.max_grad_norm", ends, np.array([limit, limit]), len(curves), "level"))
    return kind.log and all((curve.y > 0).all() for curve in curves), curves


def style_of(name: str, count: int) -> str:
    """Return "points" where the metric is measured now and then and few of them are there, else line."""
    return "points" if count == 1 or (is_evaluation(name) and count <= SHOWN_POINTS) else "line"


def drawable(y: np.ndarray) -> np.ndarray:
    """Return the values without those that no axis of matplotlib has ticks for."""
    return np.where(np.abs(y) < 1e100, y, np.nan)


def thin(x: np.ndarray, y: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return at most `count` of the points: the lowest and the highest of each stretch, so that no spike is lost, and
    both ends."""
    if len(x) <= count:
        return x, y
    edges = np.linspace(0, len(x), max((count - 2) // 2, 1) + 1).astype(int)
    kept = [0, len(x) - 1]
    for start, end in pairwise(edges):
        kept += [start + y[start:end].argmin(), start + y[start:end].argmax()]
    places = np.unique(kept)
    return x[places], y[places]


def _marks(data: RunData) -> dict[str, np.ndarray]:
    """Return steps of the run's restarts, spikes and steps that were not finite."""
    found = {}
    for mark, event in (("restart", "attempt"), ("spike", "spike"), ("not finite", "nonfinite")):
        steps = np.array([row["step"] for row in data.events(event)], int)
        if event == "attempt":
            steps = steps[steps > 0]
        if len(steps):
            found[mark], _ = thin(steps, steps, 100)
    return found


class _Axes:
    """Map steps to tokens and hours; an axis that the rows do not hold is left out."""

    def __init__(self, data: RunData) -> None:
        self.known = {"tokens": data.curve("tokens"), "hours": _hours(data)}

    def of(self, steps: np.ndarray) -> dict[str, np.ndarray]:
        found = {name: np.interp(steps, at, values) for name, (at, values) in self.known.items() if len(at)}
        return {"step": steps} | found


def _hours(data: RunData) -> tuple[np.ndarray, np.ndarray]:
    """Return (steps, hours): time at work, waits between attempts left out. What an attempt lost has taken its time
    too."""
    steps, times = data.curve("time")
    attempts = data.curve("attempt")
    if not len(steps) or not data.running:
        return np.empty(0), np.empty(0)
    of = np.zeros(len(steps))  # the attempt of each row
    if len(attempts[0]):
        of = np.interp(steps, *attempts).round()
    # An attempt begins where the one before gave its last sign of life. What it made again comes later in time at
    # steps that came before, so the sum is held to its highest value so far.
    hours, before = np.zeros(len(steps)), 0.0
    for attempt, began, last in data.running:
        own = of == attempt
        hours[own] = before + (times[own] - began) / 3600
        before += (last - began) / 3600
    return steps, np.maximum.accumulate(hours)
