"""`train:` of a recipe as arguments of transformers.TrainingArguments, through the support table (supported_arguments.py)."""

from typing import Any

from pipeline.recipe.located_yaml import Item, show
from pipeline.recipe.schema import Recipe
from pipeline.recipe.supported_arguments import ARGUMENTS, REFUSED_OPTIMIZERS, Argument
from pipeline.recipe.values import MISSING, Converter, unknown_key, why_not_accepted

DERIVED = ("max_steps", "num_train_epochs", "gradient_accumulation_steps")


def read_train(item: Item, convert: Converter) -> dict[str, Any]:
    """Return the typed values of `train:` as given; every mistake is noted in the converter's problems."""
    if item.value is None:
        return {}
    if not isinstance(item.value, dict):
        convert.problems.add(f"{item.where}: train", "must be keys with values. Write them below it, indented.")
        return {}
    values = {}
    for name, child in item.value.items():
        path, place = f"train.{name}", f"{child.where}: train.{name}"
        argument = ARGUMENTS.get(name)
        if argument is None:
            convert.problems.add(place, unknown_key(path))
            continue
        if not argument.accepted:
            convert.problems.add(place, why_not_accepted(name))
            continue
        convert.places[path] = child.where
        if child.value is None and name in DERIVED:
            continue
        if name == "optim" and isinstance(child.value, str) and child.value in REFUSED_OPTIMIZERS:
            why, instead = REFUSED_OPTIMIZERS[child.value]
            convert.problems.add(place, f"{child.value} is refused: {why}. Write {instead}.")
            continue
        value = convert.value(argument.type, child, path, argument.limits)
        if value is MISSING or not _keys_are_known(argument, child, path, convert):
            continue
        if argument.only and value != argument.default:
            convert.problems.add(
                place, f"is {show(value)} and must stay {show(argument.default)}: {argument.only}. Remove it."
            )
            continue
        values[name] = value
    if isinstance(values.get("accelerator_config"), dict):
        values["accelerator_config"] = {**ARGUMENTS["accelerator_config"].default, **values["accelerator_config"]}
    return values


def _keys_are_known(argument: Argument, item: Item, path: str, convert: Converter) -> bool:
    """Return whether the keys of a dictionary are those that its reader takes, with values of their types; else their mistakes are noted."""
    if argument.keys is None or not isinstance(item.value, dict):
        return True
    before = len(convert.problems.lines)
    for key, child in item.value.items():
        if key in argument.keys:
            convert.value(argument.keys[key], child, f"{path}.{key}", {"minimum": 1})
        else:
            convert.problems.add(f"{child.where}: {path}.{key}", f"unknown key. It has: {', '.join(argument.keys)}.")
    return len(convert.problems.lines) == before


def defaults(*, trainer_optimizer: bool) -> dict[str, Any]:
    """Return what `train:` holds where the recipe says nothing. trainer_optimizer: optimizer.type is trainer."""
    return {
        name: argument.default
        for name, argument in ARGUMENTS.items()
        if argument.accepted and name not in DERIVED and (trainer_optimizer or not argument.trainer_only)
    }


def training_arguments(
    recipe: Recipe, *, output_dir: str, max_steps: int, gradient_accumulation_steps: int
) -> dict[str, Any]:
    """Arguments for transformers.TrainingArguments. "auto" of bf16 and torch_compile is left out: the hardware decides."""
    values = {name: value for name, value in recipe.train.items() if name not in DERIVED and value is not None}
    values = {name: value for name, value in values.items() if value != "auto" and ARGUMENTS[name].kind != "added"}
    return {
        **values,
        "output_dir": output_dir,
        "max_steps": max_steps,
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "report_to": "none",  # trackers are written by our own callbacks (monitor.trackers)
        "run_name": recipe.run.name,
        "ignore_data_skip": True,  # rows are a function of the step
    }
