"""Values of a recipe: read by the type of their key, and their forms; what to say of a wrong one is in
recipe/mistakes.py."""

import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from glob import has_magic
from typing import Any, Literal, get_args, get_origin

from pipeline.process.network import BUCKET_FOLDER, SCHEMES, SHARDS_FORMS, is_address, is_supported, takes_shards
from pipeline.recipe.located_yaml import Item, Problems, show
from pipeline.recipe.schema import OwnTask, Recipe, Source, alternatives, keys_of

# Typed values out of YAML items: what a key's annotation promises is what it holds, or the mistake is named.

MISSING = object()
BOUNDS: tuple[tuple[str, Callable[[Any, Any], bool], str], ...] = (
    ("minimum", operator.ge, "at least"),
    ("above", operator.gt, "greater than"),
    ("maximum", operator.le, "at most"),
    ("below", operator.lt, "below"),
)


class Converter:
    """Turns items into typed values. problems gets the mistakes, places the line of every key that was given."""

    def __init__(self, problems: Problems) -> None:
        self.problems = problems
        self.places: dict[str, str] = {}

    def section(self, cls: Any, item: Item, name: str) -> Any:
        """Return an instance of the dataclass cls; keys not given keep their defaults."""
        self.places.setdefault(name, item.where)
        if item.value is None:
            return cls()
        if not isinstance(item.value, dict):
            from pipeline.recipe.mistakes import not_keys

            self.problems.add(f"{item.where}: {name}", not_keys(item))
            return cls()
        known = {f.name: (f, annotation) for f, annotation in keys_of(cls)}
        values = {}
        for key, child in item.value.items():
            path = f"{name}.{key}" if name else key
            if key not in known:
                from pipeline.recipe.mistakes import unknown_key

                self.problems.add(f"{child.where}: {path}", unknown_key(path))
                continue
            self.places[path] = child.where
            f, annotation = known[key]
            value = self.value(annotation, child, path, f.metadata)
            if value is not MISSING:
                values[key] = value
        return cls(**values)

    def value(self, annotation: Any, item: Item, path: str, limits: Any) -> Any:
        """Return the typed value, or MISSING after its mistake was noted. limits: minimum, maximum, above, below."""
        if is_dataclass(annotation):
            return self.section(annotation, item, path)
        options = alternatives(annotation)
        if item.value is None:
            if type(None) in options:
                return None
            from pipeline.recipe.mistakes import wrong_type

            self.problems.add(f"{item.where}: {path}", wrong_type(annotation, item))
            return MISSING
        if isinstance(item.value, list) and any(get_origin(o) is list for o in options):
            inner = next(get_args(o)[0] for o in options if get_origin(o) is list)
            values = [self.value(inner, child, f"{path}.{i}", limits) for i, child in enumerate(item.value)]
            return MISSING if any(v is MISSING for v in values) else values
        if isinstance(item.value, dict) and any(o is dict or get_origin(o) is dict for o in options):
            return item.plain()
        for option in options:
            value = self._scalar(option, item)
            if value is not MISSING:
                return value if self._in_limits(value, item, path, limits) else MISSING
        from pipeline.recipe.mistakes import wrong_type

        self.problems.add(f"{item.where}: {path}", wrong_type(annotation, item))
        return MISSING

    def _scalar(self, option: Any, item: Item) -> Any:
        value = item.value
        if get_origin(option) is Literal:
            return value if not isinstance(value, (dict, list)) and value in get_args(option) else MISSING
        if option is bool:
            return value if isinstance(value, bool) else MISSING
        if isinstance(value, bool):
            return MISSING
        if option is int:
            whole = isinstance(value, int) or (
                isinstance(value, float) and math.isfinite(value) and value == int(value)
            )
            return int(value) if whole and abs(value) < 2**63 else MISSING
        if option is float:
            return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else MISSING
        if option is str:
            return value if isinstance(value, str) else MISSING
        return value if option is Any else MISSING

    def _in_limits(self, value: Any, item: Item, path: str, limits: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return True
        given = [(holds, words, limits[name]) for name, holds, words in BOUNDS if limits.get(name) is not None]
        if all(holds(value, bound) for holds, _, bound in given):
            return True
        bounds = [
            f"{words} {bound:g}" if isinstance(bound, float) else f"{words} {bound}" for _, words, bound in given
        ]
        self.problems.add(f"{item.where}: {path}", f"is {show(item.value)}; it must be {' and '.join(bounds)}.")
        return False


# Formats of values whose type says too little: names of folders and repositories, module:attr, shares.

FOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")  # also what a published run may be called when it is pulled
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9_][\w.\-]*)?", re.ASCII)
BRANCH = re.compile(r"[A-Za-z0-9_][\w.\-/]*", re.ASCII)
LICENSE = re.compile(r"[a-z0-9][a-z0-9.+\-]*")
LANGUAGE = re.compile(r"[a-z]{2,3}|code|multilingual")  # the last two are the Hub's own
# Bytes of a file's name and of a path: Linux's own bounds, a few left for what is put behind.
LONGEST_NAME, LONGEST_PATH = 255, 4000
LONGEST_LABEL = 200  # characters; folders and files get a few more behind them
STEP = re.compile(r"[0-9]{1,15}")
IMPORTABLE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def check_forms(recipe: Recipe, problems: Problems) -> None:
    """Note every value whose form would only fail later, and then as something else."""
    for check in (_paths, _names, _run, _importable, _files, _options, _hub):
        check(recipe, problems)


