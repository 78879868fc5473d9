"""A search by Optuna: its samplers propose, its pruners give up, its storage holds the trials."""

import argparse
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from pipeline.process.errors import RecipeError
from pipeline.sweep.space import Axis

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
