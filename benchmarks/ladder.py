"""The power law through finished runs of one family: val/bpb over FLOPs, and what a larger run will reach.

    python benchmarks/ladder.py RUN RUN RUN        (make ladder trains three depths and fits them)

Only the user's own runs that differ in size and seed alone: constants of others hold for their data and recipe.
"""

import argparse
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from pipeline.metrics import VAL_BPB, why_not_compared
from pipeline.process.errors import InputMissingError, RecipeError
from pipeline.recipe.identity import differences
from pipeline.report.markdown import table
from pipeline.report.run_data import RunData, read_run
from pipeline.run_dir.failures import exit_with_status

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


def fit_runs(runs: list[RunData]) -> str:
    """Return the fit of the runs in words. Raises RecipeError or InputMissingError, all reasons at once."""
    _refuse_unfinished(runs)
    _refuse_unlike(runs)
    points = sorted((_point(data) for data in runs), key=lambda point: point["flops"])
    rule = _rule(points)
    if len({point["flops"] for point in points}) < LEAST:
        raise RecipeError(
            f"ladder: {len(points)} runs of {len({point['flops'] for point in points})} sizes, and a fit takes {LEAST} "
            "sizes: two points always lie on a line. Train another size of this family (make ladder trains three)."
        )
    try:
        law = _law(points)
    except ValueError as error:
        raise RecipeError(
            f"ladder: the runs lie on no power law ({error}), so they tell nothing of a further one. Look at their "
            "curves first: python -m pipeline.report RUN RUN RUN"
        ) from None
    return _text(points, law, rule)


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
            f"ladder: nothing can be fitted:\n  {listed}\nGive at least {LEAST} finished runs of one family that "
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
            f"ladder: the runs are not of one family, and a line through them would mix two causes:\n  {listed}\n"
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
        "ladder: the runs' horizons follow no one rule, and a line through them would mix size and length:\n  "
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


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    print(fit_runs([read_run(name) for name in parser.parse_args(argv).runs]))
    return 0


if __name__ == "__main__":
    exit_with_status(main)
