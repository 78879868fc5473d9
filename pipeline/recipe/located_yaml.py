"""The text of a recipe as values with the line of every key; and YAML files of other programs as PyYAML reads them.

Scalars are those of YAML 1.2: 3e-4 is a number, `no` and `off` are text. PyYAML composes the nodes, since ruamel.yaml,
which reads YAML 1.2, makes dates and octal numbers of unquoted text, and its import takes twice the time.
"""

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pipeline.process.errors import DamagedFileError, InputMissingError, RecipeError
from pipeline.process.secrets import looks_secret

SECRET_NAME = re.compile(r"(^|_)(token|password|passwd|api_?key|secret|credentials?)$", re.IGNORECASE)
INSTEAD = "Remove it, and set HF_TOKEN or run `hf auth login`; WANDB_API_KEY for W&B."
MOST_BYTES = 1 << 20  # of a recipe, which is a page of text
INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(_[0-9]+)*(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
WORDS = {
    "": None, "~": None, "null": None, "Null": None, "NULL": None, "true": True, "True": True, "TRUE": True,
    "false": False, "False": False, "FALSE": False,
}  # fmt: skip
MOST_DIGITS = 300  # of a number; a float ends at 308

Say = Callable[[str, str], None]


class Problems:
    """A list of `where: what is wrong. What to do.` lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, where: str, what: str) -> None:
        line = f"{where}: {what}"
        if line not in self.lines:
            self.lines.append(line)

    def of(self, where: Callable[[str], str]) -> Say:
        """Return say(key, what is wrong with it. What to do.), which adds a line. where: Recipe.where."""
        return lambda key, what: self.add(where(key), what)

    def raise_if_any(self) -> None:
        if self.lines:
            raise RecipeError("\n".join(sorted(self.lines, key=_by_place)))


def _by_place(line: str) -> tuple[str, int]:
    match = re.match(r"(.*?):(\d+): ", line)
    if match is None:
        return line.split(": ")[0], 0
    return match[1], int(match[2])


def show(value: Any) -> str:
    """Return a value as a message may print it: short, and never a secret."""
    text = str(value)
    if isinstance(value, bool):
        text = text.lower()
    if looks_secret(text):
        return "(a secret)"
    if len(text) > 60:
        text = text[:57] + "..."
    return repr(text) if isinstance(value, str) else text


@dataclass(frozen=True)
class Item:
    """A value and its place (`file:line`). value: a scalar, a list of Items, or a dict of Items by key."""

    value: Any
    where: str

    def plain(self) -> Any:
        """Return the value without its places."""
        if isinstance(self.value, dict):
            return {name: item.plain() for name, item in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return self.value

    def at(self, name: str) -> "Item | None":
        """Return the value of a dotted key; None when there is none."""
        item: Item | None = self
        for part in name.split("."):
            if item is not None:
                item = item.child(part)
        return item

    def child(self, key: str | int) -> "Item | None":
        """Return the value of a key, or the entry of a list; None when there is none."""
        if isinstance(self.value, dict):
            return self.value.get(key)
        if isinstance(self.value, list) and isinstance(key, int):
            return self.value[key]
        return None


def load_mapping(path: str | Path, *, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """Return the keys and values of a YAML file of a run, a repository or another program, {} of an empty one.

    Raises DamagedFileError for anything else, OSError as open does.
    """
    with open(path, "rb") as file:
        data = file.read(most_bytes + 1)
    reason = f"it is larger than {most_bytes >> 20} MiB"
    if len(data) <= most_bytes:
        try:
            value = yaml.safe_load(data) or {}
            if isinstance(value, dict):
                return value
            reason = "it holds no keys with values"
        except yaml.MarkedYAMLError as error:
            reason = explain_yaml(error)
        except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:  # dates that cannot be
            reason = " ".join(str(error).split())
    raise DamagedFileError(
        f"{path}: is no YAML as it was written ({reason.partition('. ')[0].rstrip('.')}). Put it back from a copy."
    )


def explain_yaml(error: yaml.MarkedYAMLError) -> str:
    """Return what is wrong with a text that is no YAML, and what to do about it."""
    problem, context = error.problem or "", error.context or ""
    if "'\\t'" in problem or "\\t" in problem:
        return "a tab character. YAML indents with spaces: replace the tab."
    if "end of stream" in problem and "quoted" in context:
        return "a quote is opened and never closed. Close it on the same line."
    if "undefined alias" in problem:
        return (
            "an alias without its anchor. Write &name before its first use; put a text that begins with * "
            'in quotes: "*.parquet".'
        )
    if "alias" in context:
        return 'a value that begins with *. Put it in quotes: "*.parquet".'
    if "single document" in context:
        return "a second document begins here. A recipe is one document: remove the `---`."
    if "mapping values are not allowed" in problem:
        return "a colon where no key can stand. Put a text that holds `: ` in quotes, and check the indentation."
    if "could not find expected ':'" in problem:
        return "a key without a colon here or on the line before. Write `key: value`."
    if context:
        problem += f" ({context})"
    return f"is not valid YAML: {problem}. Check indentation, colons and quotes."


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
        raise RecipeError(f"{path}: is larger than {MOST_BYTES >> 20} MiB, and a recipe is a page of text.")
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
        node = yaml.BaseLoader(text).get_single_node()  # type: ignore[arg-type]
        return Item(None, where or file) if node is None else _item(node, file, problems, where)
    except yaml.MarkedYAMLError as error:
        at_end = "end of stream" in (error.problem or "")
        mark = (at_end and error.context_mark) or error.problem_mark
        place = where or f"{file}:{mark.line + 1}" if mark else file
        raise RecipeError(f"{place}: {explain_yaml(error)}") from None
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        code = f"U+{error.character:04X}"
        raise RecipeError(f"{where or f'{file}:{line}'}: holds the control character {code}. Remove it.") from None
    except RecursionError:
        raise RecipeError(f"{where or file}: is nested too deeply. Write it flatter.") from None


def _item(node: yaml.Node, file: str, problems: Problems, where: str | None) -> Item:
    place = where or f"{file}:{node.start_mark.line + 1}"
    if isinstance(node, yaml.ScalarNode):
        if node.tag != "tag:yaml.org,2002:str":
            raise RecipeError(f"{place}: the tag {node.tag} is not read here. Write the plain value.")
        if strange := control_character(node.value):
            raise RecipeError(f"{place}: {strange}")
        if node.style:  # in quotes, or a block: text whatever it looks like
            return Item(node.value, place)
        return Item(_scalar(node.value), place)
    if isinstance(node, yaml.SequenceNode):
        return Item([_item(child, file, problems, where) for child in node.value], place)
    # A mapping. PyYAML's own loader keeps the last of two equal keys; here both are named.
    values: dict[str, Item] = {}
    merged: dict[str, Item] = {}
    for key_node, value_node in node.value:
        line = where or f"{file}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            problems.add(line, "a key must be one word. Put braces that are text in quotes.")
            continue
        name = key_node.value
        if strange := control_character(name):
            raise RecipeError(f"{line}: a key {strange}")
        child = _item(value_node, file, problems, where)
        if name == "<<" and key_node.style is None:
            merges = child.value
            if not isinstance(merges, list):
                merges = [child]
            for item in merges:
                if isinstance(item.value, dict):
                    merged = {**item.value, **merged}  # the earlier one wins
                else:
                    problems.add(
                        line, "<<: merges keys with values into these. Give it an alias of such, as <<: *name."
                    )
        elif name in values:
            problems.add(line, f"{name}: is given twice, here and at {values[name].where}. Remove one of them.")
        else:
            values[name] = Item(child.value, line)
    return Item({**merged, **values}, place)


def control_character(text: str) -> str | None:
    """Return the sentence about a character that no name, path or prompt holds; a terminal would obey some of them."""
    for character in text:
        if unicodedata.category(character) in ("Cc", "Cs") and character not in "\t\n\r":
            return f"holds the control character U+{ord(character):04X}. Remove it."
    return None


def _scalar(text: str) -> Any:
    """Return the value of an unquoted scalar."""
    if text in WORDS:
        return WORDS[text]
    if len(text) > MOST_DIGITS:  # int() refuses thousands of digits
        return text
    if INTEGER.fullmatch(text):
        return int(text)
    if FLOAT.fullmatch(text) and not re.fullmatch(r"[-+]?0[0-9_]+", text):
        return float(text)
    if re.fullmatch(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", text):
        return float(text.replace(".", "", 1))
    return text
