"""Whether a difference in bits per byte, or in a benchmark's mean, is more than another seed would make."""

import math
from collections.abc import Sequence
from statistics import mean, stdev
from typing import Any

from pipeline.report.differences import code_of, differing_majors
from pipeline.report.imports.imported_run import is_imported
from pipeline.report.run_data import RunData
from pipeline.report.scores import Key, newest_scores
from pipeline.report.tables import table

CONFIDENCE = 0.05  # below this share of chance a difference is called more than noise


def repeats(runs: Sequence[RunData]) -> list[list[RunData]]:
    """The runs in groups that differ in nothing but train.seed, each seed once; order of first appearance."""
    groups: list[list[RunData]] = []
    for data in runs:
        for group in groups:
            if _repeats(group[0], data):
                if all(_seed(data) != _seed(other) for other in group):
                    group.append(data)
                break
        else:
            groups.append([data])
    return groups


def seed_noise_text(runs: Sequence[RunData]) -> str:
    """Every group against the first one, in each figure that both have under the same protocol. "" when there is none."""
    groups = repeats(runs)
    scores = [[newest_scores(data) for data in group] for group in groups]
    keys = dict.fromkeys(key for group in scores for run in group for key in run if key[1] is not None)
    rows: list[list[Any]] = []
    compared = False
    for key in keys:
        values = [[run[key].value for run in group if key in run] for group in scores]
        having = [(group, found) for group, found in zip(groups, values, strict=True) if found]
        if len(having) < 2 and (not having or len(having[0][1]) < 2):
            continue
        compared = compared or len(having) > 1
        first = having[0][1]
        for n, (group, found) in enumerate(having):
            rows.append([_what(key), _names(group), *_spread(found), verdict(first, found) if n else "the first"])
    if not rows:
        return ""
    text = table(["figure", "runs", "n", "mean", "standard deviation", "against the first"], rows)
    if compared and all(len(group) == 1 for group in groups):
        text += (
            "\nNone of these runs has a repeat, so whether a difference is more than seed noise cannot be told. "
            "Run each recipe at least three times with other seeds (train.seed=1, 2, 3) and name all of them here.\n"
        )
    return text


def verdict(first: Sequence[float], other: Sequence[float]) -> str:
    """The difference of the means in standard errors, by Welch's t test where both have repeats.

    With one value on one side it is judged by the spread of the other side's repeats, taken to be the same on both.
    """
    difference = mean(other) - mean(first)
    said = f"{difference:+.6f}"
    if len(first) < 2 and len(other) < 2:
        return f"{said}; one run each: cannot be told from seed noise"
    if len(first) > 1 and len(other) > 1:
        parts = [stdev(values) ** 2 / len(values) for values in (first, other)]
        error = math.sqrt(sum(parts))
        weights = sum(part**2 / (len(v) - 1) for part, v in zip(parts, (first, other), strict=True))
        freedom = sum(parts) ** 2 / weights if weights else math.inf
        test = "Welch"
    else:
        many = first if len(first) > 1 else other
        error, freedom = stdev(many) * math.sqrt(1 + 1 / len(many)), len(many) - 1
        test = "one run against the spread of the other's repeats"
    if error == 0:
        return f"{said}; the repeats do not differ at all, so there is no noise to judge it by"
    t = difference / error
    chance = two_sided(t, freedom)
    judged = "more than seed noise" if chance < CONFIDENCE else "within seed noise"
    return (
        f"{said}, {abs(t):.2f} standard errors ({test}, {freedom:.1f} degrees of freedom, p = {chance:.2g}): {judged}"
    )


def two_sided(t: float, freedom: float) -> float:
    """The chance of |T| >= |t| under Student's distribution, by Simpson's rule over the angle atan(t / sqrt(freedom))."""
    if math.isinf(freedom):
        return math.erfc(abs(t) / math.sqrt(2))
    # With T = sqrt(v) tan(a) the density is proportional to cos(a)^(v - 1) on (-pi/2, pi/2).
    steps = 2000
    angle = math.atan(abs(t) / math.sqrt(freedom))
    width = (math.pi / 2 - angle) / steps

    def density(i: int) -> float:
        return max(math.cos(angle + i * width), 0.0) ** (freedom - 1)

    inner = sum((4 if i % 2 else 2) * density(i) for i in range(1, steps))
    tail = width / 3 * (density(0) + inner + density(steps))
    log_whole = 0.5 * math.log(math.pi) + math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2)
    return min(2 * tail / math.exp(log_whole), 1.0)


def _repeats(one: RunData, other: RunData) -> bool:
    if is_imported(one) or is_imported(other) or _seed(one) is None or _seed(other) is None:
        return False  # a log does not tell its seed
    same_code = code_of(one).get("git.commit") == code_of(other).get("git.commit")
    return same_code and one.stage == other.stage and not set(differing_majors(one, other)) - {"seed"}


def _seed(data: RunData) -> Any:
    return (data.recipe.get("train") or {}).get("seed")


def _names(group: Sequence[RunData]) -> str:
    return ", ".join(data.name for data in group)


def _what(key: Key) -> str:
    return f"{key[0]} (protocol {key[1]})"


def _spread(values: Sequence[float]) -> list[Any]:
    return [len(values), f"{mean(values):.6f}", f"{stdev(values):.6f}" if len(values) > 1 else None]
