"""Single rows that a format cannot read, each named so that an editor or a reader of parquet finds it."""

import re
from pathlib import Path
from typing import Any

from pipeline.artifacts.errors import readable
from pipeline.sources.conversation import UntrainableConversation
from pipeline.sources.formats import Format
from pipeline.sources.raw_rows import BadRow, RawRow, is_array, kind_of

MOST_OF_REASON = 1_000  # characters: a reason lists the row's columns, whose names may be of any length


def row_name(path: Path | str, row: int) -> str:
    """Return `file:line` for files of lines, one-based as editors count; else `file row n`, zero-based as tables count."""
    kind = kind_of(Path(path).name)
    if kind == "jsonl" and not (isinstance(path, Path) and is_array(path)):
        return f"{path}:{row + 1}"
    return f"{path} {'piece' if kind == 'txt' else 'row'} {row}"


def bad_rows(path: Path, rows: list[RawRow], form: Format) -> list[str]:
    """`file:row: reason` for each row that the format cannot read; conversations that are only left out are no bad rows."""
    read = form.reader()
    named = []
    for _, row, value in rows:
        reason = value.reason if isinstance(value, BadRow) else reason_of(value, form, read)
        if reason:
            named.append(f"{row_name(path, row)}: {readable(reason, most=MOST_OF_REASON)}")
    return named


def reason_of(value: Any, form: Format, read: Any = None) -> str | None:
    try:
        (read or form.reader())(value)
    except UntrainableConversation:
        return None
    except Exception as error:  # An own format may raise anything; whatever it is, the row is named.
        return str(error) if isinstance(error, ValueError) else f"{form.name} raised {type(error).__name__}: {error}"
    return None


def untrainable(path: Path, rows: list[RawRow], form: Format) -> list[str]:
    """`file:row: reason` for each conversation that is in good form and that nothing can be learned from."""
    read = form.reader()
    named = []
    for _, row, value in rows:
        try:
            if not isinstance(value, BadRow):
                read(value)
        except UntrainableConversation as error:
            named.append(f"{row_name(path, row)}: {readable(str(error), most=MOST_OF_REASON)}")
        except Exception:
            continue
    return named


def grouped(lines: list[str]) -> list[str]:
    """Lines `file:row: reason` by their reason, each reason once: `66 rows: reason (first: file:row)`.

    Reasons that differ in numbers alone are one: the place in a row says nothing where hundreds have the mistake.
    """
    groups: dict[str, list[tuple[str, str]]] = {}
    for line in lines:
        found = re.match(r"(.*?(?::\d+| (?:row|piece) \d+)): (.*)", line, re.DOTALL)
        place, reason = found.groups() if found else ("", line)
        groups.setdefault(re.sub(r"\d+", "#", reason), []).append((place, reason))
    return [
        f"{len(group):,} rows: {group[0][1]} (first: {group[0][0]})"
        if len(group) > 1
        else ": ".join(part for part in group[0] if part)
        for group in groups.values()
    ]


def all_empty(rows: list[RawRow], form: Format) -> bool:
    """Whether every row that was looked at is a text of white space alone."""
    read = form.reader()
    for _, _, value in rows:
        try:
            item = None if isinstance(value, BadRow) else read(value)
        except Exception:  # named with its reason by bad_rows
            return False
        if not isinstance(item, str) or item.strip():
            return False
    return True