def check_profile_steps(recipe: Recipe, problems: Problems) -> None:
    """Note steps that the run does not have; call it after the steps are known, where the recipe itself gives them."""
    steps, max_steps, where = recipe.monitor.profile_steps, recipe.train.get("max_steps"), "monitor.profile_steps"
    if steps is None:
        return
    if len(steps) != 2 or not 0 <= steps[0] <= steps[1]:
        problems.add(recipe.where(where), f"is {steps}; it must be the first and the last step. Write [10, 12].")
    elif max_steps and steps[1] >= max_steps:
        problems.add(
            recipe.where(where),
            f"ends with step {steps[1]}, and the last step of this run is {max_steps - 1}: steps are counted from 0. "
            "Write earlier ones.",
        )


def _entries(recipe: Recipe) -> list[tuple[str, Sequence[Source | OwnTask]]]:
    """Return the lists of things that are read, by their keys."""
    return [
        ("data.sources", recipe.data.sources),
        ("data.validation", recipe.data.validation or []),
        ("evals.chat.own", recipe.evals.chat.own),
    ]


def _paths(recipe: Recipe, problems: Problems) -> None:
    """Note paths that are longer than any system takes: each would report it in its own way, later."""
    places: dict[str, list[str | None]] = {
        "run.directory": [recipe.run.directory],
        "run.code_folder": [recipe.run.code_folder],
        "run.fork_from": [recipe.run.fork_from],
        "data.cache_dir": [recipe.data.cache_dir],
        "tokenizer.path": [recipe.tokenizer.path],
        "tokenizer.chat_template": [recipe.tokenizer.chat_template],
        "model.start_from": [recipe.model.start_from],
        "evals.core.bundle": [recipe.evals.core.bundle],
        "evals.chat.data": [recipe.evals.chat.data],
    }
    for key, entries in _entries(recipe):
        for number, entry in enumerate(entries):
            files = [entry.files] if isinstance(entry.files, str) else entry.files or []
            places[f"{key}.{number}.files"], places[f"{key}.{number}.id"] = list(files), [entry.id]
    for key, paths in places.items():
        for path in filter(None, paths):
            if is_address(path) and not key.endswith(".files"):  # else a folder of that name would be made here
                problems.add(
                    recipe.where(key),
                    f"is {show(path)}, an address, and only files of a source may lie in a store. Write a path on "
                    "this machine.",
                )
            if len(path.encode()) > LONGEST_PATH or max(len(part.encode()) for part in path.split("/")) > LONGEST_NAME:
                problems.add(
                    recipe.where(key),
                    f"is {show(path)}, longer than a path can be ({LONGEST_NAME} bytes a name, {LONGEST_PATH} in "
                    "all). Shorten it.",
                )


def _names(recipe: Recipe, problems: Problems) -> None:
    """Note names for tables, metrics and files that are not one line."""
    named = {"run.tags": recipe.run.tags, "monitor.project": [recipe.monitor.project]}
    for key, entries in _entries(recipe):
        named |= {
            f"{key}.{number}.name": [entry.name] for number, entry in enumerate(entries) if entry.name is not None
        }
    for key, names in named.items():
        for name in names:
            if not name.strip() or len(name) > LONGEST_LABEL or not name.isprintable():
                problems.add(
                    recipe.where(key),
                    f"is {show(name)}; it must be one line of at most {LONGEST_LABEL} printable characters.",
                )


