"""The evaluations that a recipe names: built-in benchmarks, and the user's own functions module:attr, called as task(model, tokenizer)
-> numbers by metric name."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from pipeline.monitor.heartbeat import beat
from pipeline.process.errors import RecipeError
from pipeline.process.user_code import CodeFolder, import_attribute, import_built_in
from pipeline.recipe import Recipe

Task = Callable[[Any, Any], dict[str, float]]


def benchmarks_of(recipe: Recipe) -> list[Any]:
    """Return the benchmarks with a cadence (evals.core.every_steps, evals.chat.every_steps). Raises what their files raise."""
    cadences = {"evals.core": recipe.evals.core.every_steps, "evals.chat": recipe.evals.chat.every_steps}
    return [import_built_in(name)(recipe) for name, every_steps in cadences.items() if every_steps is not None]


def load_tasks(names: list[str], *, folder: CodeFolder | str | None, where: str) -> dict[str, Task]:
    """Return the functions by their module:attr. Raises RecipeError with all that cannot be imported or called."""
    tasks, wrong = {}, []
    for name in names:
        try:
            tasks[name] = import_attribute(name, folder, where=where)
        except RecipeError as error:
            wrong.append(str(error))
            continue
        if not callable(tasks[name]):
            wrong.append(f"{where}: {name} is no function.")
    if wrong:
        raise RecipeError("\n".join(wrong) + "\nName functions task(model, tokenizer) in a module beside the recipe.")
    return tasks


def score_tasks(
    tasks: dict[str, Task], model, tokenizer, *, watched: Callable[[Iterable], Iterable] = iter
) -> dict[str, float]:
    """Return the numbers of all tasks by name, the same on every rank: those of rank 0.

    Every rank calls every task, as a sharded model needs; without gradients and in evaluation mode. Raises RecipeError
    when a task gives something else than finite or infinite numbers under names with a slash, which a tracker groups by.
    watched: what the tasks go through.
    """
    numbers: dict[str, float] = {}
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for name, task in watched(tasks.items()):
                beat()
                numbers |= _checked(name, task(model, tokenizer))
    finally:
        model.train(training)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        box = [numbers]
        torch.distributed.broadcast_object_list(box, src=0)
        numbers = box[0]
    return numbers


def _checked(task: str, numbers: Any) -> dict[str, float]:
    if not isinstance(numbers, dict):
        raise RecipeError(
            f"evals.tasks: {task} gave {type(numbers).__name__}, so there is nothing to record. Return a dict of numbers by metric name."
        )
    wrong = [n for n, v in numbers.items() if not isinstance(n, str) or "/" not in n or not isinstance(v, int | float)]
    if wrong:
        raise RecipeError(
            f"evals.tasks: {task} gave {wrong}, which cannot be recorded. Names need a group before a slash (spelling/accuracy), values are numbers."
        )
    return {name: float(value) for name, value in numbers.items()}
