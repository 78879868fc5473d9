"""Text and conversations to score from files: txt, jsonl or parquet, compressed or not, read as training reads them."""

from pathlib import Path
from typing import Any

from pipeline.artifacts.errors import DataError, InputMissingError
from pipeline.recipe.schema import Source
from pipeline.sources.files import local_files
from pipeline.sources.formats import format_of
from pipeline.sources.raw_rows import BadRow, read_blocks
from pipeline.sources.recognition import looked_at_rows, recognise

SHOWN = 10


def read_texts(patterns: list[str], *, max_bytes: int) -> list[str]:
    """Documents of the files in sorted order, whole, until they hold at least max_bytes bytes of UTF-8."""
    return _items(patterns, kind="text", option="--text", limit=max_bytes, size=lambda text: len(text.encode()))


def read_conversations(patterns: list[str], *, max_conversations: int) -> list[list[dict]]:
    """The first conversations of the files in sorted order, as lists of messages."""
    return _items(patterns, kind="chat", option="--chat", limit=max_conversations, size=lambda messages: 1)


def _items(patterns: list[str], *, kind: Any, option: str, limit: int, size: Any) -> list[Any]:
    spec = Source(files=patterns)
    files = local_files(patterns, where=option, folder=None)
    form = format_of(spec, kind=kind, where=option, folder=None)
    if found := recognise(looked_at_rows(files), kind=kind):
        if not found.format:
            raise DataError(f"{option}: {files[0].label} {found.refusal}")
        form = found.format
    read_row = form.reader()
    items, total, bad = [], 0, []
    for file in files:
        for block in read_blocks(file.local_path(), columns=form.read_columns):
            for _, row, value in block:
                if total >= limit:
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
            if total >= limit:
                break
    if bad:
        shown = "\n  ".join(bad[:SHOWN]) + (f"\n  and {len(bad) - SHOWN} more" if len(bad) > SHOWN else "")
        raise DataError(
            f"{option}: {len(bad)} bad rows, so the figure would not be of the text that was named:\n  {shown}\nCorrect them, or name other files."
        )
    if not items:
        raise InputMissingError(
            f"{option}: {', '.join(map(str, map(Path, patterns)))} hold no text, so nothing can be scored."
        )
    return items
