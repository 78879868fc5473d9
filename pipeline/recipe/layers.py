"""The layers of a recipe: its command line, the files that it extends, and one tree in which later layers win."""

import difflib
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import get_origin

from pipeline.process.errors import InputMissingError, RecipeError
from pipeline.process.secrets import looks_secret
from pipeline.recipe.keys import REMOVED, all_keys, key_at
from pipeline.recipe.located_yaml import (
    INSTEAD,
    SECRET_NAME,
    Item,
    Problems,
    compose,
    control_character,
    read_file,
    show,
)
from pipeline.recipe.schema import alternatives

COMMAND_LINE = "command line"
SHIPPED = Path(__file__).parents[1] / "recipes"  # of an installed wheel
if not SHIPPED.is_dir():
    SHIPPED = Path(__file__).parents[2] / "recipes"
SUFFIXES = ("", ".yaml", ".yml")
# Of each group one key is in force: a layer that names one takes the others of the layers below away.
EXCLUSIVE = (
    ("train.max_steps", "train.num_train_epochs", "run.tokens", "run.tokens_per_param", "run.flops", "run.minutes"),
    ("data.batch_tokens", "train.gradient_accumulation_steps"),
)
# The dial sets these again when a later layer turns it.
SET_BY_DEPTH = ("model.n_layer", "model.n_embd", "model.n_head", "model.n_kv_head")


def recipe_of(argv: list[str]) -> str:
    """Return the recipe that a command line begins with. Raises RecipeError when it begins with something else."""
    if argv and not argv[0].startswith("-") and ("=" not in argv[0] or argv[0].endswith((".yaml", ".yml"))):
        return argv[0]
    given = f" before {argv[0].split('=')[0]}" if argv else ""
    raise RecipeError(
        f"{COMMAND_LINE}: no recipe is named{given}. Write the path of a .yaml file first, then section.key=value."
    )


NEAR = "Did you mean"


def find_recipe(name: str, *, folder: str | Path = "") -> str:
    """Return the path of a recipe given by a path or by its bare name, which is looked for in `folder`, in recipes/
    below it and among the shipped ones; `.yaml` may be left out.

    Raises InputMissingError when there is none.
    """
    places = [Path(folder)]
    if os.path.basename(name) == name:
        places += [Path(folder, "recipes"), SHIPPED]
    for suffix in SUFFIXES:
        for place in places:
            path = Path(place, f"{name}{suffix}")
            if path.is_file():
                return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
    given = Path(folder, name)
    if given.exists():  # a folder, which read_file speaks of
        return str(given)
    shipped = sorted(p.stem for p in SHIPPED.glob("*.yaml"))
    near = difflib.get_close_matches(given.stem, shipped, n=1)
    here = sorted(path.name for path in given.parent.glob("*.yaml"))[:5]
    hint = f"Shipped are: {', '.join(shipped)}."
    if here:
        hint = f"In its folder: {', '.join(here)}. {hint}"
    if near:
        hint = f"{NEAR} {near[0]}?"
    raise InputMissingError(f"{given}: there is no such recipe. {hint}")


def read_overrides(texts: list[str], problems: Problems) -> dict[str, str]:
    """Return the overrides' values by their keys, as they were written; problems gets those that are none."""
    given: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if text.startswith("-") or not equals or not name:
            last = name.replace("-", "_").strip("_").rpartition(".")[2]
            example = all_keys().get(last, ["train.max_steps"])[-1]  # as other trainers' options are called
            problems.add(
                COMMAND_LINE,
                f"{name} is not an override. Write section.key=value, for example {example}={value or 100}.",
            )
        elif name in given:
            problems.add(
                f"{COMMAND_LINE}: {name}",
                "is given twice. Remove one of them, and put a value with braces or commas in quotes.",
            )
        else:
            given[name] = value
    return given


def read_layers(path: str, overrides: list[str], problems: Problems) -> Item:
    """Return the tree of the recipe at path with everything it extends, and the overrides on top."""
    layer = Item({}, COMMAND_LINE)
    for name, value in read_overrides(overrides, problems).items():
        layer = _set(layer, name.split("."), _override_value(name, value, problems), problems, name)
    return merge(_with_bases(path, problems, ()), layer)


def _with_bases(path: str, problems: Problems, parents: tuple[str, ...]) -> Item:
    tree = read_file(path, problems)
    tree = _without_secrets(tree, problems)
    real = os.path.realpath(path)
    extends = tree.value.get("extends")
    own = Item({k: v for k, v in tree.value.items() if k != "extends"}, tree.where)
    if extends is None:
        return own
    if not isinstance(extends.value, str) or not extends.value:
        raise RecipeError(
            f"{extends.where}: extends: must be the path of one recipe, relative to this file. Write extends: "
            "other.yaml."
        )
    # A path relative to this file, else the bare name of a shipped recipe.
    folder = Path(path).parent
    base = os.path.normpath(folder / extends.value)
    if not Path(base).is_file():
        try:
            base = find_recipe(extends.value, folder=folder)
        except InputMissingError:
            raise InputMissingError(
                f"{extends.where}: extends: {base} does not exist. Name a recipe relative to {folder or '.'}."
            ) from None
    if os.path.realpath(base) in (*parents, real):
        raise RecipeError(
            f"{extends.where}: extends: {extends.value} extends this recipe in turn, in a circle. Remove one of the "
            "two."
        )
    return merge(_with_bases(base, problems, (*parents, real)), own)


