"""Whether a difference in bits per byte, or in a benchmark's mean, is more than another seed would make."""

import math
from collections.abc import Sequence
from statistics import mean, stdev
from typing import Any

from pipeline.evals.intervals import student_t, two_sided
from pipeline.report.differences import repeats
from pipeline.report.run_data import RunData
from pipeline.report.scores import Key, newest_scores
from pipeline.report.tables import table

CHANCE = 0.05  # of calling noise a difference, in a whole table


def seed_noise_text(runs: Sequence[RunData]) -> str:
    """Every group against the first one, in each figure that both have under the same protocol. "" when there is none."""
    groups = repeats(runs)
    scores = [[newest_scores(data) for data in group] for group in groups]
    keys = dict.fromkeys(key for group in scores for run in group for key in run if key[1] is not None)
    rows: list[list[Any]] = []
    pairs: list[tuple[Sequence[float], Sequence[float]]] = []
    for key in keys:
        values = [[run[key].value for run in group if key in run] for group in scores]
        having = [(group, found) for group, found in zip(groups, values, strict=True) if found]
        if len(having) < 2 and (not having or len(having[0][1]) < 2):
            continue
        first = having[0][1]
        for n, (group, found) in enumerate(having):
            rows.append([_what(key), _names(group), *_spread(found), len(pairs) if n else "the first"])
            pairs += [(first, found)] if n else []
    if not rows:
        return ""
    judged = sum(max(len(first), len(other)) > 1 for first, other in pairs)
    for row in rows:
        row[-1] = verdict(*pairs[row[-1]], comparisons=judged) if isinstance(row[-1], int) else row[-1]
    text = table(["figure", "runs", "n", "mean", "standard deviation", "against the first"], rows)
    if judged > 1:
        text += (
            f"\n{judged} comparisons stand here, so each is called a difference below p = {CHANCE}/{judged} = {CHANCE / judged:.2g} only: "
            f"seed noise alone then gives one such call in {CHANCE:.0%} of tables. The p that are printed are of one comparison each.\n"
        )
    if pairs and not judged:
        text += (
            "\nNone of these runs has a repeat, so whether a difference is more than seed noise cannot be told. "
            "Run each recipe at least three times with other seeds (train.seed=1, 2, 3) and name all of them here.\n"
        )
    return text


def verdict(first: Sequence[float], other: Sequence[float], *, comparisons: int = 1) -> str:
    """Return the difference of the means in words: more than seed noise, or what these repeats could have told.

    By Welch's t test where both have repeats; with one value on one side by the spread of the other side's repeats, taken to be
    the same on both. comparisons: how many are made, by which the chance of a false call is divided (Bonferroni). The smallest
    difference named is the one that would just have been called; a true one of that size is called about every other time.
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
    least = student_t(CHANCE / comparisons, freedom) * error
    told = "more than seed noise" if chance < CHANCE / comparisons else "cannot be told from seed noise"
    return (
        f"{said}, {abs(t):.2f} standard errors ({test}, {freedom:.1f} degrees of freedom, p = {chance:.2g}): {told}; "
        f"so many repeats tell differences from {least:.2g} on"
    )


def _names(group: Sequence[RunData]) -> str:
    return ", ".join(data.name for data in group)


def _what(key: Key) -> str:
    return f"{key[0]} (protocol {key[1]})"


def _spread(values: Sequence[float]) -> list[Any]:
    return [len(values), f"{mean(values):.6f}", f"{stdev(values):.6f}" if len(values) > 1 else None]
