"""The text of a recipe: YAML within bounds, with the line of every key, in layers of files and overrides of the
command line; and files of other programs as PyYAML reads them.

Scalars are those of YAML 1.2: 3e-4 is a number, `no` and `off` are text. A file may come from anywhere: its size,
depth, number of values and what its aliases expand to are bounded before anything is made of it.

Why not ruamel.yaml, which reads YAML 1.2 and keeps lines: it bounds nothing. Of version 0.19 ten KB of `[` took 25 s
and ended as RecursionError, a list of 240 KB 23 s (PyYAML's composer stops at 50 levels and 20,000 values); it makes
dates and octal numbers of unquoted text, takes tags, and its import doubles that of PyYAML, which datasets and
transformers load anyway. The scalars are 20 lines here, and the explained syntax errors (mistakes.py) would stay.
"""

import os
import re
import shlex
import unicodedata
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_origin

import yaml

from pipeline.process.errors import DamagedFileError, InputMissingError, RecipeError
from pipeline.process.secrets import looks_secret
from pipeline.process.storage import open_regular
from pipeline.recipe.schema import alternatives, annotation_of

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


def load_yaml(path: str | Path, *, most_values: int = MOST_VALUES) -> Any:
    """Return the value of a YAML file of a run, a repository or another program, as yaml.safe_load would.

    Raises yaml.YAMLError, also for what lies outside the bounds and for values that cannot be (a number of 5,000
    digits); OSError as open does.
    """
    most_bytes = MOST_BYTES * most_values // MOST_VALUES
    with open_regular(path) as file:
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
            from pipeline.recipe.mistakes import explain_yaml

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
        with open_regular(file) as opened:
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
        from pipeline.recipe.mistakes import explain_yaml

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


# The command line of a recipe: which file its first word means, and the overrides after it.

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
    from pipeline.recipe.mistakes import recipe_option

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
    from pipeline.recipe.mistakes import recipe_hint

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
            from pipeline.recipe.mistakes import wrong_option

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
