"""The values that a sweep tries and the search among them. They are written as Hydra's multirun and its Optuna sweeper write them.

`a=1,2,3`, `a=choice(1,2)` and `a=range(2,8,2)` are lists; `a=interval(1e-3,1e-1)`, alone or inside `int(...)` and `tag(log, ...)`,
is searched. `a=1` alone is an override of every run, the baseline included.
"""

import argparse
import itertools
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
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


# A search by Optuna: its samplers propose, its pruners give up, its storage holds the trials.

# What makes the runs of so many seeds of these values, and returns their figures; None for one that has none.
Try = Callable[[dict[str, str], int], Sequence[float | None]]


def search(axes: dict[str, Axis], attempt: Try, options: argparse.Namespace, *, name: str, folder: Path, better: str) -> None:  # fmt: skip
    """Make options.trials trials, those of earlier calls included; the pruner is asked after every seed, or as many as run side by side.

    A proposal follows from the earlier trials and its own number alone, so a search that was interrupted proposes the same.
    """
    optuna = _optuna()
    from sqlalchemy.exc import SQLAlchemyError  # comes with it

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = options.storage or f"sqlite:///{folder / 'optuna.db'}"
    pruner = _make_named(optuna.pruners, options.pruner, "--pruner")
    direction = "minimize" if better == "lower" else "maximize"
    try:
        study = optuna.create_study(
            study_name=name, storage=storage, direction=direction, pruner=pruner, load_if_exists=True
        )
    except SQLAlchemyError as error:
        raise RecipeError(f"--storage: {storage} cannot be opened ({error}). Give another URL.") from None
    for number in range(options.trials):
        study.sampler = _make_named(optuna.samplers, options.sampler, "--sampler", seed=number)
        known = study.get_trials(deepcopy=False)
        if number < len(known) and known[number].state.is_finished():
            continue
        # A trial that was under way when the sweep was stopped goes on under its number.
        trial = optuna.trial.Trial(study, known[number]._trial_id) if number < len(known) else study.ask()
        values = _suggest(trial, axes, options.sampler)
        value, state = _make_runs(trial, partial(attempt, values), options, optuna.trial.TrialState)
        study.tell(trial, value, state=state)


def _suggest(trial: Any, axes: dict[str, Axis], sampler: str) -> dict[str, str]:
    values = {}
    for key, axis in axes.items():
        try:
            values[key] = axis.suggest(trial, key)
        except (
            ValueError,
            ImportError,
        ) as error:  # other values than the study began with; a sampler that lacks a package
            raise RecipeError(
                f"command line: {key}: Optuna's {sampler} chooses no value ({error}). For other values than earlier trials had "
                "give another --name, else another --sampler."
            ) from None
    return values


def _make_runs(trial: Any, attempt: Callable[[int], Sequence[float | None]], options: argparse.Namespace, states: Any) -> tuple[float | None, Any]:  # fmt: skip
    """Run seed by seed; return value and state that the trial ends with."""
    reported = trial.study.get_trials(deepcopy=False)[trial.number].intermediate_values
    seeds: int = options.seeds
    for count in [*range(options.parallel, seeds, options.parallel), seeds]:
        values = [value for value in attempt(count) if value is not None]
        if len(values) < count:
            return None, states.FAIL
        if count not in reported:
            trial.report(mean(values), step=count)
        if count < seeds and trial.should_prune():
            return None, states.PRUNED
    return mean(values), states.COMPLETE


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise RecipeError(
            "--trials: a search needs Optuna, which is not installed. Run pip install 'tandem-llm[sweep]' (or pip install optuna), "
            "or give lists of values for a grid."
        ) from None
    return optuna


def _make_named(module: Any, name: str, option: str, **arguments: Any) -> Any:
    """Return an object of the class of that name, made of these arguments alone."""

    def make(name: str) -> Any:
        try:
            return getattr(module, name)(**arguments)
        except TypeError:  # no class, an abstract one, or one that asks for more
            return None

    if name in module.__all__ and (made := make(name)) is not None:
        return made
    with warnings.catch_warnings(action="ignore"):  # of experimental ones
        names = [one for one in module.__all__ if make(one) is not None]
    raise RecipeError(
        f"{option}: {name} is none of Optuna's, or needs arguments of its own. Write one of {', '.join(names)}."
    )
