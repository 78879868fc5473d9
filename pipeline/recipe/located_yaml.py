"""The text of a recipe: YAML within bounds, with the line of every key; and files of other programs as PyYAML reads
them.

Scalars are those of YAML 1.2: 3e-4 is a number, `no` and `off` are text. A file may come from anywhere: its size,
depth, number of values and what its aliases expand to are bounded before anything is made of it.

Why not ruamel.yaml, which reads YAML 1.2 and keeps lines: it bounds nothing. Of version 0.19 ten KB of `[` took 25 s
and ended as RecursionError, a list of 240 KB 23 s (PyYAML's composer stops at 50 levels and 20,000 values); it makes
dates and octal numbers of unquoted text, takes tags, and its import doubles that of PyYAML, which datasets and
transformers load anyway. The scalars are 20 lines here, and the explained syntax errors would stay.
"""

import os
import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pipeline.process.errors import DamagedFileError, InputMissingError, RecipeError
from pipeline.process.secrets import looks_secret

# Mistakes of a recipe, collected so that the user sees all of them at once.

SECRET_NAME = re.compile(r"(^|_)(token|password|passwd|api_?key|secret|credentials?)$", re.IGNORECASE)
INSTEAD = "Remove it, and set HF_TOKEN or run `hf auth login`; WANDB_API_KEY for W&B."


class Problems:
    """A list of `where: what is wrong. What to do.` lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, where: str, what: str) -> None:
        line = f"{where}: {what}"
        if line not in self.lines:
            self.lines.append(line)

    def raise_if_any(self) -> None:
        if self.lines:
            raise RecipeError("\n".join(sorted(self.lines, key=_by_place)))


def _by_place(line: str) -> tuple[str, int]:
    match = re.match(r"(.*?):(\d+): ", line)
    return (match[1], int(match[2])) if match else (line.split(": ")[0], 0)


def show(value: Any) -> str:
    """Return a value as a message may print it: short, and never a secret."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if looks_secret(text):
        return "(a secret)"
    text = text if len(text) <= 60 else text[:57] + "..."
    return repr(text) if isinstance(value, str) else text


# A text as values with their places.

