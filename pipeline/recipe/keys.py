"""The keys of a recipe by their dotted names: what each may hold, and where a word is a key."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_origin

from pipeline.recipe.schema import ARGUMENTS, Groups, Recipe, alternatives, keys_of
from pipeline.recipe.sizes import TANDEM_OPTIONS

# Keys of earlier versions: the default that each had, and what it was for. A run's own recipe.yaml names every key.
REMOVED: dict[str, tuple[Any, str]] = {
    "data.engine": ("processes", "Ray for preparing data"),
    "data.keep_shards": (None, "deletion of used shards"),
    "optimizer.average_steps": (None, "averaging of the weights"),
    "optimizer.average_weight": (0.6, "averaging of the weights"),
    "optimizer.ema_nesterov": (None, "EMA-Nesterov"),
    "optimizer.ema_nesterov_steps": (100, "EMA-Nesterov"),
    "optimizer.ema_nesterov_span": ([0.15, 0.75], "EMA-Nesterov"),
    "evals.core.max_s": (None, "time limit for CORE"),
    "evals.chat.max_s": (None, "time limit for chat tasks"),
}
for group in fields(Groups):
    REMOVED[f"optimizer.groups.{group.name}.update_floor"] = (None, "lower bound of Muon's updates")
    REMOVED[f"optimizer.groups.{group.name}.row_floor"] = (None, "lower bound of Muon's updates")
    REMOVED[f"optimizer.groups.{group.name}.decay_fraction"] = (None, "decay of a group's own")


def key_at(name: str) -> tuple[Any, Mapping[str, Any]]:
    """Return annotation and bounds of a dotted key, (None, {}) for one that is not there. An entry of a list has its
    number as a part of the name."""
    first, _, rest = name.partition(".")
    if first == "train" and rest:
        argument_name, _, inner = rest.partition(".")
        argument = ARGUMENTS.get(argument_name)
        if argument is None:
            return None, {}
        if inner:
            return (argument.keys or {}).get(inner), {}
        return argument.type, argument.limits
    if name.startswith("model.options."):
        return TANDEM_OPTIONS.get(name.removeprefix("model.options.")), {}
    annotation: Any = Recipe
    limits: Mapping[str, Any] = {}
    for part in name.split("."):
        holders = (o for o in alternatives(annotation) if is_dataclass(o) or get_origin(o) in (list, dict))
        annotation = next(holders, None)
        if is_dataclass(annotation):
            keys = {f.name: (inner, f.metadata) for f, inner in keys_of(annotation)}  # type: ignore[arg-type]
            annotation, limits = keys.get(part, (None, {}))
        elif annotation is not None:
            annotation = get_args(annotation)[-1]
    return annotation, limits


@cache
def all_keys() -> dict[str, list[str]]:
    """Return every key by its last word, as dotted paths; an entry of a list has the number 0."""
    found: dict[str, list[str]] = {}

    def walk(cls: Any, prefix: str) -> None:
        for f, annotation in keys_of(cls):
            name = prefix + f.name
            found.setdefault(f.name, []).append(name)
            for option in filter(is_dataclass, alternatives(annotation)):
                walk(option, f"{name}.")
            if get_origin(annotation) is list and is_dataclass(get_args(annotation)[0]):
                walk(get_args(annotation)[0], f"{name}.0.")

    walk(Recipe, "")
    for name, argument in ARGUMENTS.items():
        if argument.accepted:
            found.setdefault(name, []).append(f"train.{name}")
    return found
