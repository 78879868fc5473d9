"""The layers of a recipe: its command line, the files that it extends, and one tree in which later layers win."""

import os
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import get_origin

from pipeline.process.errors import InputMissingError, RecipeError
from pipeline.process.secrets import looks_secret
from pipeline.recipe.located_yaml import (
    INSTEAD,
    SECRET_NAME,
    Item,
    Problems,
    compose,
    not_text,
    read_file,
    show,
)
from pipeline.recipe.schema import alternatives, annotation_of

COMMAND_LINE = "command line"
SHIPPED = next(p for n in (1, 2) if (p := Path(__file__).parents[n] / "recipes").is_dir() or n == 2)
SUFFIXES = ("", ".yaml", ".yml")
# Keys whose value is a list of entries with keys of their own.
LISTS = ("data.sources", "data.validation", "evals.chat.own")
MOST_PARTS = 50  # dots of an override's key
OPENING, CLOSING = "[{", "]}"


def recipe_of(argv: list[str]) -> str:
    """Return the recipe that a command line begins with. Raises RecipeError when it begins with something else."""
    if argv and not argv[0].startswith("-") and ("=" not in argv[0] or argv[0].endswith((".yaml", ".yml"))):
        return argv[0]
    given = f" before {argv[0].split('=')[0]}" if argv else ""
    if argv and (named := recipe_option(argv)):
        raise RecipeError(f"{COMMAND_LINE}: {named}")
    raise RecipeError(
        f"{COMMAND_LINE}: no recipe is named{given}. Write the path of a .yaml file first, then section.key=value."
    )


def find_recipe(name: str, *, folder: str | Path = "") -> str:
    """Return the path of a recipe given by a path or by its bare name, which is looked for in `folder`, in recipes/
    below it and among the shipped ones; `.yaml` may be left out.

    Raises InputMissingError when there is none.
    """
    bare = os.path.basename(name) == name
    places = [Path(folder), *([Path(folder, "recipes"), SHIPPED] if bare else [])]
    for suffix in SUFFIXES:
        for place in places:
            path = Path(place, f"{name}{suffix}")
            if path.is_file():
                return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
    given = Path(folder, name)
    if given.exists():  # a folder, which read_file speaks of
        return str(given)
    hint = recipe_hint(given, bare=bare)
    raise InputMissingError(f"{given}: there is no such recipe.{hint}")


def read_overrides(texts: list[str], problems: Problems) -> dict[str, str]:
    """Return the overrides' values by their keys, as they were written; problems gets those that are none."""
    given: dict[str, str] = {}
    rest = list(texts)
    while rest:
        text = rest.pop(0)
        if text.startswith("-"):
            if rest and "=" not in text and "=" not in rest[0] and not rest[0].startswith("-"):
                text = f"{text}={rest.pop(0)}"
            problems.add(COMMAND_LINE, wrong_option(text))
            continue
        name, equals, value = text.partition("=")
        if name.count(".") > MOST_PARTS:
            problems.add(
                COMMAND_LINE,
                f"{show_plain(name)} has {name.count('.') + 1:,} parts, and no key has so many. Write "
                "section.key=value.",
            )
            continue
        if not equals or not name:
            problems.add(
                COMMAND_LINE, f"{name} is not an override. Write section.key=value, for example train.max_steps=100."
            )
            continue
        if whole := _joined(value, rest):
            value, count = whole
            rest = rest[count:]
            problems.add(
                f"{COMMAND_LINE}: {name}",
                f"the shell cut the value at its spaces. Quote it: {shlex.quote(f'{name}={value}')}",
            )
        elif name in given:
            apart = any(v.startswith(tuple(OPENING)) for v in (value, given.pop(name)))
            hint = " (If it was one value in braces, the shell took it apart: put the whole override in quotes.)"
            problems.add(f"{COMMAND_LINE}: {name}", f"is given twice. Remove one of them.{hint if apart else ''}")
        elif inside := next(
            (key for key in LISTS if name.startswith(f"{key}.") and not name[len(key) + 1 : len(key) + 2].isdecimal()),
            None,
        ):
            key = name[len(inside) + 1 :]
            problems.add(
                f"{COMMAND_LINE}: {name}",
                f"{inside} is a list. Write {inside}.0.{key}={show_plain(value)} for its first entry, or the whole "
                f"list: {shlex.quote(f'{inside}=[{{{key}: {show_plain(value)}}}]')}",
            )
        else:
            given[name] = value
    return given


def show_plain(value: str) -> str:
    """Return a value as it may be printed, without the quotes around text."""
    return show(value).strip("'")


def _joined(value: str, following: list[str]) -> tuple[str, int] | None:
    """Return the value that brackets hold together, and how many words of the command line after it belong to it; None
    when it is whole, or never becomes so."""
    if not value.startswith(tuple(OPENING)) or _open(value) == 0:
        return None
    for count, _ in enumerate(following, start=1):
        joined = " ".join([value, *following[:count]])
        if _open(joined) == 0:
            return joined, count
    return None


def _open(text: str) -> int:
    return sum((c in OPENING) - (c in CLOSING) for c in text)


# What other programs call the option that names the recipe.
RECIPE_OPTIONS = ("config", "config_file", "config_path", "recipe", "c")


