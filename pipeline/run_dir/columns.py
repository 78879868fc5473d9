"""metrics.jsonl by columns: the numbers of a name as arrays, next to the rows that were written."""

from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from pipeline.run_dir.rows import iterate_rows

MOST_INTEGER = 2**53  # what a float holds exactly
NUMBERS = {"step", "attempt", "time", "tokens"}  # of every row; anything else under these names is no run's


class Columns(Sequence[dict[str, Any]]):
    """Rows of metrics.jsonl: read by name as arrays, or one by one as the dicts that were written.

    A name's numbers come with the numbers of their rows, because few rows have all names. Only a row that is read as
    a dict is made one, which takes some 50 us: as dicts, the rows of a long run take five times the memory.
    """

    def __init__(
        self, count: int, numbers: dict[str, tuple[np.ndarray, np.ndarray]], others: dict[int, dict[str, Any]]
    ) -> None:
        self._count = count
        self._numbers = numbers  # name -> (row numbers, values), rows ascending
        self._others = others  # row number -> fields that are no numbers, such as the kind of an event

    @classmethod
    def of(cls, rows: Iterable[dict[str, Any]]) -> "Columns":
        """Return the columns of rows that are dicts, which are read once and not kept."""
        if isinstance(rows, cls):
            return rows
        count = 0
        read: dict[str, tuple[array, array]] = {}
        fractional: set[str] = set()
        others: dict[int, dict[str, Any]] = {}
        for row in rows:
            for name, value in _valid(row).items():
                if not _is_number(value):
                    others.setdefault(count, {})[name] = value
                    continue
                if name not in read:
                    read[name] = array("i"), array("d")
                if isinstance(value, float):
                    fractional.add(name)
                at, values = read[name]
                at.append(count)
                values.append(value)
            count += 1
        numbers = {}
        for name, (at, values) in read.items():
            # Steps and counts are integers, in the file and in what is printed of them.
            column = np.array(values)
            if name not in fractional and abs(column).max() <= MOST_INTEGER:
                column = column.astype(np.int64)
            numbers[name] = np.array(at), column
        return cls(count, numbers, others)

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (row numbers, values) of the rows that have a number of that name."""
        return self._numbers.get(name, (np.empty(0, np.int32), np.empty(0)))

    def beside(self, name: str, rows: np.ndarray | slice, *, missing: float) -> np.ndarray:
        """Return the numbers of that name in those rows."""
        having, values = self.column(name)
        whole = np.full(self._count, missing, values.dtype)
        whole[having] = values
        return whole[rows]

    def curve(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (steps, values) of a metric in the order of the steps; a step measured twice keeps the last value."""
        rows, values = self.column(name)
        steps = self.beside("step", rows, missing=-1)
        # Stable: of a step measured twice the later row stays last.
        order = np.argsort(steps, kind="stable")
        order = order[steps[order] >= 0]
        steps, values = steps[order], values[order]
        is_last = np.append(steps[1:] != steps[:-1], True)[: len(steps)]
        return steps[is_last], values[is_last]

    def names(self) -> list[str]:
        """Return all names of numbers, in the order of their first appearance."""
        return [name for name, (rows, _) in self._numbers.items() if len(rows)]

    def events(self, kind: str | None = None) -> list[tuple[int, dict[str, Any]]]:
        """Return (row number, row) of the events, or of those of one kind."""
        events = {n: fields["event"] for n, fields in self._others.items() if "event" in fields}
        return [(n, self[n]) for n, event in events.items() if kind in (None, event)]

    def that_count(self) -> "Columns":
        """Return the run as it counts: rows.last_attempts, by columns."""
        steps = self.beside("step", slice(None), missing=0)
        is_event = np.isin(np.arange(self._count), [n for n, _ in self.events()])
        # Each attempt makes void what was written before it and beyond the step that it went on from.
        kept = np.ones(self._count, bool)
        for n, attempt in self.events("attempt"):
            start = attempt["step"]
            kept[:n] &= (steps[:n] <= start) & (is_event[:n] | (start > 0))
        return self.where(kept)

    def where(self, kept: np.ndarray) -> "Columns":
        """Return the rows that are kept. kept: whether each of them is."""
        places = np.cumsum(kept) - 1  # the number that a kept row gets
        numbers = {}
        for name, (rows, values) in self._numbers.items():
            is_kept = kept[rows]
            numbers[name] = places[rows[is_kept]].astype(np.int32), values[is_kept]
        others = {int(places[n]): fields for n, fields in self._others.items() if kept[n]}
        return Columns(int(kept.sum()), numbers, others)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        place = range(self._count)[index]
        if isinstance(place, range):
            return [self[n] for n in place]
        row = dict(self._others.get(place, {}))
        for name, (rows, values) in self._numbers.items():
            at = np.searchsorted(rows, place)
            if place in rows[at : at + 1]:
                row[name] = values[at].item()
        return row


def read_columns(path: str | Path) -> Columns:
    """Return all rows that are whole, as rows.read_rows gives them."""
    return Columns.of(iterate_rows(path))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _valid(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row without what no run writes: an event without a step, a time that is text, numbers of 300
    digits."""
    bad = set()
    for name, value in row.items():
        is_huge = isinstance(value, int) and value.bit_length() > 1000
        is_odd = name in NUMBERS and not (_is_number(value) and abs(value) <= MOST_INTEGER)
        if is_huge or is_odd:
            bad.add(name)
    if "event" in row and ("step" in bad or "step" not in row or not isinstance(row["event"], str)):
        bad.add("event")
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
    rows, times = written.column("time")
    attempts = written.beside("attempt", rows, missing=-1)
    for attempt in np.unique(attempts[attempts >= 0]).tolist():
        own = times[attempts == attempt]
        spans[attempt] = own.min().item(), own.max().item()
    for _, row in written.events("attempt"):
        if row.get("attempt") in spans and "began" in row:
            first, last = spans[row["attempt"]]
            spans[row["attempt"]] = min(first, row["began"]), last
    # After the last row an evaluation, a save or the report may have taken time.
    newest = manifest.get("attempts")
    if newest in spans:
        first, last = spans[newest]
        ends = [manifest.get("ended"), manifest.get("finished"), failed]
        spans[newest] = first, max([last, *filter(None, ends)])
    return [(attempt, first, last) for attempt, (first, last) in sorted(spans.items())]
