"""A search by Optuna: its samplers propose, its pruners give up, its storage holds the trials."""

from collections.abc import Callable, Sequence
from statistics import mean
from typing import Any

from pipeline.process.errors import RecipeError
from pipeline.sweep.space import Axis

# What makes the runs of so many seeds of these values, and returns their figures; None for one that has none.
Try = Callable[[dict[str, str], int], Sequence[float | None]]


def search(
    axes: dict[str, Axis], attempt: Try, *, name: str, storage: str, direction: str, trials: int, seeds: int, sampler: str, pruner: str, each: int
) -> None:  # fmt: skip
    """Make so many trials, those of earlier calls included. After every `each` seeds the pruner is asked.

    A proposal follows from the earlier trials and its own number alone, so a search that was interrupted proposes the same.
    """
    optuna = _optuna()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    samplers, pruning = _named(optuna.samplers, sampler, "--sampler"), _named(optuna.pruners, pruner, "--pruner")
    study = optuna.create_study(
        study_name=name, storage=storage, direction=direction, pruner=pruning(), load_if_exists=True
    )
    for number in range(trials):
        study.sampler = samplers(seed=number)
        known = study.get_trials(deepcopy=False)
        if number < len(known) and known[number].state.is_finished():
            continue
        # A trial that was under way when the sweep was stopped goes on under its number.
        trial = optuna.trial.Trial(study, known[number]._trial_id) if number < len(known) else study.ask()
        values = {key: axis.suggest(trial, key) for key, axis in axes.items()}
        _make(study, trial, optuna.trial.TrialState, lambda count, values=values: attempt(values, count), seeds, each)


def _make(study: Any, trial: Any, state: Any, attempt: Callable[[int], Sequence[float | None]], seeds: int, each: int) -> None:  # fmt: skip
    """Run seed by seed and tell the study how the trial ended."""
    reported = trial.study.get_trials(deepcopy=False)[trial.number].intermediate_values
    for count in [*range(each, seeds, each), seeds]:
        figures = [value for value in attempt(count) if value is not None]
        if len(figures) < count:
            study.tell(trial, state=state.FAIL)
            return
        if count not in reported:
            trial.report(mean(figures), step=count)
        if count < seeds and trial.should_prune():
            study.tell(trial, state=state.PRUNED)
            return
    study.tell(trial, mean(figures))


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