def recipe_hint(given: Path, *, bare: bool) -> str:
    """Return what may have been meant by the path of a recipe that is not there. bare: it is a name without a
    folder."""
    import difflib

    beside = given.parent if given.parent.is_dir() else None
    here = sorted(p.name for p in beside.glob("*.y*ml")) if beside else []
    shipped = sorted(p.stem for p in SHIPPED.glob("*.yaml"))
    stem = given.stem if given.suffix in SUFFIXES else given.name
    if near := difflib.get_close_matches(stem, shipped, n=1):
        return f" Did you mean {near[0]}?"
    if here:
        return f" {beside} holds: {', '.join(here[:12])}."
    if bare and shipped:
        return f" Check the path. Shipped with this program: {', '.join(shipped)}."
    return " Check the path."


def recipe_option(argv: list[str]) -> str | None:
    """Return what to write instead of an option that names the recipe; None for another one."""
    option, _, value = argv[0].partition("=")
    if option.lstrip("-") not in RECIPE_OPTIONS:
        return None
    name = value or (argv[1] if len(argv) > 1 else "RECIPE.yaml")
    return f"{option} is not an option: the recipe is the first word. Write {name} first, then section.key=value."


def wrong_option(text: str) -> str:
    """Return what to write instead of an option."""
    return recipe_option([text]) or _as_override(text)


def _as_override(text: str) -> str:
    """Return what to write instead of `--key=value`."""
    from pipeline.recipe.mistakes import RENAMED, all_keys

    option, _, value = text.partition("=")
    name = option.lstrip("-").replace("-", "_")
    section, _, last = name.rpartition(".")
    places = [place for place in all_keys().get(last, []) if not section or place == name]
    of_train = [place for place in places if place == f"train.{last}"]  # what an option of a trainer's name means
    if of_train or len(places) == 1:
        example = f"here {(of_train or places)[0]}={show_plain(value) if value else '...'}"
    elif last in RENAMED and not RENAMED[last].startswith("-"):
        example = f"here {RENAMED[last]}"
    else:
        example = f"here one of {', '.join(places[:3])}" if places else "for example train.max_steps=100"
    return f"{option} is not an override. Write section.key=value, {example}."


# One tree of values out of a recipe, what it extends, and the command line: later layers win key by key.

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
    """Return the tree of the recipe at path with everything it extends, and the overrides on top."""
    tree = _with_bases(path, problems, ())
    layer: Item = Item({}, COMMAND_LINE, file=COMMAND_LINE)
    for name, value in read_overrides(overrides, problems).items():
        item, parts = _override_value(name, value, problems), name.split(".")
        if any(map(ENTRY.fullmatch, parts)):
            tree = _set_in_list(tree, parts, item, problems, name)
        else:
            layer = _set(layer, parts, item, problems, name)
    return merge(tree, layer)


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
            f"{extends.where}: extends: must be the path of one recipe, relative to this file. Write extends: "
            "other.yaml."
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
            f"{extends.where}: extends: {extends.value} extends this recipe in turn, in a circle. Remove one of the "
            "two."
        )
    return merge(_with_bases(base, problems, (*parents, real)), own)


def merge(base: Item, layer: Item) -> Item:
    """Return layer over base: sections and dictionaries key by key, everything else replaced."""
    gone = [name for group in EXCLUSIVE if any(_is_given(layer, one) for one in group) for name in group]
    for name in [*gone, *(SET_BY_DEPTH if _is_given(layer, "model.depth") else ())]:
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
    """Return the value of an override. Where the key holds text it is what was typed, but for quotes around the whole
    and null; elsewhere it is read as YAML, of which no part may become a comment."""
    where = COMMAND_LINE
    if looks_secret(text):
        problems.add(where, f"a token or password is given. {INSTEAD}")
        return Item(None, where, file=COMMAND_LINE)
    is_quoted = re.fullmatch(r"(['\"]).*\1", text, re.DOTALL)
    if text[:1] in ("*", "&", "!", "%", "@", "`") or (_holds_text(name, text) and not is_quoted):
        if strange := not_text(text):
            raise RecipeError(f"{where}: {name}: {strange}")
        return Item(None if text in ("", "null") else text, where, quoted=True, file=COMMAND_LINE)
    comment = (
        f"{where}: {name}: a # begins a comment in {show(text)}, and what follows would be cut off. Put the text that "
        "holds it in quotes."
    )
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


def _without_secrets(item: Item, problems: Problems) -> Item:
    """Return the tree without secrets, each of them noted; no later message can print one."""
    if isinstance(item.value, dict):
        values = {}
        for key, child in item.value.items():
            if SECRET_NAME.search(key) and child.value is not None:
                problems.add(f"{child.where}: {key}", f"a secret never stands in a recipe. {INSTEAD}")
                continue
            values[key] = _without_secrets(child, problems)
        return replace(item, value=values)
    if isinstance(item.value, list):
        return replace(item, value=[_without_secrets(child, problems) for child in item.value])
    if isinstance(item.value, str) and looks_secret(item.value):
        problems.add(item.where, f"holds a token or password. {INSTEAD}")
        return replace(item, value=None)
    return item
