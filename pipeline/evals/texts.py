"""Text and conversations to score from files: txt, jsonl or parquet, compressed or not, read as training reads them."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from pipeline.artifacts.errors import DataError, InputMissingError
from pipeline.recipe.schema import Source
from pipeline.sources.files import local_files
from pipeline.sources.formats import format_of
from pipeline.sources.raw_rows import BadRow, read_blocks
from pipeline.sources.recognition import looked_at_rows, recognise

SHOWN = 10


@dataclass(frozen=True)
class FilePart:
    """The part of a file that is scored: documents or conversations, and of text its bytes. complete: all of it; false where a limit
    came before its end. of_bytes: size of the file."""

    label: str
    items: int
    bytes: int
    complete: bool
    of_bytes: int


def read_texts(patterns: list[str], *, max_bytes: int) -> tuple[list[str], list[FilePart]]:
    """Documents of the files in sorted order, whole, until they hold at least max_bytes bytes of UTF-8; what was taken of each file."""
    return _items(patterns, kind="text", option="--text", limit=max_bytes, size=lambda text: len(text.encode()))


def read_conversations(patterns: list[str], *, max_conversations: int) -> tuple[list[list[dict]], list[FilePart]]:
    """The first conversations of the files in sorted order, as lists of messages; what was taken of each file."""
    return _items(patterns, kind="chat", option="--chat", limit=max_conversations, size=lambda messages: 1)


def lines_of_files(files: list[FilePart], *, limit: str) -> list[str]:
    """Say what is scored of each file, one line a file, where that is not all of every file. limit: the option that cuts."""
    if all(file.complete and file.items for file in files):
        return []
    lines = [f"  {file.label}: {_part_in_words(file)}" for file in files]
    return [f"not all of the {len(files)} files is scored ({limit}; raise it to score more):", *lines]


def _part_in_words(file: FilePart) -> str:
    what = f"{file.bytes:,} bytes" if file.bytes else f"{file.items:,} conversations"
    if file.complete:
        return f"all of it, {what}" if file.items else "holds no text"
    return (
        f"the first {what}, of a file of {file.of_bytes:,} bytes"
        if file.items
        else f"left out, {file.of_bytes:,} bytes"
    )


def _items(
    patterns: list[str], *, kind: Any, option: str, limit: int, size: Callable[[Any], int]
) -> tuple[list[Any], list[FilePart]]:
    spec = Source(files=patterns)
    files = local_files(patterns, where=option, folder=None)
    form = format_of(spec, kind=kind, where=option, folder=None)
    if found := recognise(looked_at_rows(files), kind=kind):
        if not found.format:
            raise DataError(f"{option}: {files[0].label} {found.refusal}")
        form = found.format
    read_row = form.reader()
    items: list[Any] = []
    parts: list[FilePart] = []
    bad: list[str] = []
    total = 0
    for file in files:
        path, first, before, complete = file.local_path(), len(items), total, total < limit
        rows = chain.from_iterable(read_blocks(path, columns=form.read_columns)) if complete else ()
        for _, row, value in rows:
            if total >= limit:
                complete = False
                break
            try:
                if isinstance(value, BadRow):
                    raise ValueError(value.reason)
                item = read_row(value)
            except ValueError as error:
                bad.append(f"{file.label}: row {row}: {error}")
                continue
            if item:
                items.append(item)
                total += size(item)
        counted = total - before if kind == "text" else 0
        parts.append(FilePart(file.label, len(items) - first, counted, complete, path.stat().st_size))
    if bad:
        shown = "\n  ".join(bad[:SHOWN]) + (f"\n  and {len(bad) - SHOWN} more" if len(bad) > SHOWN else "")
        raise DataError(
            f"{option}: {len(bad)} bad rows, so the figure would not be of the text that was named:\n  {shown}\nCorrect them, or name other files."
        )
    if not items:
        raise InputMissingError(
            f"{option}: {', '.join(map(str, map(Path, patterns)))} hold no text, so nothing can be scored."
        )
    return items, parts
