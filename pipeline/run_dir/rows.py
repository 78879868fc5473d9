"""Append-only files of JSON lines: metrics and samples. One line is one row, written whole."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pipeline.process.storage import make_parent


def append_row(path: str | Path, row: dict[str, Any]) -> None:
    """Add one row. A torn last line, left by a crash, is closed first so that it cannot swallow this one."""
    path = Path(path)
    make_parent(path)
    with open(path, "ab+") as file:
        size = file.seek(0, 2)
        if size:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(row, ensure_ascii=False).encode(errors="backslashreplace") + b"\n")


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Return all rows that are whole; lines torn by a crash are left out. An absent file has no rows."""
    return list(iterate_rows(path))


def iterate_rows(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the same rows one by one, without holding the file's."""
    if not Path(path).exists():
        return
    with open(path, "rb") as file:
        for line in file:
            if (row := row_of(line)) is not None:
                yield row


def row_of(line: bytes) -> dict[str, Any] | None:
    """Return the row of a line, None where it holds none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def last_attempts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the run as it counts: an attempt that went on from step s makes the earlier attempts' rows after s void.

    Attempts are marked by rows with an "event" of "attempt" (step = the step it went on from). One from step 0
    measures step 0 again, and its recipe may be another one than that of a start that failed.
    """
    kept: list[dict[str, Any]] = []
    for row in rows:
        if row.get("event") == "attempt":
            kept = [r for r in kept if counts_beside(r, row)]
        kept.append(row)
    return kept


def counts(row: dict[str, Any], attempts: list[dict[str, Any]]) -> bool:
    """Return whether a row still counts after the attempts that followed its own."""
    return all(counts_beside(row, later) for later in attempts if later.get("attempt", 0) > row.get("attempt", 0))


def counts_beside(row: dict[str, Any], later_attempt: dict[str, Any]) -> bool:
    """Return whether a row of an earlier attempt still counts."""
    step, start = row.get("step", 0), later_attempt["step"]
    return step <= start and (start > 0 or "event" in row)


def first_start(rows: Iterable[dict[str, Any]]) -> float | None:
    """Return the seconds since 1970 at which the process of the run's first attempt began; None where no row says it.

    Its row was written after imports and checks; runs of earlier versions have no other time.
    """
    return next((row.get("began", row["time"]) for row in rows if row.get("event") == "attempt"), None)


def lost_steps(rows: Iterable[dict[str, Any]]) -> int:
    """Return steps that were made, and then made again because a later attempt went on from an earlier step.

    As far as they were logged: of a killed attempt nobody knows the steps after its last row.
    """
    lost = newest = 0
    for row in rows:
        step = row.get("step", 0)
        if row.get("event") == "attempt":
            lost += max(0, newest - step)
            newest = step
        elif "event" not in row:
            newest = max(newest, step)
    return lost