def merge(base: Item, layer: Item) -> Item:
    """Return layer over base: sections and dictionaries key by key, everything else replaced."""
    gone: list[str] = []
    for group in EXCLUSIVE:
        if any(_is_given(layer, name) for name in group):
            gone += group
    if _is_given(layer, "model.depth"):
        gone += SET_BY_DEPTH
    for name in gone:
        base = _remove(base, name.split("."))
    return _merge(base, layer)


def _merge(base: Item, layer: Item) -> Item:
    if not isinstance(base.value, dict) or not isinstance(layer.value, dict):
        return layer
    values = dict(base.value)
    for key, item in layer.value.items():
        values[key] = _merge(values[key], item) if key in values else item
    return Item(values, layer.where)


def without_removed(tree: Item, problems: Problems) -> Item:
    """Return the tree without keys of earlier versions that have the default they had; problems gets those in use."""
    for name, (default, purpose) in REMOVED.items():
        item = tree.at(name)
        if item is None:
            continue
        if item.value is not None and item.plain() != default:
            problems.add(
                f"{item.where}: {name}",
                f"is {show(item.plain())}, and this version has no {purpose}. Remove the key, or use the version that "
                "the recipe is from.",
            )
        tree = _remove(tree, name.split("."))
    return tree


def _is_given(tree: Item, name: str) -> bool:
    item = tree.at(name)
    return item is not None and item.value is not None


def _remove(tree: Item, parts: list[str]) -> Item:
    if not isinstance(tree.value, dict) or parts[0] not in tree.value:
        return tree
    values = dict(tree.value)
    if len(parts) == 1:
        del values[parts[0]]
    else:
        values[parts[0]] = _remove(values[parts[0]], parts[1:])
    return replace(tree, value=values)


def _set(tree: Item, parts: list[str], item: Item, problems: Problems, name: str) -> Item:
    if not isinstance(tree.value, dict):
        problems.add(
            f"{COMMAND_LINE}: {name}",
            f"is inside {name.rpartition('.')[0]}, which is given as a value. Give one of the two.",
        )
        return tree
    first, *rest = parts
    if rest:
        item = _set(tree.value.get(first) or Item({}, COMMAND_LINE), rest, item, problems, name)
    return replace(tree, value={**tree.value, first: item})


def _override_value(name: str, text: str, problems: Problems) -> Item:
    """Return the value of an override. Where the key holds text it is what was typed, but for quotes around the whole
    and null; elsewhere it is read as YAML, of which no part may become a comment."""
    # Before anything that could print it.
    if looks_secret(text):
        problems.add(COMMAND_LINE, f"a token or password is given. {INSTEAD}")
        return Item(None, COMMAND_LINE)
    is_quoted = re.fullmatch(r"(['\"]).*\1", text, re.DOTALL)
    # YAML has another use for these at the beginning: a glob, for one, would be an alias.
    begins_as_yaml = text[:1] in ("*", "&", "!", "%", "@", "`")
    if begins_as_yaml or (_holds_text(name, text) and not is_quoted):
        if strange := control_character(text):
            raise RecipeError(f"{COMMAND_LINE}: {name}: {strange}")
        if text in ("", "null"):
            return Item(None, COMMAND_LINE)
        return Item(text, COMMAND_LINE)
    outside_quotes = re.sub(r"'[^']*'|\"[^\"]*\"", "", text)
    if re.search(r"\s#", outside_quotes):
        raise RecipeError(
            f"{COMMAND_LINE}: {name}: a # begins a comment in {show(text)}. Put the text that holds it in quotes."
        )
    return compose(text, COMMAND_LINE, problems, where=COMMAND_LINE)


def _holds_text(name: str, text: str) -> bool:
    """Return whether the key's value is text, and `text` not the list that it may be instead."""
    kinds = {get_origin(option) or option for option in alternatives(key_at(name)[0])}
    is_list = list in kinds and text[:1] == "[" and text[-1:] == "]"
    return str in kinds and kinds <= {str, list, type(None)} and not is_list


def _without_secrets(item: Item, problems: Problems) -> Item:
    """Return the tree without secrets, each of them noted; no later message can print one."""
    if isinstance(item.value, dict):
        values = {}
        for key, child in item.value.items():
            if SECRET_NAME.search(key) and child.value is not None:
                problems.add(f"{child.where}: {key}", f"a recipe holds no secrets. {INSTEAD}")
                continue
            values[key] = _without_secrets(child, problems)
        return replace(item, value=values)
    if isinstance(item.value, list):
        return replace(item, value=[_without_secrets(child, problems) for child in item.value])
    if isinstance(item.value, str) and looks_secret(item.value):
        problems.add(item.where, f"holds a token or password. {INSTEAD}")
        return replace(item, value=None)
    return item
