"""The items of chat tasks, from the Hub or from local files; every file is read to its end before anything is scored."""

import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.artifacts.cache import cache_dir
from pipeline.artifacts.errors import DataError, InputMissingError, RecipeError, TandemError, refuse
from pipeline.evals.chat.items import ChatItem
from pipeline.evals.chat.tasks import ChatTask
from pipeline.sources.bad_rows import row_name
from pipeline.sources.facts import FactsOfFiles
from pipeline.sources.files import SourceFile, local_files
from pipeline.sources.formats import Format
from pipeline.sources.quickstart.spelling import LETTERS, is_held_out, word_conversation
from pipeline.sources.raw_rows import BadRow, kind_of, open_bytes, read_blocks
from pipeline.sources.verify import verified

SHOWN = 10  # Bad rows of a file that a message lists.
WORDS = 256  # Questions made from a file of words, as many as nanochat asks.


@dataclass(frozen=True, kw_only=True)
class LoadedTask:
    """A task and its items in the order in which they are asked; the first n are the same for every n.

    files: label, sha256 and bytes of each. revision: the commit of a Hub dataset.
    """

    task: ChatTask
    items: list[ChatItem]
    files: list[dict[str, Any]]
    revision: str | None = None


def load_chat_tasks(
    tasks: list[ChatTask],
    *,
    places: list[str] | None = None,
    folder: str | None = None,
    cache: Path | None = None,
    where: str = "chat tasks",
) -> list[LoadedTask]:
    """The items of all tasks, shuffled as nanochat does (`datasets.Dataset.shuffle(seed=42)`).

    places: local files and folders in which a built-in task's file is found by its name (arc_easy.jsonl, mmlu_test.jsonl,
    HumanEval.jsonl.gz, words.txt ...); without them they come from the Hub. A task of one's own has its own source; its
    relative files are looked for in folder. All problems are raised at once: InputMissingError for files that are not
    there, DataError for files that are not what their name says and for rows that cannot be read, ServiceError.
    """
    cache = cache or cache_dir()
    loaded, problems = [], []
    for task in tasks:
        at = f"{where}: {task.name}"
        try:
            loaded.append(_load(task, places, folder, cache, at))
        except TandemError as error:
            problems.append(error)
    refuse(problems)
    return loaded


def _load(task: ChatTask, places: list[str] | None, folder: str | None, cache: Path, where: str) -> LoadedTask:
    revision, files = _files_of(task, places, folder, cache, where)
    facts = FactsOfFiles(cache)
    problems, items = [], []
    for file in files:
        found = verified(file, _AnyRows("any", "chat", None), facts, column_key="").problems
        problems += found
        if not found:
            kept, bad = _items(task, file)
            items += kept
            problems += bad
    if problems:
        raise DataError("\n".join(f"{where}: {problem}" for problem in problems))
    if not items:
        names = ", ".join(file.label for file in files)
        raise DataError(f"{where}: {names} has no rows, so nothing can be scored. Download it again, or name another.")
    order = np.random.default_rng(42).permutation(len(items))
    recorded = [
        {
            "label": file.label if revision else file.local_path().name,
            "sha256": facts.of(file.local_path()).sha256,
            "bytes": file.bytes,
        }
        for file in files
    ]
    return LoadedTask(task=task, items=[items[index] for index in order], files=recorded, revision=revision)


def _files_of(
    task: ChatTask, places: list[str] | None, folder: str | None, cache: Path, where: str
) -> tuple[str | None, list[SourceFile]]:
    spec = task.source
    if places is not None and task.local_name is not None:
        return None, _recognised(task, local_files(places, where=where, folder=folder), places, where)
    if spec.id is None:
        return None, local_files(spec.files or [], where=where, folder=folder)
    if spec.id.startswith("tandem:"):
        from pipeline.sources.quickstart.built_in import built_in_files

        return None, built_in_files(spec, kind="chat", where=where, cache=cache)
    from pipeline.sources.hub_files import dataset_files

    return dataset_files(spec, where=where, cache=cache, folder=folder)


