"""The keys of a recipe by their dotted names: what each may hold, and where a word is a key."""

from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import cache
from typing import Any, get_args, get_origin

from pipeline.recipe.schema import ARGUMENTS, Recipe, alternatives, keys_of
from pipeline.recipe.sizes import TANDEM_OPTIONS


def key_at(name: str) -> tuple[Any, Mapping[str, Any]]:
    """Return annotation and bounds of a dotted key, (None, {}) for one that is not there. An entry of a list has its
    number as a part of the name."""
    first, _, rest = name.partition(".")
    if first == "train" and rest:
        argument_name, _, inner = rest.partition(".")
        argument = ARGUMENTS.get(argument_name)
        if argument is None:
            return None, {}
        return ((argument.keys or {}).get(inner), {}) if inner else (argument.type, argument.limits)
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
            found.setdefault(f.name, []).append(prefix + f.name)
            for inner in filter(is_dataclass, (annotation, *get_args(annotation))):
                walk(inner, f"{prefix}{f.name}." if inner is annotation else f"{prefix}{f.name}.0.")

    walk(Recipe, "")
    for name, argument in ARGUMENTS.items():
        if argument.accepted:
            found.setdefault(name, []).append(f"train.{name}")
    return found
