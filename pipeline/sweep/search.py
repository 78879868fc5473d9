"""A search by Optuna: its samplers propose, its pruners give up, its storage holds the trials."""

import argparse
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
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = _named(optuna.samplers, options.sampler, "--sampler")
    study = optuna.create_study(
        study_name=name,
        storage=options.storage or f"sqlite:///{folder / 'optuna.db'}",
        direction="minimize" if better == "lower" else "maximize",
        pruner=_named(optuna.pruners, options.pruner, "--pruner")(),
        load_if_exists=True,
    )
    for number in range(options.trials):
        study.sampler = sampler(seed=number)
        known = study.get_trials(deepcopy=False)
        if number < len(known) and known[number].state.is_finished():
            continue
        # A trial that was under way when the sweep was stopped goes on under its number.
        trial = optuna.trial.Trial(study, known[number]._trial_id) if number < len(known) else study.ask()
        values = {key: axis.suggest(trial, key) for key, axis in axes.items()}
        value, state = _make(trial, partial(attempt, values), options, optuna.trial.TrialState)
        study.tell(trial, value, state=state)


def _make(trial: Any, attempt: Callable[[int], Sequence[float | None]], options: argparse.Namespace, states: Any) -> tuple[float | None, Any]:  # fmt: skip
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


def _named(module: Any, name: str, option: str) -> Any:
    found = getattr(module, name, None)
    if not isinstance(found, type):
        names = [one for one in module.__all__ if not one.startswith("Base")]
        raise RecipeError(f"{option}: {name} is none of Optuna's. Write one of {', '.join(names)}.")
    return found