def _run(recipe: Recipe, problems: Problems) -> None:
    run = recipe.run
    if run.name is not None and not FOLDER.fullmatch(run.name):
        problems.add(
            recipe.where("run.name"),
            f"is {run.name!r}, and it names a folder. Write letters, digits and -_. only, and not one of -. first.",
        )
    elif run.name is not None and len(run.name) > LONGEST_LABEL:
        problems.add(
            recipe.where("run.name"),
            f"has {len(run.name)} characters, and it names a folder. Write at most {LONGEST_LABEL}.",
        )
    if run.mirror is not None and not BUCKET_FOLDER.fullmatch(run.mirror):
        problems.add(
            recipe.where("run.mirror"),
            f"is {show(run.mirror)}; it must be the address of a store, s3://BUCKET/FOLDER or gs://BUCKET/FOLDER, no "
            "part of it empty. The Hub takes checkpoints by hub.strategy: checkpoint.",
        )
    if isinstance(run.resume, int) and run.resume < 1:
        problems.add(recipe.where("run.resume"), f"is {run.resume}, and no checkpoint is before step 1. Write auto.")
    if run.fork_from is not None:
        parent, at, step = run.fork_from.partition("@")
        if not parent or (at and not STEP.fullmatch(step)):
            problems.add(
                recipe.where("run.fork_from"), f"is {run.fork_from!r}; it must be RUN, or RUN@step as small@600."
            )
        elif parent == run.name:
            problems.add(
                recipe.where("run.fork_from"), f"names {parent}, which is this run. Give it another run.name."
            )
    if run.hardware is not None:
        try:
            from pipeline.hardware.accelerators import parse_hardware

            parse_hardware(run.hardware)
        except ValueError as error:
            problems.add(recipe.where("run.hardware"), str(error))


def _importable(recipe: Recipe, problems: Problems) -> None:
    """Note names without their module, which can never be found, before anything is imported."""
    for key, names in (("run.callbacks", recipe.run.callbacks), ("evals.tasks", recipe.evals.tasks)):
        for name in names:
            if not IMPORTABLE.fullmatch(name):
                problems.add(
                    recipe.where(key),
                    f"{name!r} is not module:attr, as mine:Task of a file mine.py beside the recipe.",
                )


def _files(recipe: Recipe, problems: Problems) -> None:
    for key, sources in (("data.sources", recipe.data.sources), ("data.validation", recipe.data.validation or [])):
        for number, source in enumerate(sources):
            name = f"{key}.{number}"
            files = [source.files] if isinstance(source.files, str) else source.files or []
            for address in filter(is_address, files):
                if not is_supported(address):
                    problems.add(
                        recipe.where(f"{name}.files"),
                        f"{address!r} is an address that nothing here reads "
                        f"({', '.join(f'{scheme}://' for scheme in SCHEMES)} are). Download it, or give the id of a "
                        "data set of the Hub.",
                    )
            if source.id is None and source.split != "train" and any(map(has_magic, files)):
                problems.add(
                    recipe.where(f"{name}.split"),
                    f"is {source.split!r}, and files named one by one have no splits. Name their folder, or leave "
                    "split out.",
                )
    if recipe.data.shards_from is not None and not takes_shards(recipe.data.shards_from):
        problems.add(
            recipe.where("data.shards_from"),
            f"is {show(recipe.data.shards_from)}; it must be where shards were published: {SHARDS_FORMS}.",
        )
    if recipe.data.validation == []:
        problems.add(
            recipe.where("data.validation"),
            "is an empty list: nothing could be scored. Name a source, or leave it out: a part of each source is "
            "held out then.",
        )


def _hub(recipe: Recipe, problems: Problems) -> None:
    """Note metadata for which the Hub would refuse a whole upload."""
    hub = recipe.hub
    if hub.id is not None and not REPOSITORY.fullmatch(hub.id):
        problems.add(recipe.where("hub.id"), f"is {hub.id!r}; it must be NAMESPACE/NAME, of letters, digits and -_.")
    if hub.license is not None and not LICENSE.fullmatch(hub.license):
        problems.add(
            recipe.where("hub.license"),
            f"is {hub.license!r}, and the Hub's ids are in lower case. Write one of "
            "huggingface.co/docs/hub/repositories-licenses, as apache-2.0.",
        )
    for code in hub.language:
        if not LANGUAGE.fullmatch(code):
            problems.add(recipe.where("hub.language"), f"holds {code!r}; it must be ISO 639 codes. Write [en, de].")
    branch = (recipe.hub.revision or "main").replace("{run}", "run")
    if not BRANCH.fullmatch(branch) or ".." in branch or branch.endswith(("/", ".", ".lock")):
        problems.add(
            recipe.where("hub.revision"),
            f'is {recipe.hub.revision!r}, which cannot name a branch. Write letters, digits and ._-/, and "{{run}}" '
            "for the run's name.",
        )


def _options(recipe: Recipe, problems: Problems) -> None:
    for name, value in recipe.model.options.items() if recipe.model.type == "tandem" else ():
        where = recipe.where(f"model.options.{name}")
        if name.endswith("_pdrop") and not 0 <= value < 1:
            problems.add(where, f"is {value}; it is the share that is dropped: at least 0 and below 1.")
        if name == "sliding_window" and value is not None and value < 1:
            problems.add(where, f"is {value}; a token sees itself at least. Write 1 or more.")
