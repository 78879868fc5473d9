"""Append-only files of JSON lines: metrics and samples. One line is one row, written whole."""

import json
from pathlib import Path
from typing import Any


def append_row(path: str | Path, row: dict[str, Any]) -> None:
    """Add one row. A torn last line, left by a crash, is closed first so that it cannot swallow this one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as file:
        size = file.seek(0, 2)
        if size:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """All rows that are whole; lines torn by a crash are left out. An absent file has no rows."""
    path = Path(path)
    if not path.exists():
        return []
    rows = []
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def last_attempts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The run as it counts: an attempt that went on from step s makes the earlier attempts' rows after s void.

    Attempts are marked by rows with an "event" of "attempt" (step = the step it went on from).
    """
    kept: list[dict[str, Any]] = []
    for row in rows:
        if row.get("event") == "attempt":
            kept = [r for r in kept if r.get("step", 0) <= row["step"]]
        kept.append(row)
    return kept
