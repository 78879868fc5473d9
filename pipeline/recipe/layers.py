"""One tree of values out of a recipe, what it extends, and the command line: later layers win key by key."""

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import get_origin

from pipeline.artifacts.errors import InputMissingError, RecipeError
from pipeline.recipe.command_line import COMMAND_LINE, find_recipe, read_overrides
from pipeline.recipe.located_yaml import Item, compose, not_text, read_file
from pipeline.recipe.problems import SECRET_NAME, SECRET_VALUE, Problems, show
from pipeline.recipe.values import alternatives, annotation_of

# Of each group one key is in force: a layer that names one takes the others of the layers below away.
EXCLUSIVE = (
    ("train.max_steps", "train.num_train_epochs", "run.tokens", "run.tokens_per_param", "run.flops"),
    ("data.batch_tokens", "train.gradient_accumulation_steps"),
)
ENTRY = re.compile(r"[0-9]{1,9}")  # the number of an entry of a list
MOST_BASES = 20  # recipes that extend each other in a row
# The dial sets these again when a later layer turns it.
SET_BY_DEPTH = ("model.n_layer", "model.n_embd", "model.n_head", "model.n_kv_head")


def read_layers(path: str, overrides: list[str], problems: Problems) -> Item:
    """The tree of the recipe at path with everything it extends, and the overrides on top."""
    tree = _with_bases(path, problems, ())
    layer: Item = Item({}, COMMAND_LINE, file=COMMAND_LINE)
    for name, value in read_overrides(overrides, problems).items():
        item = _override_value(name, value, problems)
        if _is_inside_list(name):
            tree = _set_in_list(tree, name.split("."), item, problems, name)
        else:
            layer = _set(layer, name.split("."), item, problems, name)
    return merge(tree, layer, problems)


def _with_bases(path: str, problems: Problems, parents: tuple[str, ...]) -> Item:
    tree = read_file(path, problems)
    tree = _without_secrets(tree, problems)
    real = os.path.realpath(path)
    extends = tree.value.get("extends")
    own = Item({k: v for k, v in tree.value.items() if k != "extends"}, tree.where, file=path)
    if extends is None:
        return own
    if not isinstance(extends.value, str) or not extends.value:
        raise RecipeError(
            f"{extends.where}: extends: must be the path of one recipe, relative to this file. Write extends: other.yaml."
        )
    folder = Path(path).parent
    base = os.path.normpath(folder / extends.value)
    if not Path(base).is_file():
        try:
            base = find_recipe(extends.value, folder=folder)
        except InputMissingError:
            raise InputMissingError(
                f"{extends.where}: extends: {base} does not exist. Name a recipe relative to {folder or '.'}."
            ) from None
    if len(parents) >= MOST_BASES:
        raise RecipeError(
            f"{extends.where}: extends: is the {MOST_BASES + 1}st in a row of recipes. Extend fewer of them."
        )
    if os.path.realpath(base) in (*parents, real):
        raise RecipeError(
            f"{extends.where}: extends: {extends.value} extends this recipe in turn, in a circle. Remove one of the two."
        )
    return merge(_with_bases(base, problems, (*parents, real)), own, problems)


def merge(base: Item, layer: Item, problems: Problems) -> Item:
    """layer over base: sections and dictionaries key by key, everything else replaced."""
    for group in EXCLUSIVE:
        named = [name for name in group if _is_given(layer, name)]
        if named:
            for name in group:
                base = _remove(base, name.split("."))
    if _is_given(layer, "model.depth"):
        for name in SET_BY_DEPTH:
            base = _remove(base, name.split("."))
    return _merge(base, layer)


def _merge(base: Item, layer: Item) -> Item:
    if not isinstance(base.value, dict) or not isinstance(layer.value, dict):
        return layer
    values = dict(base.value)
    for key, item in layer.value.items():
        values[key] = _merge(values[key], item) if key in values else item
    return Item(values, layer.where, file=layer.file)


def _is_given(tree: Item, name: str) -> bool:
    for part in name.split("."):
        if not isinstance(tree.value, dict) or part not in tree.value:
            return False
        tree = tree.value[part]
    return tree.value is not None


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
            f"lies inside {name.rpartition('.')[0]}, which is given as a value. Give one of the two.",
        )
        return tree
    if len(parts) == 1:
        return replace(tree, value={**tree.value, parts[0]: item})
    child = tree.value.get(parts[0]) or Item({}, COMMAND_LINE, file=COMMAND_LINE)
    if child.value is None:
        child = replace(child, value={})
    return replace(tree, value={**tree.value, parts[0]: _set(child, parts[1:], item, problems, name)})


