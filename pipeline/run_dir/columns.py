"""metrics.jsonl by columns: the numbers of a name as arrays, next to the rows that were written."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from pipeline.run_dir.rows import last_attempts, read_rows

MOST_INTEGER = 2**53  # what a float holds exactly
NUMBERS = {"step", "attempt", "time", "tokens"}  # of every row; anything else under these names is no run's


class Columns(Sequence[dict[str, Any]]):
    """Rows of metrics.jsonl: read by name as arrays, or one by one as the dicts that were written.

    A name's numbers come with the numbers of their rows, because few rows have all names.
    """

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self._columns: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    @classmethod
    def of(cls, rows: Iterable[dict[str, Any]]) -> "Columns":
        """Return the same of rows that are dicts already."""
        return rows if isinstance(rows, cls) else cls([_valid(row) for row in rows])

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (row numbers, values) of the rows that have a number of that name."""
        if name not in self._columns:
            found = [(n, row[name]) for n, row in enumerate(self.rows) if _is_number(row.get(name))]
            values = np.array([value for _, value in found])
            if values.dtype.kind not in "if":  # none, or integers beyond 64 bits
                values = values.astype(float)
            self._columns[name] = np.array([n for n, _ in found], np.int32), values
        return self._columns[name]

    def beside(self, name: str, rows: np.ndarray, *, missing: float) -> np.ndarray:
        """Return the numbers of that name in those rows."""
        having, values = self.column(name)
        whole = np.full(len(self.rows), missing, values.dtype)
        whole[having] = values
        return whole[rows]

    def curve(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (steps, values) of a metric in the order of the steps; a step measured twice keeps the last value."""
        rows, values = self.column(name)
        steps = self.beside("step", rows, missing=-1)
        order = np.argsort(steps, kind="stable")
        order = order[steps[order] >= 0]
        steps, values = steps[order], values[order]
        is_last = np.append(steps[1:] != steps[:-1], True)[: len(steps)]
        return steps[is_last], values[is_last]

    def names(self) -> list[str]:
        """Return all names of numbers, in the order of their first appearance."""
        return list(dict.fromkeys(name for row in self.rows for name, value in row.items() if _is_number(value)))

    def events(self, kind: str | None = None) -> list[tuple[int, dict[str, Any]]]:
        """Return (row number, row) of the events, or of those of one kind."""
        events = [(n, row) for n, row in enumerate(self.rows) if "event" in row]
        return [(n, row) for n, row in events if kind in (None, row["event"])]

    def that_count(self) -> "Columns":
        """Return the run as it counts: rows.last_attempts, by columns."""
        return Columns(last_attempts(self.rows))

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        return self.rows[index]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)


def read_columns(path: str | Path) -> Columns:
    """Return all rows that are whole, as rows.read_rows gives them."""
    return Columns.of(read_rows(path))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _valid(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row without what no run writes: an event without a step, a time that is text, numbers of 300
    digits."""
    bad = [name for name in NUMBERS & row.keys() if not (_is_number(row[name]) and abs(row[name]) <= MOST_INTEGER)]
    bad += [name for name, value in row.items() if isinstance(value, int) and value.bit_length() > 1000]
    if "event" in row and ("step" in bad or "step" not in row or not isinstance(row["event"], str)):
        bad.append("event")
    return {name: value for name, value in row.items() if name not in bad} if bad else row


def mean_step_s(columns: Columns) -> float | None:
    """Return the mean seconds of a step over the logged intervals of these rows, each attempt's first, which compiles,
    left out."""
    rows, seconds = columns.column("perf/step_s")
    if not len(rows):
        return None
    steps = columns.beside("step", rows, missing=0)
    attempts = columns.beside("attempt", rows, missing=0)
    counted = np.diff(steps) * (attempts[1:] == attempts[:-1])
    return float((seconds[1:] * counted).sum() / counted.sum()) if counted.any() else None


def attempt_spans(written: Columns, manifest: dict[str, Any], *, failed: Any = None) -> list[tuple[int, float, float]]:
    """Return (attempt, began, last sign of life) in seconds since 1970 by all rows: from the start of its process, as
    far as its first row tells that, to its last row; of the last attempt to its end, where the manifest tells it or
    `failed` does."""
    spans: dict[int, tuple[float, float]] = {}
    for row in written:
        attempt, time_s = row.get("attempt"), row.get("time")
        if attempt is None or time_s is None:
            continue
        first, last = spans.get(attempt, (time_s, time_s))
        began = row.get("began", time_s) if row.get("event") == "attempt" else time_s
        spans[attempt] = min(first, began), max(last, time_s)
    newest = manifest.get("attempts")
    if newest in spans:
        first, last = spans[newest]
        ends = [manifest.get("ended"), manifest.get("finished"), failed]
        spans[newest] = first, max([last, *filter(None, ends)])
    return [(attempt, first, last) for attempt, (first, last) in sorted(spans.items())]
