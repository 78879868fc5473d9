"""Single rows that a format cannot read, each named so that an editor or a reader of parquet finds it."""

from pathlib import Path
from typing import Any

from pipeline.sources.formats import Format
from pipeline.sources.raw_rows import BadRow, RawRow, is_array, kind_of


def row_name(path: Path | str, row: int) -> str:
    """Return `file:line` for files of lines, one-based as editors count; else `file row n`, zero-based as tables count."""
    kind = kind_of(Path(path).name)
    if kind == "jsonl" and not (isinstance(path, Path) and is_array(path)):
        return f"{path}:{row + 1}"
    return f"{path} {'piece' if kind == 'txt' else 'row'} {row}"


def bad_rows(path: Path, rows: list[RawRow], form: Format) -> list[str]:
    """`file:row: reason` for each row that the format cannot read."""
    read = form.reader()
    named = []
    for _, row, value in rows:
        reason = value.reason if isinstance(value, BadRow) else reason_of(value, form, read)
        if reason:
            named.append(f"{row_name(path, row)}: {reason}")
    return named


def reason_of(value: Any, form: Format, read: Any = None) -> str | None:
    try:
        (read or form.reader())(value)
    except Exception as error:  # An own format may raise anything; whatever it is, the row is named.
        return str(error) if isinstance(error, ValueError) else f"{form.name} raised {type(error).__name__}: {error}"
    return None


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
