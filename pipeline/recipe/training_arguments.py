"""`train:` of a recipe as arguments of transformers.TrainingArguments, through the table of fates."""

from typing import Any

from pipeline.recipe.located_yaml import Item, show
from pipeline.recipe.schema import Recipe
from pipeline.recipe.supported_arguments import FATES, REFUSED_OPTIMIZERS, Fate
from pipeline.recipe.values import MISSING, Converter, fate_sentence, unknown_key

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
        fate = FATES.get(name)
        if fate is None:
            convert.problems.add(place, unknown_key(path))
            continue
        if not fate.accepted:
            convert.problems.add(place, fate_sentence(name))
            continue
        convert.places[path] = child.where
        if child.value is None and name in DERIVED:
            continue
        if name == "optim" and isinstance(child.value, str) and child.value in REFUSED_OPTIMIZERS:
            why, instead = REFUSED_OPTIMIZERS[child.value]
            convert.problems.add(place, f"{child.value} is refused: {why}. Write {instead}.")
            continue
        value = convert.value(fate.type, child, path, fate.limits)
        if value is MISSING or not _keys_are_known(fate, child, path, convert):
            continue
        if fate.only and value != fate.default:
            convert.problems.add(place, f"is {show(value)} and must stay {show(fate.default)}: {fate.only}. Remove it.")
            continue
        values[name] = value
    if isinstance(values.get("accelerator_config"), dict):
        values["accelerator_config"] = {**FATES["accelerator_config"].default, **values["accelerator_config"]}
    return values


def _keys_are_known(fate: Fate, item: Item, path: str, convert: Converter) -> bool:
    """Return whether the keys of a dictionary are those that its reader takes, with values of their types; else their mistakes are noted."""
    if fate.keys is None or not isinstance(item.value, dict):
        return True
    before = len(convert.problems.lines)
    for key, child in item.value.items():
        if key in fate.keys:
            convert.value(fate.keys[key], child, f"{path}.{key}", {"minimum": 1})
        else:
            convert.problems.add(f"{child.where}: {path}.{key}", f"unknown key. It has: {', '.join(fate.keys)}.")
    return len(convert.problems.lines) == before


def defaults(*, trainer_optimizer: bool) -> dict[str, Any]:
    """Return what `train:` holds where the recipe says nothing. trainer_optimizer: optimizer.type is trainer."""
    return {
        name: fate.default
        for name, fate in FATES.items()
        if fate.accepted and name not in DERIVED and (trainer_optimizer or not fate.trainer_only)
    }


def training_arguments(
    recipe: Recipe, *, output_dir: str, max_steps: int, gradient_accumulation_steps: int
) -> dict[str, Any]:
    """Arguments for transformers.TrainingArguments. "auto" of bf16 and torch_compile is left out: the hardware decides."""
    values = {name: value for name, value in recipe.train.items() if name not in DERIVED and value is not None}
    values = {name: value for name, value in values.items() if value != "auto" and FATES[name].fate != "added"}
    return {
        **values,
        "output_dir": output_dir,
        "max_steps": max_steps,
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "report_to": "none",  # trackers are written by our own callbacks (monitor.trackers)
        "run_name": recipe.run.name,
        "ignore_data_skip": True,  # rows are a function of the step
    }
