"""Curves of runs, thinned for drawing and on a common axis, and the power law through finished runs of one family."""

import hashlib
import json
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.metrics import METRICS, SFT_BPB, VAL_BPB, VAL_BPB_DOCUMENTS, is_evaluation, metric_of, why_not_compared
from pipeline.process.commands import program
from pipeline.process.errors import InputMissingError, RecipeError
from pipeline.process.storage import read_json, write_json
from pipeline.recipe import Recipe
from pipeline.recipe.counted_sizes import CountedSizes
from pipeline.recipe.resolve import differences, must_match
from pipeline.recipe.sizes import Sizes
from pipeline.report.imported_logs import meaning_of
from pipeline.report.run_data import MEANS, RunData, joined, number, table
from pipeline.run_dir.run_directory import fit_file

# Curves: of one run, thinned for drawing in panels by step, tokens or time, and of several on a common axis.

# How curves are distinguished: one colour and dash for each place in a legend, the same in every plot, picture and
# page.

# Colours that the colour-blind can distinguish (Okabe and Ito 2008) and on white as on black.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f7f")
DASHES = ("solid", "dashed", "dotted")  # as Bokeh, matplotlib and CSS call them
LOOKS = len(COLOURS) * len(DASHES)  # of more curves two would look the same


def look(place: int) -> tuple[str, str]:
    """Return (colour, dash): the first curves are solid, which reads best, and differ by colour alone."""
    return COLOURS[place % len(COLOURS)], DASHES[place // len(COLOURS) % len(DASHES)]


POINTS = 800  # of a curve; its lowest and highest value in each of half as many stretches
POINTS_OF_ALL = 16_000  # of all curves together, so that the page stays small however many there are
CURVES_OF_A_PANEL = 8


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
    style: str = "line"  # line, light (a raw number behind its mean), points, level


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


AXES = {"step": "optimizer step", "tokens": "tokens (row positions)", "hours": "hours running, all attempts"}


def panels_of(data: RunData) -> list[Panel]:
    """Return the panels for which the run has at least one curve of two points."""
    found = [(kind, [name for name in _names(data, kind) if len(finite(data, name)[0])]) for kind in KINDS]
    found = [(kind, names) for kind, names in found if any(len(finite(data, name)[0]) > 1 for name in names)]
    count = sum(len(names) for _, names in found)
    points = min(POINTS, POINTS_OF_ALL // max(count, 1))
    axes = _Axes(data)
    marks = {kind: axes.of(steps) for kind, steps in _marks(data).items()}
    return [
        Panel(kind.section, kind.title, kind.unit, *_drawn(data, kind, names, axes, points), marks)
        for kind, names in found
    ]


def _names(data: RunData, kind: Kind) -> list[str]:
    """Return what the run has of the kind's metrics, in the registry's order."""
    places = list(METRICS)
    drawn = {
        name: metric.name
        for name in data.columns.names()
        if (metric := metric_of(name)) and metric.panel == kind.title
    }
    found = sorted(drawn, key=lambda name: places.index(drawn[name]))
    return ([name for name in found if drawn[name] in kind.rather] or found)[:CURVES_OF_A_PANEL]


def finite(data: RunData, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the curve of a metric without what is no number."""
    steps, values = data.curve(name)
    known = np.isfinite(values)
    return steps[known], values[known]


def _drawn(data: RunData, kind: Kind, names: list[str], axes: "_Axes", points: int) -> tuple[bool, list[Curve]]:
    curves = []
    for place, name in enumerate(names):
        steps, values = thin(*finite(data, name), points)
        style = style_of(name, len(steps))
        if name == "train/loss" and "train/loss_ema" in names:
            style = "light"
        curves.append(Curve(name, axes.of(steps), values, place, style))
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
    stretches = pairwise(edges)
    kept = {place for a, b in stretches for place in (a + y[a:b].argmin(), a + y[a:b].argmax())}
    places = np.array(sorted(kept | {0, len(x) - 1}))
    return x[places], y[places]


def _marks(data: RunData) -> dict[str, np.ndarray]:
    """Return steps of the run's restarts, spikes and steps that were not finite."""
    found = {
        "restart": [row["step"] for row in data.events("attempt") if row.get("step")],
        "spike": [row["step"] for row in data.events("spike") if "step" in row],
        "not finite": [row["step"] for row in data.events("nonfinite") if "step" in row],
    }
    return {name: thin(np.array(steps), np.array(steps), 100)[0] for name, steps in found.items() if steps}


class _Axes:
    """Map steps to tokens and hours; an axis that the rows do not hold is left out."""

    def __init__(self, data: RunData) -> None:
        self.known = {"tokens": data.curve("tokens"), "hours": _hours(data)}

    def of(self, steps: np.ndarray) -> dict[str, np.ndarray]:
        found = {"step": steps}
        for name, (at, values) in self.known.items():
            if len(at):
                found[name] = np.interp(steps, at, values)
        return found


def _hours(data: RunData) -> tuple[np.ndarray, np.ndarray]:
    """Return (steps, hours): time at work, waits between attempts left out. What an attempt lost has taken its time
    too."""
    steps, times = data.curve("time")
    attempts = data.curve("attempt")
    if not len(steps) or not data.running:
        return np.empty(0), np.empty(0)
    of = np.interp(steps, *attempts).round() if len(attempts[0]) else np.zeros(len(steps))
    hours, before = np.zeros(len(steps)), 0.0
    for attempt, began, last in data.running:
        own = of == attempt
        hours[own] = before + (times[own] - began) / 3600
        before += (last - began) / 3600
    return steps, np.maximum.accumulate(hours)


# Several runs on a common axis: by step, tokens, time or FLOPs.

TABLE_POINTS = 8  # rows of a table
COMPARED_BPB = (VAL_BPB_DOCUMENTS, VAL_BPB, SFT_BPB)
COMPARED_AXES = {
    "step": "optimizer step",
    "tokens": "tokens (row positions)",
    "time": "minutes in steps",
    "flops": "training FLOPs",
}


def curve_over(data: RunData, x: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (places, values) of the metric over one of COMPARED_AXES, ascending; empty for a run that cannot tell
    both."""
    at, places = positions(data, x)
    steps, values = data.curve(name)
    _, placed, measured = np.intersect1d(at, steps, return_indices=True)
    order = np.argsort(places[placed], kind="stable")
    return places[placed][order], values[measured][order]


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


def flops_per_token(data: RunData) -> float | None:
    """Return a run's by our formula (exact matmuls, causal attention once); an imported log's as the log gives it."""
    if meaning_of(data, "perf/tflops_per_gpu") is None:
        (at, rates), (steps, tflops) = data.curve("perf/tok_per_s_per_gpu"), data.curve("perf/tflops_per_gpu")
        _, rated, measured = np.intersect1d(at[rates != 0], steps, return_indices=True)
        if len(measured):
            return float(tflops[measured[0]] * 1e12 / rates[rates != 0][rated[0]])
    flops, tokens = data.fact("plan.flops"), data.fact("plan.tokens")
    if isinstance(flops, (int, float)) and tokens:
        return flops / tokens
    return data.fact("imported.flops_per_token")


def legends(runs: Sequence[RunData]) -> list[str]:
    """Return name, dtype and hardware of each run: curves were taken for another run's by their colour alone."""
    return [f"{data.name} ({trained})" if (trained := trained_on(data)) else data.name for data in runs]


def trained_on(data: RunData) -> str | None:
    """Return dtype and hardware, as far as they are known."""
    count, device = data.fact("shape.processes"), data.fact("shape.device")
    facts = [data.fact("shape.dtype"), f"{count} x {device}" if device and count else device]
    return ", ".join(str(fact) for fact in facts if fact) or None


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


def one_protocol(runs: Sequence[RunData], name: str) -> bool:
    """Return whether all runs that have the metric were scored on the same, and say so."""
    protocols = {data.protocol(name) for data in runs if data.last(name) is not None}
    return len(protocols) == 1 and None not in protocols


def table_of(runs: Sequence[RunData], x: str, name: str) -> str:
    """Return the table; "" when fewer than two of the runs have the metric on a common stretch of the axis."""
    curves = {data.name: curve_over(data, x, name) for data in runs}
    curves = {run: curve for run, curve in curves.items() if len(curve[0]) > 1}
    if len(curves) < 2:
        return ""
    start, end = max(xs[0] for xs, _ in curves.values()), min(xs[-1] for xs, _ in curves.values())
    if start >= end:
        return ""
    places = np.linspace(start, end, TABLE_POINTS)
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


# `python -m pipeline.report --fit RUN RUN RUN`: what runs of one family reached over their FLOPs, and what the next
# one will.
#
# Only from the user's own finished runs that differ in size and seed alone: constants of others hold for their data,
# tokenizer and recipe. What was found is kept as fit-<family>.json beside the runs, where preflight looks for the
# family of a recipe.

LEAST = 3  # different x
NO_FLOOR, HIGHEST_FLOOR, FLOORS = 0.5, 0.9, 60
EXPONENTS = (0.01, 1.0)
LEAST_NOISE, MOST_NOISE, NOISES = 0.0003, 0.02, 14


@dataclass(frozen=True)
class PowerLaw:
    """y = floor + exp(a + b (ln x - middle)) for F floors and N noises of ln y, and how likely each pair is.

    floors, a, b, middle, a_variance, b_variance: (F,), variances in units of the noise's. noises: (N,). weights: (F,
    N), of sum 1.
    """

    floors: np.ndarray
    a: np.ndarray
    b: np.ndarray
    middle: np.ndarray
    a_variance: np.ndarray
    b_variance: np.ndarray
    noises: np.ndarray
    weights: np.ndarray

    def predict(self, x: float) -> tuple[float, float, float]:
        """Return the median at x, and the 95 % prediction interval of one further run there (its own noise
        included)."""
        median, low, high = (self._quantile(x, chance) for chance in (0.5, 0.025, 0.975))
        return median, low, high

    def likeliest(self) -> tuple[float, float, float]:
        """Return floor, factor and exponent of y = floor + factor x^exponent that the points speak for most."""
        best = int(self.weights.sum(axis=1).argmax())
        a, b, middle = (float(values[best]) for values in (self.a, self.b, self.middle))
        return float(self.floors[best]), math.exp(a - b * middle), b

    def highest_floor(self) -> float:
        """Return the floor that 97.5 % of the weight do not exceed."""
        return float(self.floors[int((self.weights.sum(axis=1).cumsum() < 0.975).sum())])

    def _further_run(self, x: float) -> tuple[np.ndarray, np.ndarray]:
        """Return (F, 1) ln y at x, and (F, N) its standard deviation."""
        away = math.log(x) - self.middle
        power = np.exp(self.a + self.b * away)
        y = self.floors + power
        spread = 1 + (power / y) ** 2 * (self.a_variance + away**2 * self.b_variance)
        return np.log(y)[:, None], np.sqrt(spread)[:, None] * self.noises

    def _chance_below(self, log_y: float, means: np.ndarray, errors: np.ndarray) -> float:
        return float((self.weights * _normal_below((log_y - means) / errors)).sum())

    def _quantile(self, x: float, chance: float) -> float:
        means, errors = self._further_run(x)
        low, high = float((means - 8 * errors).min()), float((means + 8 * errors).max())
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if self._chance_below(middle, means, errors) < chance else (low, middle)
        return math.exp(high)


def fit_power_law(x: Sequence[float], y: Sequence[float]) -> PowerLaw:
    """Return the laws through the points. Raises ValueError for fewer than three different x, and where y does not
    fall."""
    if len(set(x)) < LEAST:
        raise ValueError(f"{len(set(x))} different x, and a law with an interval takes {LEAST}")
    u, ys = np.log(np.array(x)), np.array(y)
    floors = np.append(0.0, HIGHEST_FLOOR * min(y) * (np.arange(FLOORS) + 0.5) / FLOORS)
    prior = np.append(NO_FLOOR, np.full(FLOORS, (1 - NO_FLOOR) / FLOORS))
    # ln(y - floor) is a line in ln x; its noise is that of ln y times y / (y - floor), hence the weights.
    over = ys - floors[:, None]
    share, v = over / ys, np.log(over)
    weight = share**2
    total = weight.sum(axis=1)
    middle, a = (weight * u).sum(axis=1) / total, (weight * v).sum(axis=1) / total
    du, dv = u - middle[:, None], v - a[:, None]
    across = (weight * du**2).sum(axis=1)
    b = (weight * du * dv).sum(axis=1) / across
    squares = (((dv - b[:, None] * du) * share) ** 2).sum(axis=1)
    possible = (-b > EXPONENTS[0]) & (-b < EXPONENTS[1])
    if not possible.any():
        raise ValueError(
            f"y changes as x^{b[0]:.3f}, and a law takes an exponent from -{EXPONENTS[0]} to -{EXPONENTS[1]}"
        )
    # Points that fit no law to 2 % bring their own measure of noise.
    most = max(MOST_NOISE, 4 * math.sqrt(squares.min() / len(x)))
    noises = np.geomspace(LEAST_NOISE, most, NOISES)
    # a and b integrated out: they leave a factor noise^2 / sqrt(total across), and their prior 1 / |b|.
    by_floor = np.where(possible, np.log(prior) - np.log(total * across) / 2 - np.log(np.abs(b)), -np.inf)
    logs = by_floor[:, None] - (len(x) - 2) * np.log(noises) - squares[:, None] / (2 * noises**2)
    weights = np.exp(logs - logs.max())
    return PowerLaw(floors, a, b, middle, 1 / total, 1 / across, noises, weights / weights.sum())


def _normal_below(z: np.ndarray) -> np.ndarray:
    """Return the normal distribution's chance below z."""
    return np.vectorize(math.erfc)(-z / math.sqrt(2)) / 2


# Keys in which runs of a family may differ: seed and sizes; what the depth dial sets from them; horizons, judged by
# their rule.
OF_SIZE = r"train\.seed|model\.(depth|n_layer|n_embd|n_head|n_kv_head|n_inner)"
OF_THE_DIAL = (
    r"data\.batch_tokens|optimizer\.rate_scale|optimizer\.groups\.\w+\.(learning_rate|weight_decay)"
    r"|optimizer\.schedule\.warmup_steps"
)
OF_HORIZON = r"run\.(tokens|tokens_per_param|flops)|train\.(max_steps|num_train_epochs)"
SAME_RULE = 0.02  # relative: steps are whole
# A law from runs of 16, 76 and 223 steps missed one of 499 by 10.8 %, outside its interval (docs/log.md 2026-11-25)
FEW_STEPS = 200
FARTHEST = 30  # times the FLOPs of the largest run: as far as the interval's coverage was simulated


@dataclass(frozen=True)
class Expected:
    """val/bpb that a run is to end with, its 95 % prediction interval, and the file that says so."""

    value: float
    low: float
    high: float
    fit: str
    runs: int
    beyond: float  # FLOPs of the run over those of the largest that was fitted

    def facts(self) -> dict[str, Any]:
        """Return the expectation as run_manifest.json holds it."""
        return {"value": self.value, "low": self.low, "high": self.high, "fit": self.fit}


def fit_runs(runs: list[RunData]) -> tuple[Path, str]:
    """Fit the runs and write the file; gives its path and a text about it. Raises RecipeError or InputMissingError,
    all reasons at once."""
    _refuse_unfinished(runs)
    _refuse_unlike(runs)
    points = sorted((_point(data) for data in runs), key=lambda point: point["flops"])
    rule = _rule(points)
    if len({point["flops"] for point in points}) < LEAST:
        raise RecipeError(
            f"--fit: {len(points)} runs of {len({point['flops'] for point in points})} sizes, and a fit takes {LEAST} "
            "sizes: two points always lie on a line, whatever their noise. Train another size of this family (make "
            "ladder trains three)."
        )
    try:
        law = _law(points)
    except ValueError as error:
        raise RecipeError(
            f"--fit: the runs lie on no power law ({error}), so they tell nothing of a further one. Look at the "
            f"curves of the runs first: {program('report')} RUN RUN RUN"
        ) from None
    family = family_of(runs[0].manifest["must_match"])
    path = fit_file(runs[0].run.path.resolve().parent, family)
    found = {
        "family": family,
        "metric": VAL_BPB,
        "protocol": runs[0].protocol(VAL_BPB),
        "rule": rule,
        "law": dict(zip(("floor", "factor", "exponent"), law.likeliest(), strict=True)),
        "points": points,
        "time": time.time(),
    }
    write_json(path, found)
    return path, _text(points, law, rule)


def expected_bpb(recipe: Recipe, sizes: Sizes | CountedSizes | None, *, tokens: int | None) -> Expected | None:
    """Return what fitted runs of the recipe's family let expect; None when there are none, or its horizon follows
    another rule."""
    if sizes is None or tokens is None:
        return None
    path = fit_file(Path(recipe.run.directory), family_of(must_match(recipe)))
    if not path.is_file():
        return None
    flops = (sizes.flops_per_token("nanochat") or 0.0) * tokens
    if not flops or sizes.scaling is None:
        return None
    found = read_json(path)
    ((rule, value),) = found["rule"].items()
    own = {"tokens": tokens, "tokens_per_param": tokens / sizes.scaling}
    if abs(own[rule] / value - 1) > SAME_RULE:
        return None
    largest = found["points"][-1]["flops"]
    try:
        law = _law(found["points"])
    except ValueError:
        return None  # an earlier version drew a line through anything
    return Expected(*law.predict(flops), fit=path.name, runs=len(found["points"]), beyond=flops / largest)


def family_of(keys: dict[str, Any]) -> str:
    """Return 6 hex digits of the keys of a run that its family shares."""
    return hashlib.sha256(json.dumps(_shared(keys), sort_keys=True).encode()).hexdigest()[:6]


def _shared(keys: dict[str, Any]) -> dict[str, Any]:
    dial = keys.get("model.depth") is not None
    may_differ = re.compile("|".join([OF_SIZE, OF_HORIZON, *([OF_THE_DIAL] if dial else [])]))
    return {name: value for name, value in keys.items() if not may_differ.fullmatch(name)} | {"dial": dial}


def _refuse_unfinished(runs: list[RunData]) -> None:
    lines = []
    for data in runs:
        if "finished" not in data.manifest:
            lines.append(f"{data.name} has not finished")
        elif not data.series(VAL_BPB) or not data.protocol(VAL_BPB):
            lines.append(f"{data.name} has no {VAL_BPB} with a known protocol")
        elif "model" not in data.manifest:
            lines.append(f"{data.name} does not say how large its model is (it was trained by an earlier version)")
        elif "flops_per_token" not in data.manifest["model"]:
            lines.append(f"{data.name} has a model whose FLOPs are not known")
    if len(runs) < LEAST:
        lines.append(f"{len(runs)} runs are given, and a line with an interval takes {LEAST}")
    if lines:
        listed = "\n  ".join(lines)
        raise InputMissingError(
            f"--fit: nothing can be fitted:\n  {listed}\nGive at least {LEAST} finished runs of one family that "
            "differ in size (make ladder trains them)."
        )


def _refuse_unlike(runs: list[RunData]) -> None:
    """Name every key in which a run differs from the first one and may not."""
    first, lines = runs[0], []
    for data in runs[1:]:
        found = differences(_facts(first), _facts(data))
        if data.protocol(VAL_BPB) != first.protocol(VAL_BPB):
            why = why_not_compared(first.protocol_parts(VAL_BPB), data.protocol_parts(VAL_BPB))
            found.append(f"protocol of {VAL_BPB}: {first.protocol(VAL_BPB)} -> {data.protocol(VAL_BPB)}, {why}")
        lines += [f"{data.name} against {first.name}: {line}" for line in found]
    if lines:
        listed = "\n  ".join(lines)
        raise RecipeError(
            f"--fit: the runs are not of one family, and a line through them would mix two causes:\n  {listed}\n"
            "Give runs that differ in size (model.depth, or layers, width and heads) and seed alone."
        )


def _facts(data: RunData) -> dict[str, Any]:
    return _shared(data.fact("must_match", {})) | {
        "content of data.sources": [source.get("fingerprint") for source in data.fact("inputs.sources", [])],
        "tokenizer": data.fact("inputs.tokenizer.identity"),
    }


def _point(data: RunData) -> dict[str, Any]:
    tokens, scaling = data.tokens(), data.fact("plan.scaling_parameters")
    return {
        "run": data.name,
        "parameters": data.manifest["model"]["parameters"],
        "flops": data.manifest["model"]["flops_per_token"] * tokens,
        "tokens": tokens,
        "steps": data.series(VAL_BPB)[-1][0],
        "step_share": data.fact("inputs.batch_tokens", 0) / max(1, tokens),
        "tokens_per_param": tokens / scaling if scaling else None,
        "val_bpb": data.last(VAL_BPB),
    }


def _rule(points: list[dict[str, Any]]) -> dict[str, float]:
    """Return the horizon's rule that all runs follow: equal tokens a scaling parameter, or equal tokens."""
    for name in ("tokens_per_param", "tokens"):
        values = [point[name] for point in points]
        if None in values:
            continue
        # Steps are whole, so a short run falls short of the rule by up to one step; the one that comes nearest has its
        # value.
        most = min(value * (1 + max(SAME_RULE, p["step_share"])) for value, p in zip(values, points, strict=True))
        if max(values) <= most:
            return {name: max(values)}
    listed = "\n  ".join(
        f"{p['run']}: {p['tokens']:,} tokens"
        + (f", {p['tokens_per_param']:.2f} a scaling parameter" if p["tokens_per_param"] else "")
        for p in points
    )
    raise RecipeError(
        "--fit: the runs' horizons follow no one rule, and a line through them would mix size and length:\n  "
        f"{listed}\n"
        "Give runs of equal run.tokens_per_param, or of equal tokens."
    )


def _law(points: list[dict[str, Any]]) -> PowerLaw:
    return fit_power_law([point["flops"] for point in points], [point["val_bpb"] for point in points])


def _text(points: list[dict[str, Any]], law: PowerLaw, rule: dict[str, float]) -> str:
    rows = [
        [
            point["run"],
            f"{point['parameters']:,}",
            f"{point['tokens']:,}",
            f"{point['flops']:.3e}",
            f"{point['val_bpb']:.5f}",
            f"{law.predict(point['flops'])[0]:.5f}",
        ]
        for point in points
    ]
    (name, value), (floor, factor, exponent) = next(iter(rule.items())), law.likeliest()
    form = f"{VAL_BPB} = {f'{floor:.4f} + ' if floor else ''}{factor:.4g} x FLOPs^{exponent:.4f}"
    sizes = len({point["flops"] for point in points})
    lines = [
        (
            f"{form}, at {value:,.4g} {name.replace('_', ' ')}: the likeliest law; by these {sizes} sizes an "
            f"irreducible term may be up to {law.highest_floor():.4f} (97.5 %)"
        )
    ]
    for times in (2, 10, FARTHEST):
        y, low, high = law.predict(times * points[-1]["flops"])
        lines.append(
            f"at {times} times the FLOPs of the largest: {y:.4f}, 95 % of further runs from {low:.4f} to {high:.4f}"
        )
    lines.append(
        "The values and intervals are over all laws, with and without an irreducible term, as far as these runs allow "
        "each."
    )
    if sizes == LEAST:
        lines.append(
            f"{LEAST} sizes are few: they can hardly tell a law from noise, hence the wide interval. Each further "
            "size narrows it."
        )
    if short := [f"{point['run']} ({point['steps']})" for point in points if point["steps"] < FEW_STEPS]:
        lines.append(
            f"warning: fewer than {FEW_STEPS} steps in {', '.join(short)}: such runs are mostly warm-up and the first "
            "descent, and longer ones can end far outside the intervals. Train these sizes longer, all of the family "
            f"by the same run.{name}."
        )
    return table(["run", "parameters", "tokens", "FLOPs", VAL_BPB, "fitted"], rows) + "\n" + "\n".join(lines) + "\n"
