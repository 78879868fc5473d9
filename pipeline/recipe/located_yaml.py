"""YAML with the line of every key, read as YAML 1.2 reads scalars: 3e-4 is a number, `no` and `off` are text."""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pipeline.artifacts.errors import InputMissingError, RecipeError
from pipeline.recipe.problems import Problems

MOST_VALUES = 20_000  # of a recipe with its aliases expanded; the longest of ours has 100
INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(_[0-9]+)*(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
WORDS = {"": None, "~": None, "null": None, "Null": None, "NULL": None, "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}  # fmt: skip


@dataclass(frozen=True)
class Item:
    """A value and where it stands. value: a scalar, a list of Items, or a dict of Items by key."""

    value: Any
    where: str
    quoted: bool = False
    file: str | None = None

    def plain(self) -> Any:
        """The value without places."""
        if isinstance(self.value, dict):
            return {name: item.plain() for name, item in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return self.value


def read_file(path: str, problems: Problems) -> Item:
    """The mapping at the top of a recipe file. Raises InputMissingError, or RecipeError when it is no YAML mapping."""
    file = Path(path)
    if file.is_dir():
        raise InputMissingError(f"{path}: is a folder, not a recipe. Name a .yaml file in it.")
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise InputMissingError(f"{path}: cannot be read ({error.strerror}). Check its permissions.") from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise RecipeError(
            f"{path}:{line}: is not UTF-8 text (byte 0x{raw[error.start]:02x}). Save the file as UTF-8."
        ) from None
    item = compose(text, path, problems)
    if item.value is None:
        raise RecipeError(f"{path}: is empty. Write at least `extends: another.yaml`, or copy a recipe from recipes/.")
    if not isinstance(item.value, dict):
        kind = "a list" if isinstance(item.value, list) else "a single value"
        raise RecipeError(
            f"{item.where}: holds {kind}. A recipe is sections with keys: `train:` and below it `  seed: 42`."
        )
    return item


def compose(text: str, file: str, problems: Problems, *, where: str | None = None) -> Item:
    """Parse text. where: one place for everything, for a value of the command line."""
    try:
        node = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        mark = (
            error.context_mark
            if "end of stream" in (error.problem or "") and error.context_mark
            else error.problem_mark
        )
        place = where or f"{file}:{mark.line + 1}" if mark else file
        raise RecipeError(f"{place}: {_explain(error)}") from None
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        byte = error.character - 0xDC00  # as Python reads a byte that is no UTF-8
        what = (
            f"byte {byte:#x}, which is no UTF-8"
            if 0x80 <= byte <= 0xFF
            else f"control character U+{error.character:04X}"
        )
        raise RecipeError(
            f"{where or f'{file}:{line}'}: holds the {what}. Remove it or give the path another name."
        ) from None
    if node is None:
        return Item(None, where or file, file=file)
    return _item(node, file, problems, where, (), Counter())


def _item(
    node: yaml.Node, file: str, problems: Problems, where: str | None, parents: tuple[int, ...], count: Counter
) -> Item:
    place = where or f"{file}:{node.start_mark.line + 1}"
    count["values"] += 1
    if count["values"] > MOST_VALUES:
        raise RecipeError(f"{place}: its aliases expand to more than {MOST_VALUES:,} values. Write fewer of them.")
    if id(node) in parents:
        raise RecipeError(f"{place}: an alias that holds itself. Write the value out.")
    parents = (*parents, id(node))
    if isinstance(node, yaml.ScalarNode):
        if node.tag != "tag:yaml.org,2002:str":
            raise RecipeError(f"{place}: the tag {node.tag} is not read here. Write the plain value.")
        return Item(_scalar(node), place, quoted=node.style is not None, file=file)
    if isinstance(node, yaml.SequenceNode):
        return Item([_item(child, file, problems, where, parents, count) for child in node.value], place, file=file)
    values: dict[str, Item] = {}
    merged: dict[str, Item] = {}
    for key_node, value_node in node.value:
        line = where or f"{file}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            problems.add(line, "a key must be one word. Put braces that are text in quotes.")
            continue
        name = key_node.value
        if name == "<<" and key_node.style is None:
            nodes = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
            items = [_item(child, file, problems, where, parents, count) for child in nodes]
            if not all(isinstance(item.value, dict) for item in items):
                problems.add(line, "<<: merges keys with values into these. Give it an alias of such, as <<: *name.")
                continue
            for item in items:
                merged = {**item.value, **merged}  # the earlier one wins
            continue
        if name in values:
            problems.add(line, f"{name}: is given twice, here and at {values[name].where}. Remove one of them.")
            continue
        child = _item(value_node, file, problems, where, parents, count)
        values[name] = Item(child.value, line, child.quoted, file)
    return Item({**merged, **values}, place, file=file)


def _scalar(node: yaml.ScalarNode) -> Any:
    text = node.value
    if node.style is not None:
        return text
    if text in WORDS:
        return WORDS[text]
    if INTEGER.fullmatch(text):
        return int(text)
    if FLOAT.fullmatch(text) and not re.fullmatch(r"[-+]?0[0-9_]+", text):
        return float(text)
    if re.fullmatch(r"[-+]?\.(inf|Inf|INF)", text):
        return float(text.replace(".", "", 1))
    if text in (".nan", ".NaN", ".NAN"):
        return float("nan")
    return text


def _explain(error: yaml.MarkedYAMLError) -> str:
    problem, context = error.problem or "", error.context or ""
    if "'\\t'" in problem or "\\t" in problem:
        return "a tab character. YAML indents with spaces: replace the tab."
    if "end of stream" in problem and "quoted" in context:
        return "a quote is opened and never closed. Close it on the same line."
    if "undefined alias" in problem:
        return 'an alias without its anchor. Write &name where the value stands first; a text that begins with * must stand in quotes: "*.parquet".'
    if "alias" in context:
        return 'a value that begins with * must stand in quotes: "*.parquet".'
    if "anchor" in context:
        return "a value that begins with & must stand in quotes."
    if "single document" in context:
        return "a second document begins here. A recipe is one document: remove the `---`."
    if "mapping values are not allowed" in problem:
        return "a colon where no key can stand. Put a text that holds `: ` in quotes, and check the indentation."
    if "could not find expected ':'" in problem:
        return "a key without a colon here or on the line before. Write `key: value`."
    return f"is not valid YAML: {problem}{f' ({context})' if context else ''}. Check indentation, colons and quotes."