def _split_in(label: str) -> str | None:
    """Return the split that the file's name tells, else one of its folders; None when none does."""
    from datasets.data_files import NON_WORDS_CHARS, SPLIT_KEYWORDS

    for part in reversed(Path(label).parts):
        words = re.split(f"[{NON_WORDS_CHARS}]+", part.lower())
        for split, keywords in SPLIT_KEYWORDS.items():
            if set(words) & set(keywords):
                return str(split)
    return None


def _recognised(task: ChatTask, files: list[SourceFile], places: list[str], where: str) -> list[SourceFile]:
    """The task's file, or its shards, among others: by its own name, else by its folders'. Other splits are not taken."""
    expression = re.compile(task.local_name or "", re.IGNORECASE)
    named = [f for f in files if expression.search(f.local_path().name)]
    named = named or [f for f in files if expression.search("/".join(f.local_path().parts[-3:]))]
    found = [f for f in named if _split_in(f.label) in (None, "test")]
    looked = ", ".join(places)
    if not found:
        others = f" {', '.join(f.label for f in named)} is of another split." if named else ""
        raise InputMissingError(
            f"{where}: no file of it in {looked}, so it cannot be scored.{others} Its name must match {task.local_name} (in any case)."
        )
    if len({re.sub(r"\d+-of-", "", str(f.local_path())) for f in found}) > 1:
        raise RecipeError(
            f"{where}: {', '.join(f.label for f in found)} in {looked} could all be it. Name the one that is meant."
        )
    return found


class _AnyRows(Format):
    """Rows as they are: the file is verified here, its rows are read by the task."""

    def reader(self):
        return lambda row: []

    def identity(self) -> str:
        return "any rows"


def _items(task: ChatTask, file: SourceFile) -> tuple[list[ChatItem], list[str]]:
    """The items of one file, and what is wrong with it, as `file:row: reason`."""
    path = file.local_path()
    items, bad = [], []
    try:
        for name, value in _rows(path, file.label):
            try:
                if isinstance(value, BadRow):
                    raise ValueError(value.reason)
                item = task.read_row(value)
                _must_be_characters(item)
            except ValueError as error:
                bad.append((name, str(error)))
            else:
                items.append(item)
    except (EOFError, zlib.error, OSError) as error:
        return [], [f"{path} is truncated or damaged: {error}. Download it again."]
    reasons = {reason for _, reason in bad}
    if bad and not items and len(reasons) == 1:
        return [], [f"{path}: every row {reasons.pop()}. It is no file of {task.name}: name another."]
    shown = [f"{name}: {reason}" for name, reason in bad[:SHOWN]]
    return items, shown + ([f"{path}: {len(bad) - SHOWN} more rows like these"] if len(bad) > SHOWN else [])


def _rows(path: Path, label: str) -> Iterator[tuple[str, Any]]:
    if kind_of(path.name) == "txt":
        with open_bytes(path) as file:
            yield from _about_words(line.decode("utf-8", "replace").strip() for line in file)
        return
    for block in read_blocks(path):
        for _, row, value in block:
            yield row_name(path, row), value


def _about_words(words: Iterable[str]) -> Iterator[tuple[str, dict]]:
    """Questions on WORDS of the words that `tandem:spelling` never trains on, whatever list they stand in."""
    held_out = {
        w
        for w in words
        if re.fullmatch(f"[a-z]{{{LETTERS[0]},{LETTERS[1]}}}", w) and len(set(w)) > 1 and is_held_out(w)
    }
    order = np.random.default_rng(42).permutation(len(held_out))
    chosen = sorted(held_out)
    for index in order[:WORDS]:
        yield chosen[index], word_conversation(chosen[index])


def _must_be_characters(item: ChatItem) -> None:
    """A JSON escape can make half of a character, which no tokenizer can read: encode raises a ValueError."""
    for text in (item.answer, *item.row.values(), *(message.get("content") or "" for message in item.messages)):
        text.encode("utf-8")
