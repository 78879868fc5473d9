"""The files of the CORE tasks: from a folder or zip here, else fetched, and read through before anything is scored."""

import hashlib
import json
import zipfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.artifacts.cache import cache_dir
from pipeline.artifacts.errors import DataError, InputMissingError
from pipeline.evals.core.fetch import fetch_file
from pipeline.evals.core.tasks import TASKS, CoreTask
from pipeline.sources.signatures import impostor

SHOWN = 10
FIELDS: dict[str, dict[str, type]] = {
    "multiple_choice": {"query": str, "choices": list, "gold": int},
    "schema": {"context_options": list, "continuation": str, "gold": int},
    "language_modeling": {"context": str, "continuation": str},
}
OPTIONS = {"multiple_choice": "choices", "schema": "context_options"}


@dataclass(frozen=True)
class Bundle:
    """items: by file; sha256: of each file; blobs: the hashes by which git names them; missing: task -> why not."""

    items: dict[str, list[dict]]
    sha256: dict[str, str]
    blobs: dict[str, str]
    missing: dict[str, str]

    @property
    def id(self) -> str:
        digest = hashlib.sha256("".join(f"{f}{self.sha256[f]}" for f in sorted(self.sha256)).encode())
        return f"core-{digest.hexdigest()[:12]}"

    def only(self, names: list[str] | None) -> "Bundle":
        """The bundle with these tasks alone; the others are missing because they were not asked for."""
        if names is None:
            return self
        left_out = {task.name: "not asked for" for task in TASKS if task.name not in names}
        return replace(self, missing={**self.missing, **left_out})

    def published(self, task: CoreTask) -> bool:
        """Whether the task's file is the one that published scores are of."""
        return self.blobs[task.file] == task.blob


def open_bundle(path: str | None = None, *, cache: str | None = None, wanted: list[str] | None = None) -> Bundle:
    """The bundle at a folder or zip, else the published files, fetched once into the cache.

    A task without a file is in `missing`; wanted: the names of tasks that must be there. Raises InputMissingError when
    nothing is there or a wanted task is not, DataError with every file and row that is not what a task needs, and
    ServiceError when no mirror gives a published file.
    """
    contents, missing = {}, {}
    if path is None:
        for file, blob in {task.file: task.blob for task in TASKS}.items():
            contents[file] = fetch_file(file, blob, folder=cache_dir(cache) / "core")
    else:
        contents = _local(Path(path).expanduser())
        missing = {t.name: f"{t.file} is not in {path}" for t in TASKS if t.file not in contents}
        if absent := [name for name in wanted or [] if name in missing]:
            raise InputMissingError(
                f"{path}: the bundle lacks {', '.join(absent)} ({'; '.join(missing[name] for name in absent)}), so nothing was scored. "
                "Add the files, or leave the path out to fetch the published ones."
            )
    items, problems = {}, []
    for task in {t.file: t for t in TASKS if t.file in contents}.values():
        items[task.file], wrong = _read(task, contents[task.file])
        problems += [f"{path or 'CORE bundle'}: {task.file}{what}" for what in wrong]
    if problems:
        more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        raise DataError(
            "\n".join([*problems[:SHOWN], *more])
            + "\nNothing was scored. Download the bundle again, or leave the path out to fetch the published files."
        )
    return Bundle(
        items=items,
        sha256={file: hashlib.sha256(content).hexdigest() for file, content in contents.items()},
        blobs={file: git_blob(content) for file, content in contents.items()},
        missing=missing,
    )


def git_blob(content: bytes) -> str:
    """The hash by which git names a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _local(path: Path) -> dict[str, bytes]:
    """The tasks' files in a folder (the bundle, or what it lies in) or a zip, by their names under eval_data/."""
    files = {task.file for task in TASKS}
    if path.is_dir():
        folders = [path, path / "eval_data", path / "eval_bundle" / "eval_data"]
        places = {file: folder / file for folder in folders for file in files if (folder / file).is_file()}
        found = {file: place.read_bytes() for file, place in places.items()}
    else:
        found = _of_zip(path, files)
    if not found:
        raise InputMissingError(
            f"{path}: holds no file of a CORE task (such as eval_data/{TASKS[0].file}), so nothing can be scored. Name the folder or zip of the eval_bundle."
        )
    return found


def _of_zip(path: Path, files: set[str]) -> dict[str, bytes]:
    if not path.exists():
        raise InputMissingError(
            f"{path}: there is no such bundle. Name a folder or zip, or leave it out to fetch the published files."
        )
    head = path.read_bytes()[:4096]
    if reason := impostor(head, expected=(b"PK\x03\x04",)):
        raise DataError(f"{path} {reason} Nothing was scored.")
    try:
        with zipfile.ZipFile(path) as archive:
            if broken := archive.testzip():
                raise zipfile.BadZipFile(f"{broken} is damaged")
            return {
                file: archive.read(name)
                for name in archive.namelist()
                if (file := name.rpartition("eval_data/")[2]) in files
            }
    except (zipfile.BadZipFile, zlib.error, RuntimeError) as error:  # the last one: encrypted
        raise DataError(
            f"{path} is no whole zip archive ({error}), so nothing was scored. Download it again."
        ) from None


def _read(task: CoreTask, content: bytes) -> tuple[list[dict], list[str]]:
    """The items, and what is wrong with the file as `: ...` or `:row: ...`."""
    if not content.strip():
        return [], [" is empty."]
    if reason := impostor(content[:4096]):
        return [], [f" {reason}"]
    items, wrong = [], []
    # Not splitlines(): it also breaks at characters that may stand inside a JSON string.
    for number, line in enumerate(content.decode("utf-8", "replace").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except json.JSONDecodeError as error:
            wrong.append(f":{number}: is no JSON ({error.msg} at {error.pos}).")
            continue
        if reason := _reason(task, item) or _no_character(item):
            wrong.append(f":{number}: {reason}")
        items.append(item)
    return items, wrong


def _no_character(item: dict) -> str | None:
    """A JSON escape can make half of a character, which no tokenizer can read."""
    try:
        json.dumps(item, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        return f"holds half of a character ({error.object[error.start]!r})."
    return None


def _reason(task: CoreTask, item: Any) -> str | None:
    if not isinstance(item, dict):
        return f"is {type(item).__name__}, no object."
    for name, kind in FIELDS[task.kind].items():
        if type(item.get(name)) is not kind:
            return f"{name} is {item.get(name)!r}, where {kind.__name__} belongs."
    if options := OPTIONS.get(task.kind):
        texts = item[options]
        if len(texts) < 2 or not all(isinstance(text, str) for text in texts):
            return f"{options} are {texts!r}: two texts or more belong there."
        if not 0 <= item["gold"] < len(texts):
            return f"gold is {item['gold']}, of {len(texts)} {options}."
    elif not item["continuation"]:
        return "continuation is empty, so there is nothing to say."
    return None