def _is_inside_list(name: str) -> bool:
    return any(ENTRY.fullmatch(part) for part in name.split("."))


def _set_in_list(tree: Item, parts: list[str], item: Item, problems: Problems, name: str) -> Item:
    """Set section.list.<number>.key in what is there; a source's `files` replaces its `id` and the reverse."""
    head, rest = parts[0], parts[1:]
    if isinstance(tree.value, list):
        if not ENTRY.fullmatch(head) or int(head) >= len(tree.value):
            have = f"0 to {len(tree.value) - 1}" if tree.value else "none"
            problems.add(
                f"{COMMAND_LINE}: {name}",
                f"there is no entry {head}; there are {have}. Number the entries from 0, or give the whole list.",
            )
            return tree
        values = list(tree.value)
        values[int(head)] = _set_in_list(values[int(head)], rest, item, problems, name) if rest else item
        return replace(tree, value=values)
    if not isinstance(tree.value, dict) or (rest and head not in tree.value):
        problems.add(
            f"{COMMAND_LINE}: {name}",
            "there is no such list in the recipe. Give the whole list, as data.sources=[{files: x.parquet}].",
        )
        return tree
    if rest:
        return replace(tree, value={**tree.value, head: _set_in_list(tree.value[head], rest, item, problems, name)})
    replaced = {
        "files": ("id", "config", "revision"),
        "id": ("files",),
        "weight": ("epochs",),
        "epochs": ("weight",),
    }.get(head, ())
    kept = {k: v for k, v in tree.value.items() if k not in replaced or v.where == COMMAND_LINE}
    return replace(tree, value={**kept, head: item})


def _override_value(name: str, text: str, problems: Problems) -> Item:
    """The value of an override. Where the key holds text it is what was typed, but for quotes around the whole and null; elsewhere
    it is read as YAML, of which no part may become a comment."""
    where = COMMAND_LINE
    if SECRET_VALUE.search(text):
        problems.add(
            where,
            "a token or password is given. Remove it, and set HF_TOKEN or run `hf auth login`; WANDB_API_KEY for W&B.",
        )
        return Item(None, where, file=COMMAND_LINE)
    if text[:1] in ("*", "&", "!", "%", "@", "`") or (_holds_text(name, text) and not _is_quoted(text)):
        if strange := not_text(text):
            raise RecipeError(f"{where}: {name}: {strange}")
        return Item(None if text in ("", "null") else text, where, quoted=True, file=COMMAND_LINE)
    comment = f"{where}: {name}: a # begins a comment in {show(text)}, and what follows would be cut off. Put the text that holds it in quotes."
    try:
        item = compose(text, COMMAND_LINE, problems, where=where)
    except RecipeError:
        if re.search(r"\s#", text):
            raise RecipeError(comment) from None
        raise
    if text.count("#") > str(item.plain()).count("#"):
        raise RecipeError(comment)
    return item


def _holds_text(name: str, text: str) -> bool:
    """Return whether the key's value is text, and `text` not the list that it may be instead."""
    options = alternatives(annotation_of(name))
    kinds = {get_origin(option) or option for option in options}
    return (
        str in kinds
        and kinds <= {str, list, type(None)}
        and not (list in kinds and text[:1] == "[" and text[-1:] == "]")
    )


def _is_quoted(text: str) -> bool:
    return len(text) > 1 and text[0] == text[-1] and text[0] in "'\""


def _without_secrets(item: Item, problems: Problems) -> Item:
    """The tree without secrets, each of them noted; no later message can print one."""
    if isinstance(item.value, dict):
        values = {}
        for key, child in item.value.items():
            if SECRET_NAME.search(key) and child.value is not None:
                problems.add(
                    f"{child.where}: {key}",
                    "a secret never stands in a recipe. Remove it, and set HF_TOKEN or run `hf auth login`; WANDB_API_KEY for W&B.",
                )
                continue
            values[key] = _without_secrets(child, problems)
        return replace(item, value=values)
    if isinstance(item.value, list):
        return replace(item, value=[_without_secrets(child, problems) for child in item.value])
    if isinstance(item.value, str) and SECRET_VALUE.search(item.value):
        problems.add(
            item.where,
            "holds a token or password. Remove it, and set HF_TOKEN or run `hf auth login`; WANDB_API_KEY for W&B.",
        )
        return replace(item, value=None)
    return item
