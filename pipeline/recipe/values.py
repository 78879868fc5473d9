"""Typed values of a recipe, read by pydantic: types, choices, bounds and unknown keys; every mistake with its place."""

from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from pipeline.recipe.located_yaml import Item, Problems
from pipeline.recipe.schema import ARGUMENTS, DERIVED, Recipe, alternatives, keys_of
from pipeline.recipe.sizes import TANDEM_OPTIONS

BOUNDS = {"minimum": "ge", "above": "gt", "maximum": "le", "below": "lt"}  # of a key, by pydantic's names


def typed_values(kind: Any, item: Item, path: str, problems: Problems) -> Any:
    """Return the item's value as kind has it, None after its mistakes were noted. path: dotted, before those of its
    keys."""
    try:
        return TypeAdapter(kind).validate_python(item.plain())
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
    # A union has an error for each of its members: they are gathered by the value that all of them refuse.
    found: dict[str, tuple[Item, set[str]]] = {}
    for one in errors:
        at, place = item, path
        for part in one["loc"]:
            child = at.child(part)
            if child is None:  # the rest names members of a union
                break
            at, place = child, f"{place}.{part}".removeprefix(".")
        found.setdefault(place, (at, set()))[1].add(one["type"])
    from pipeline.recipe.error_messages import wrong_value

    for place, (at, kinds) in found.items():
        if not any(other.startswith(f"{place}.") for other in found):  # of a list its entry says more
            problems.add(f"{at.where}: {place}", wrong_value(place, at, kinds))
    return None


@cache
def recipe_kind() -> Any:
    """Return the type of a whole recipe for pydantic."""
    keys = {f.name: (annotation, f.metadata) for f, annotation in keys_of(Recipe)}
    arguments = {}
    for name, argument in ARGUMENTS.items():
        if argument.accepted:
            kind = argument.type
            if argument.keys:
                kind = _keys(name, {key: (inner, {"minimum": 1}) for key, inner in argument.keys.items()})
            if name in DERIVED or type(None) in get_args(argument.type):
                kind = Union[kind, None]  # noqa: UP007 - what _keys returns knows no |
            arguments[name] = (kind, {**argument.limits, "doc": argument.text, "default": argument.default})
    return _keys("Recipe", keys | {"train": (_keys("Train", arguments), {})})


@cache
def options_kind() -> Any:
    """Return the type of model.options of a Tandem model."""
    return _keys("Options", {name: (kind, {}) for name, kind in TANDEM_OPTIONS.items()})


def section_kind(cls: Any) -> Any:
    """Return the type of a section."""
    return _keys(cls.__name__, {f.name: (annotation, f.metadata) for f, annotation in keys_of(cls)})


def _keys(name: str, keys: Mapping[str, tuple[Any, Mapping[str, Any]]]) -> Any:
    """Return the type of a dictionary that may hold these keys, by annotation and what schema.key says of them; null is
    an empty one."""
    fields = {}
    for key, (annotation, facts) in keys.items():
        default = {"default": facts["default"]} if "default" in facts else None
        shown = Field(description=facts.get("doc"), json_schema_extra=default)
        fields[key] = Annotated[_kind(annotation, facts), shown]
    make: Any = TypedDict  # mypy knows no names that are made here
    kind = make(name, fields, total=False)
    kind.__pydantic_config__ = {"extra": "forbid"}
    return Annotated[kind, BeforeValidator(_emptied)]


def _emptied(value: Any) -> Any:
    """Return an empty section for one that has no lines, which YAML reads as null."""
    return {} if value is None else value


def _kind(annotation: Any, limits: Mapping[str, Any]) -> Any:
    """Return the annotation for pydantic: no number out of text or truth values, and bounds on every number in it."""
    if is_dataclass(annotation):
        return section_kind(annotation)
    bounds = {theirs: limits[ours] for ours, theirs in BOUNDS.items() if limits.get(ours) is not None}
    # strict: pydantic would take "16" for 16, and true for 1.
    if annotation is int:
        return Annotated[int, Field(strict=True, **bounds), BeforeValidator(_whole)]
    if annotation is float:
        return Annotated[float, Field(strict=True, allow_inf_nan=False, **bounds)]
    if annotation is bool:
        return Annotated[bool, Field(strict=True)]
    if annotation is str and limits.get("form"):
        return Annotated[str, Field(pattern=f"^({limits['form'][1]})$")]
    if get_origin(annotation) in (Union, UnionType):
        return Union[tuple(_kind(member, limits) for member in get_args(annotation))]  # noqa: UP007
    if get_origin(annotation) is list:
        return list[_kind(get_args(annotation)[0], limits)]  # type: ignore[misc]
    return annotation


def _whole(value: Any) -> Any:
    """Return 1e3 as 1000: a count may be written so."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def section_of(cls: Any, values: Mapping[str, Any]) -> Any:
    """Return the section with these typed values; keys not given keep their defaults."""
    made = {}
    for f, annotation in keys_of(cls):
        if f.name in values:
            made[f.name] = _with_sections(annotation, values[f.name])
    return cls(**made)


def _with_sections(annotation: Any, value: Any) -> Any:
    if value is None:  # of a section that may be left out, such as model.adapter
        return None
    for option in alternatives(annotation):
        if is_dataclass(option):
            return section_of(option, value)
        if isinstance(value, list) and is_dataclass(inner := (*get_args(option), None)[0]):
            return [section_of(inner, one) for one in value]
    return value


def places_of(item: Item, path: str = "") -> dict[str, str]:
    """Return the place of every key in the item, by dotted path; of an entry of a list by its number."""
    places: dict[str, str] = {}
    children: Any = ()
    if isinstance(item.value, dict):
        children = item.value.items()
    elif isinstance(item.value, list):  # of texts and numbers the list itself has a place
        children = [(number, child) for number, child in enumerate(item.value) if isinstance(child.value, dict)]
    for name, child in children:
        inner = f"{path}.{name}".removeprefix(".")
        places[inner] = child.where
        places |= places_of(child, inner)
    return places