MOST_BYTES = 1 << 20
MOST_DEPTH = 50  # of keys below keys; ours have 5
MOST_VALUES = 20_000  # with the aliases expanded; the longest of ours has 100
MOST_DIGITS = 300  # of a number, whatever it is for; a float ends at 308
INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(_[0-9]+)*(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
WORDS = {
    "": None, "~": None, "null": None, "Null": None, "NULL": None, "true": True, "True": True, "TRUE": True,
    "false": False, "False": False, "FALSE": False,
}  # fmt: skip


@dataclass(frozen=True)
class Item:
    """A value and its place (`file:line`). value: a scalar, a list of Items, or a dict of Items by key."""

    value: Any
    where: str
    quoted: bool = False
    file: str | None = None

    def plain(self) -> Any:
        """Return the value without its places."""
        if isinstance(self.value, dict):
            return {name: item.plain() for name, item in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return self.value


class BoundsError(yaml.MarkedYAMLError):
    """A file that is larger, deeper or longer than anything that is read here; the problem is the whole sentence."""


class _BoundedComposer:
    """Count the values of a YAML loader and their depth while they are composed, and raise BoundsError beyond the
    bounds."""

    most_values = MOST_VALUES
    _values = _depth = 0

    def compose_node(self, parent: Any, index: Any) -> yaml.Node:
        self._values, self._depth = self._values + 1, self._depth + 1
        mark = self.peek_event().start_mark  # type: ignore[attr-defined]
        if self._values > self.most_values:
            raise BoundsError(
                problem=f"has more than {self.most_values:,} values. Write fewer of them.", problem_mark=mark
            )
        if self._depth > MOST_DEPTH:
            raise BoundsError(
                problem=f"is nested more than {MOST_DEPTH} levels deep. Write it flatter.", problem_mark=mark
            )
        node = super().compose_node(parent, index)  # type: ignore[misc]
        self._depth -= 1
        return node


class _RecipeLoader(_BoundedComposer, yaml.BaseLoader):
    """Compose nodes whose scalars are text."""


class _PlainLoader(_BoundedComposer, yaml.SafeLoader):
    """PyYAML's safe loader."""


def explain_yaml(error: yaml.MarkedYAMLError) -> str:
    """Return what is wrong with a text that is no YAML, and what to do about it."""
    problem, context = error.problem or "", error.context or ""
    if isinstance(error, BoundsError):
        return problem
    if "'\\t'" in problem or "\\t" in problem:
        return "a tab character. YAML indents with spaces: replace the tab."
    if "end of stream" in problem and "quoted" in context:
        return "a quote is opened and never closed. Close it on the same line."
    if "undefined alias" in problem:
        return (
            "an alias without its anchor. Write &name where the value stands first; a text that begins with * must "
            'stand in quotes: "*.parquet".'
        )
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


def load_yaml(path: str | Path, *, most_values: int = MOST_VALUES) -> Any:
    """Return the value of a YAML file of a run, a repository or another program, as yaml.safe_load would.

    Raises yaml.YAMLError, also for what lies outside the bounds and for values that cannot be (a number of 5,000
    digits); OSError as open does.
    """
    most_bytes = MOST_BYTES * most_values // MOST_VALUES
    with open(path, "rb") as file:
        data = file.read(
            min(os.fstat(file.fileno()).st_size, most_bytes) + 1
        )  # read(n) takes n bytes of memory at once
    if len(data) > most_bytes:
        raise yaml.YAMLError(f"it is larger than {most_bytes >> 20} MiB")
    try:
        loader = _PlainLoader(data)
        loader.most_values = most_values
        node = loader.get_single_node()
        if node is None:
            return None
        _bound_aliases(node, most_values)
        return loader.construct_document(node)
    except (ValueError, OverflowError) as error:  # bytes that are no text, dates and numbers that cannot be
        raise yaml.YAMLError(str(error)) from None


def load_mapping(path: str | Path, *, most_values: int = MOST_VALUES) -> dict[str, Any]:
    """Return the keys and values of a YAML file, {} of an empty one.

    Raises DamagedFileError for anything else, OSError as open does.
    """
    try:
        value = load_yaml(path, most_values=most_values) or {}
        if isinstance(value, dict):
            return value
        reason = "it holds no keys with values"
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        if isinstance(error, yaml.MarkedYAMLError):
            reason = explain_yaml(error)
    raise DamagedFileError(
        f"{path}: is no YAML as it was written ({reason.partition('. ')[0].rstrip('.')}). Put it back from a copy."
    )


def _bound_aliases(top: yaml.Node, most: int) -> None:
    """Raise BoundsError where aliases stand for more values than `most`, as one does that holds itself."""
    left, count = [top], 0
    while left:
        node, count = left.pop(), count + 1
        if count > most:
            problem = f"its aliases expand to more than {most:,} values. Write fewer of them."
            raise BoundsError(problem=problem, problem_mark=node.start_mark)
        if isinstance(node, yaml.MappingNode):
            left += [child for pair in node.value for child in pair]
        elif isinstance(node, yaml.SequenceNode):
            left += node.value


def read_file(path: str, problems: Problems) -> Item:
    """Return the mapping at the top of a recipe file. Raises InputMissingError, or RecipeError when it is no YAML
    mapping."""
    file = Path(path)
    if file.is_dir():
        raise InputMissingError(f"{path}: is a folder, not a recipe. Name a .yaml file in it.")
    try:
        with open(file, "rb") as opened:
            raw = opened.read(MOST_BYTES + 1)
    except OSError as error:
        raise InputMissingError(f"{path}: cannot be read ({error.strerror}). Check its permissions.") from None
    if len(raw) > MOST_BYTES:
        raise RecipeError(
            f"{path}:{raw.count(10) + 1}: is larger than {MOST_BYTES >> 20} MiB, and a recipe is a page of text. Name "
            "a recipe."
        )
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
        node = _RecipeLoader(text).get_single_node()
        if node is not None:
            _bound_aliases(node, MOST_VALUES)
    except yaml.MarkedYAMLError as error:
        at_end = "end of stream" in (error.problem or "")
        mark = (at_end and error.context_mark) or error.problem_mark
        place = where or f"{file}:{mark.line + 1}" if mark else file
        raise RecipeError(f"{place}: {explain_yaml(error)}") from None
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
    return _item(node, file, problems, where)


def _item(node: yaml.Node, file: str, problems: Problems, where: str | None) -> Item:
    place = where or f"{file}:{node.start_mark.line + 1}"
    if isinstance(node, yaml.ScalarNode):
        if node.tag != "tag:yaml.org,2002:str":
            raise RecipeError(f"{place}: the tag {node.tag} is not read here. Write the plain value.")
        if strange := not_text(node.value):
            raise RecipeError(f"{place}: {strange}")
        if where and node.style is None and node.start_mark.line != node.end_mark.line:
            problems.add(
                place, f"{show(node.value)} goes over several lines, which would be joined. Put it in quotes."
            )
        return Item(_scalar(node, place), place, quoted=node.style is not None, file=file)
    if isinstance(node, yaml.SequenceNode):
        return Item([_item(child, file, problems, where) for child in node.value], place, file=file)
    values: dict[str, Item] = {}
    merged: dict[str, Item] = {}
    for key_node, value_node in node.value:
        line = where or f"{file}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            problems.add(line, "a key must be one word. Put braces that are text in quotes.")
            continue
        name = key_node.value
        if strange := not_text(name):
            raise RecipeError(f"{line}: a key {strange}")
        if name == "<<" and key_node.style is None:
            nodes = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
            items = [_item(child, file, problems, where) for child in nodes]
            if not all(isinstance(item.value, dict) for item in items):
                problems.add(line, "<<: merges keys with values into these. Give it an alias of such, as <<: *name.")
                continue
            for item in items:
                merged = {**item.value, **merged}  # the earlier one wins
            continue
        if name in values:
            problems.add(line, f"{name}: is given twice, here and at {values[name].where}. Remove one of them.")
            continue
        child = _item(value_node, file, problems, where)
        values[name] = Item(child.value, line, child.quoted, file)
    return Item({**merged, **values}, place, file=file)


def not_text(text: str) -> str | None:
    """Return the sentence about a character that no name, path or prompt holds; a terminal would obey some of them."""
    for character in text:
        if unicodedata.category(character) in ("Cc", "Cs") and character not in "\t\n\r":
            return f"holds the control character U+{ord(character):04X}. Remove it."
    return None


def _scalar(node: yaml.ScalarNode, place: str) -> Any:
    text = node.value
    if node.style is not None:
        return text
    if text in WORDS:
        return WORDS[text]
    if len(text) > MOST_DIGITS and (INTEGER.fullmatch(text) or FLOAT.fullmatch(text)):
        raise RecipeError(f"{place}: a number of {len(text):,} digits ({text[:12]}...). Write a smaller one.")
    if INTEGER.fullmatch(text):
        return int(text)
    if FLOAT.fullmatch(text) and not re.fullmatch(r"[-+]?0[0-9_]+", text):
        return float(text)
    if re.fullmatch(r"[-+]?\.(inf|Inf|INF)", text):
        return float(text.replace(".", "", 1))
    if text in (".nan", ".NaN", ".NAN"):
        return float("nan")
    return text
