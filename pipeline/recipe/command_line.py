"""The command line of a recipe: which file its first word means, and the overrides after it."""

import difflib
import os
import shlex
from pathlib import Path

from pipeline.artifacts.errors import InputMissingError, RecipeError
from pipeline.recipe.names import RENAMED, all_keys
from pipeline.recipe.problems import Problems, show

COMMAND_LINE = "command line"
SHIPPED = Path(__file__).parents[2] / "recipes"
SUFFIXES = ("", ".yaml", ".yml")
# What other programs call the option that names the recipe.
RECIPE_OPTIONS = ("config", "config_file", "config_path", "recipe", "c")
# Keys whose value is a list of entries with keys of their own.
LISTS = ("data.sources", "data.validation", "evals.chat.own")
MOST_PARTS = 50  # dots of an override's key
OPENING, CLOSING = "[{", "]}"


def recipe_of(argv: list[str]) -> str:
    """Return the recipe that a command line begins with. Raises RecipeError when it begins with something else."""
    if argv and not argv[0].startswith("-") and ("=" not in argv[0] or argv[0].endswith((".yaml", ".yml"))):
        return argv[0]
    given = f" before {argv[0].split('=')[0]}" if argv else ""
    if argv and (named := _recipe_option(argv)):
        raise RecipeError(f"{COMMAND_LINE}: {named}")
    raise RecipeError(
        f"{COMMAND_LINE}: no recipe is named{given}. Write the path of a .yaml file first, then section.key=value."
    )


def find_recipe(name: str, *, folder: str | Path = "") -> str:
    """Return the path of a recipe given by a path or by its bare name, which is looked for in `folder`, in recipes/ below it
    and among the shipped ones; `.yaml` may be left out.

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
    beside = given.parent if given.parent.is_dir() else None
    here = sorted(p.name for p in beside.glob("*.y*ml")) if beside else []
    shipped = sorted(p.stem for p in SHIPPED.glob("*.yaml"))
    stem = given.stem if given.suffix in SUFFIXES else given.name
    if near := difflib.get_close_matches(stem, shipped, n=1):
        hint = f" Did you mean {near[0]}?"
    elif here:
        hint = f" {beside} holds: {', '.join(here[:12])}."
    else:
        hint = (
            f" Check the path. Shipped with this program: {', '.join(shipped)}."
            if bare and shipped
            else " Check the path."
        )
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
            problems.add(COMMAND_LINE, _recipe_option([text]) or _as_override(text))
            continue
        name, equals, value = text.partition("=")
        if name.count(".") > MOST_PARTS:
            problems.add(
                COMMAND_LINE,
                f"{show_plain(name)} has {name.count('.') + 1:,} parts, and no key has so many. Write section.key=value.",
            )
            continue
        if not equals or not name:
            problems.add(COMMAND_LINE, f"{name} is not an override. Write section.key=value, for example train.max_steps=100.")  # fmt: skip
            continue
        if whole := _joined(value, rest):
            value, count = whole
            rest = rest[count:]
            problems.add(f"{COMMAND_LINE}: {name}", f"the shell cut the value at its spaces. Quote it: {shlex.quote(f'{name}={value}')}")  # fmt: skip
        elif name in given:
            apart = any(v.startswith(tuple(OPENING)) for v in (value, given.pop(name)))
            hint = " (If it was one value in braces, the shell took it apart: put the whole override in quotes.)"
            problems.add(f"{COMMAND_LINE}: {name}", f"is given twice. Remove one of them.{hint if apart else ''}")
        elif inside := next((key for key in LISTS if name.startswith(f"{key}.") and not name[len(key) + 1 : len(key) + 2].isdecimal()), None):  # fmt: skip
            key = name[len(inside) + 1 :]
            problems.add(
                f"{COMMAND_LINE}: {name}",
                f"{inside} is a list. Write {inside}.0.{key}={show_plain(value)} for its first entry, or the whole list: {shlex.quote(f'{inside}=[{{{key}: {show_plain(value)}}}]')}",
            )
        else:
            given[name] = value
    return given


def show_plain(value: str) -> str:
    """A value as it may be printed, without the quotes around text."""
    return show(value).strip("'")


def _joined(value: str, following: list[str]) -> tuple[str, int] | None:
    """The value that brackets hold together, and how many words of the command line after it belong to it; None when it is
    whole, or never becomes so."""
    if not value.startswith(tuple(OPENING)) or _open(value) == 0:
        return None
    for count, _ in enumerate(following, start=1):
        joined = " ".join([value, *following[:count]])
        if _open(joined) == 0:
            return joined, count
    return None


def _open(text: str) -> int:
    return sum((c in OPENING) - (c in CLOSING) for c in text)


def _recipe_option(argv: list[str]) -> str | None:
    """Return what to write instead of an option that names the recipe; None for another one."""
    option, _, value = argv[0].partition("=")
    if option.lstrip("-") not in RECIPE_OPTIONS:
        return None
    name = value or (argv[1] if len(argv) > 1 else "RECIPE.yaml")
    return f"{option} is not an option: the recipe is the first word. Write {name} first, then section.key=value."


def _as_override(text: str) -> str:
    """Return what to write instead of `--key=value`."""
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
