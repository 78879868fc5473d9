"""The values that a sweep tries, written as Hydra's multirun and its Optuna sweeper write them.

`a=1,2,3`, `a=choice(1,2)` and `a=range(2,8,2)` are lists; `a=interval(1e-3,1e-1)`, alone or inside `int(...)` and `tag(log, ...)`,
is searched. `a=1` alone is an override of every run, the baseline included.
"""

import itertools
import re
from dataclasses import dataclass
from typing import Any

from pipeline.process.errors import RecipeError

OPENING, CLOSING = "([{", ")]}"
NUMBER = r"\s*([-+0-9.eE_]+)\s*"
INTERVAL = re.compile(rf"interval\({NUMBER},{NUMBER}\)")
RANGE = re.compile(r"range\(\s*(-?\d+)\s*,\s*(-?\d+)\s*(?:,\s*([1-9]\d*)\s*)?\)")
WRAPPED = re.compile(r"(tag\(\s*log\s*,\s*|int\()(.+)\)$")


@dataclass(frozen=True)
class Axis:
    """The values that one key may have: texts as the command line takes them, or an interval."""

    values: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    is_int: bool = False
    is_log: bool = False

    def first(self) -> str:
        """Return the first value, the lower end of an interval."""
        return self.values[0] if self.values else str(int(self.low)) if self.is_int else repr(self.low)

    def suggest(self, trial: Any, key: str) -> str:
        """Return the text of what an Optuna trial is to try."""
        if self.values:
            return trial.suggest_categorical(key, list(self.values))
        if self.is_int:
            return str(trial.suggest_int(key, int(self.low), int(self.high), log=self.is_log))
        return repr(trial.suggest_float(key, self.low, self.high, log=self.is_log))


def read_space(words: list[str]) -> tuple[list[str], dict[str, Axis]]:
    """Return the overrides of every run, and the axes by key."""
    fixed, axes = [], {}
    for word in words:
        key, equals, text = word.partition("=")
        axis = _axis(key, text) if equals else None
        if axis is None:
            fixed.append(word)
        elif key in axes:
            raise RecipeError(f"command line: {key}: is given twice. Write all of its values in one list.")
        else:
            axes[key] = axis
    if both := axes.keys() & {word.partition("=")[0] for word in fixed}:
        raise RecipeError(
            f"command line: {', '.join(sorted(both))}: has one value for every run and a list. Give one of the two."
        )
    return fixed, axes


def grid(axes: dict[str, Axis]) -> list[dict[str, str]]:
    """Return every combination of the values, the last key turning fastest. Raises RecipeError for an interval."""
    if searched := [key for key, axis in axes.items() if not axis.values]:
        raise RecipeError(
            f"command line: {', '.join(searched)}: is an interval, which no grid goes through. Give --trials N for a search, or a list."
        )
    combinations = itertools.product(*(axis.values for axis in axes.values()))
    return [dict(zip(axes, values, strict=True)) for values in combinations]


def _axis(key: str, text: str) -> Axis | None:
    """Return the axis that the text writes; None where it is one value."""
    inner, is_int, is_log = text.strip(), False, False
    while wrapped := WRAPPED.match(inner):
        is_int, is_log = is_int or wrapped[1] == "int(", is_log or wrapped[1] != "int("
        inner = wrapped[2].strip()
    if found := INTERVAL.fullmatch(inner):
        try:
            low, high = float(found[1]), float(found[2])
        except ValueError:
            low = high = 0.0
        if not low < high or (is_log and low <= 0):
            raise RecipeError(
                f"command line: {key}: {text} is no interval to search: two numbers, the lower one first, above 0 with tag(log, ...)."
            )
        return Axis(low=low, high=high, is_int=is_int, is_log=is_log)
    if found := RANGE.fullmatch(inner):
        values = tuple(map(str, range(int(found[1]), int(found[2]), int(found[3] or 1))))
    elif inner.startswith("choice(") and inner.endswith(")"):
        values = tuple(_split(inner[len("choice(") : -1]))
    elif len(parts := _split(inner)) > 1:
        values = tuple(parts)
    else:
        return None
    if not all(values) or not values:
        raise RecipeError(f"command line: {key}: {text} has an empty value. Write key=v1,v2 without spaces.")
    return Axis(tuple(dict.fromkeys(values)))


def _split(text: str) -> list[str]:
    """Return the parts between the commas that stand in no brackets and no quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in OPENING + CLOSING:
            depth += 1 if letter in OPENING else -1
        elif letter == "," and not depth:
            parts.append("")
            continue
        parts[-1] += letter
    return [part.strip() for part in parts]
