"""metrics.jsonl by columns: a million rows of 30 numbers in the memory of the numbers, each name found at once."""

import hashlib
import io
import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, overload

import numpy as np

from pipeline.run_dir.rows import LINE_BYTES, open_rows, row_of, skip_line

BLOCK_BYTES = 2**22  # read at a time: what one torn line slows down
THREADS = min(os.cpu_count() or 1, 4)
MOST_NAMES = 10_000  # that are read; a run with numbers of every layer has some hundred
MOST_INTEGER = 2**53  # what a float holds exactly
NUMBERS = {"step", "attempt", "time", "tokens"}  # of every row; anything else under these names is no run's
ROWS_AT_ONCE = 4096  # made into dicts at a time when rows are asked for


class Columns(Sequence[dict[str, Any]]):
    """Rows of metrics.jsonl: read by name as arrays, or one by one as the dicts that were written.

    A name's numbers stand beside the numbers of their rows, because few rows have all names.
    """

    def __init__(
        self, count: int, numbers: dict[str, tuple[np.ndarray, np.ndarray]], others: dict[int, dict[str, Any]]
    ) -> None:
        self._count = count
        self._numbers = numbers  # name -> (row numbers, values), rows ascending
        self._others = others  # row number -> what is no number, such as the kind of an event
        self._whole: dict[str, np.ndarray] = {}
        self._steps: dict[int, np.ndarray] = {}

    @classmethod
    def of(cls, rows: Iterable[dict[str, Any]]) -> "Columns":
        """Return the same of rows that are dicts already."""
        if isinstance(rows, cls):
            return rows
        block = _Block()
        for row in rows:
            block.add(row)
        return _join([block])

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(row numbers, values) of the rows that have a number of that name."""
        return self._numbers.get(name, (np.empty(0, np.int32), np.empty(0)))

    def beside(self, name: str, rows: np.ndarray, *, missing: float) -> np.ndarray:
        """Return the numbers of that name in those rows."""
        if name not in self._whole:
            having, values = self.column(name)
            self._whole[name] = np.full(self._count, missing, values.dtype)
            self._whole[name][having] = values
        return self._whole[name][rows]

    def curve(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (steps, values) of a metric in the order of the steps; a step measured twice keeps the last value."""
        rows, values = self.column(name)
        if id(rows) not in self._steps:  # many names stand in the same rows
            self._steps[id(rows)] = self.beside("step", rows, missing=-1)
        steps = self._steps[id(rows)]
        if len(steps) and steps[0] >= 0 and (steps[1:] > steps[:-1]).all():
            return steps, values
        order = np.argsort(steps, kind="stable")
        order = order[steps[order] >= 0]
        steps, values = steps[order], values[order]
        last = np.append(steps[1:] != steps[:-1], True)[: len(steps)]
        return steps[last], values[last]

    def names(self) -> list[str]:
        """Return all names of numbers, in the order of their first appearance."""
        return list(self._numbers)

    def events(self, kind: str | None = None) -> list[tuple[int, dict[str, Any]]]:
        """(row number, row) of the events, or of those of one kind."""
        found = [(row, fields["event"]) for row, fields in sorted(self._others.items()) if "event" in fields]
        return [(row, self[row]) for row, event in found if kind in (None, event)]

    def that_count(self) -> "Columns":
        """Return the run as it counts: rows.last_attempts, by columns."""
        steps = np.zeros(self._count)
        rows, values = self.column("step")
        steps[rows] = values
        is_event = np.zeros(self._count, bool)
        is_event[[row for row, fields in self._others.items() if "event" in fields]] = True
        kept = np.ones(self._count, bool)
        for row, attempt in self.events("attempt"):
            start = attempt.get("step")
            if not isinstance(start, int | float):  # no attempt of ours
                continue
            kept[:row] &= (steps[:row] <= start) & (is_event[:row] if start <= 0 else True)
        return self if kept.all() else self._only(kept)

    def _only(self, kept: np.ndarray) -> "Columns":
        renumbered = np.cumsum(kept) - 1
        numbers = {}
        moved: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # many names stand in the same rows
        for name, (rows, values) in self._numbers.items():
            if id(rows) not in moved:
                stay = kept[rows]
                moved[id(rows)] = stay, renumbered[rows[stay]].astype(rows.dtype)
            stay, new = moved[id(rows)]
            if len(new):
                numbers[name] = new, values[stay]
        others = {int(renumbered[row]): fields for row, fields in self._others.items() if kept[row]}
        return Columns(int(kept.sum()), numbers, others)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        places = range(self._count)[index]
        return (
            [self._dicts(place, place + 1)[0] for place in places]
            if isinstance(places, range)
            else self._dicts(places, places + 1)[0]
        )

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for start in range(0, self._count, ROWS_AT_ONCE):
            yield from self._dicts(start, min(start + ROWS_AT_ONCE, self._count))

    def _dicts(self, start: int, end: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = [dict(self._others.get(row, {})) for row in range(start, end)]
        for name, (rows, values) in self._numbers.items():
            first, last = np.searchsorted(rows, (start, end))
            for row, value in zip(rows[first:last].tolist(), values[first:last].tolist(), strict=True):
                found[row - start][name] = value
        return found


def read_columns(path: str | Path) -> Columns:
    """Return all rows that are whole, as rows.read_rows gives them; a row that is no JSON object is left out."""
    path = Path(path)
    if not path.exists():
        return _join([])
    blocks: list[_Block] = []
    reading: deque[Future[_Block]] = deque()
    with open_rows(path) as file, ThreadPoolExecutor(THREADS) as threads:  # Arrow parses beside Python
        while text := file.read(BLOCK_BYTES) + file.readline(LINE_BYTES):
            if len(text) >= LINE_BYTES and not text.endswith(b"\n"):
                skip_line(file)
                text = text[: text.rfind(b"\n") + 1]
            reading.append(threads.submit(lambda text: _quick(text) or _line_by_line(text), text))
            if len(reading) > 2 * THREADS:
                blocks.append(reading.popleft().result())
        blocks += [block.result() for block in reading]
    return _join(blocks)


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
    rows, times = written.column("time")
    attempts = written.beside("attempt", rows, missing=0)
    known = np.isfinite(attempts) & np.isfinite(times)
    attempts, times = attempts[known], times[known]
    spans = {
        int(n): (float(times[attempts == n].min()), float(times[attempts == n].max())) for n in np.unique(attempts)
    }
    starts = [row for _, row in written.events("attempt") if isinstance(row.get("began"), int | float)]
    began = {row["attempt"]: row["began"] for row in starts if isinstance(row.get("attempt"), int | float)}
    found = [(n, min(first, began.get(n, first)), last) for n, (first, last) in spans.items()]
    if found and found[-1][0] == manifest.get("attempts"):
        attempt, first, last = found[-1]
        ends = [manifest.get("ended"), manifest.get("finished"), failed]
        found[-1] = attempt, first, max([last, *(end for end in ends if isinstance(end, (int, float)))])
    return found


class _Block:
    """Rows that are read together."""

    def __init__(self) -> None:
        self.count = 0
        self.rows: dict[str, Any] = {}  # name -> numbers of its rows
        self.values: dict[str, Any] = {}
        self.others: dict[int, dict[str, Any]] = {}

    def add(self, row: dict[str, Any]) -> None:
        """Take a row in. What no run writes (an event without a step, a time that is text) counts as not there."""
        for name, value in row.items():
            if name == "event" and not (isinstance(value, str) and _is_step(row.get("step"))):
                continue
            if isinstance(value, int) and abs(value) > MOST_INTEGER:
                value = float(value) if name != "step" and value.bit_length() < 1024 else None
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                self.rows.setdefault(name, []).append(self.count)
                self.values.setdefault(name, []).append(value)
            elif value is not None and name not in NUMBERS:  # null: not known, the same as not there
                self.others.setdefault(self.count, {})[name] = value
        self.count += 1


def _is_step(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) <= MOST_INTEGER  # NaN is not


def _quick(text: bytes) -> _Block | None:
    """Return the block by Arrow's parser, which is faster and leaves Python free; None where only Python's can say
    what is there."""
    import pyarrow
    from pyarrow import json as arrow

    try:
        table = arrow.read_json(
            io.BytesIO(text), read_options=arrow.ReadOptions(use_threads=False, block_size=len(text) + 1)
        )
    except pyarrow.ArrowInvalid:  # a torn line, NaN, a row that is no object
        return None
    if text.count(b"\n") + (not text.endswith(b"\n")) != table.num_rows:
        return None
    block = _Block()
    block.count = table.num_rows
    every = np.arange(block.count, dtype=np.int32)
    by_python: set[int] = set()
    for name in table.column_names:
        column = table.column(name).combine_chunks()
        there = every
        if column.null_count:
            there = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False)).astype(np.int32)
        if pyarrow.types.is_integer(column.type) or pyarrow.types.is_floating(column.type):
            block.rows[name] = there
            block.values[name] = column.drop_null().to_numpy(zero_copy_only=False)
        else:
            by_python.update(there.tolist())
    lines = text.splitlines() if by_python else []
    for row in by_python:
        whole = _Block()
        whole.add(json.loads(lines[row]))
        if whole.others:
            block.others[row] = whole.others[0]
    return block


def _line_by_line(text: bytes) -> _Block:
    block = _Block()
    for line in text.splitlines():
        if (row := row_of(line)) is not None:
            block.add(row)
    return block


def _join(blocks: list[_Block]) -> Columns:
    """Return the blocks in a row. What was read of a name is let go as soon as its column stands."""
    starts = np.cumsum([0, *(block.count for block in blocks)], dtype=np.int32)
    numbers = {}
    known: dict[bytes, np.ndarray] = {}  # rows of earlier names by their hash, taken again where they are the same
    for name in islice(dict.fromkeys(name for block in blocks for name in block.values), MOST_NAMES):
        having = [(start, block) for start, block in zip(starts, blocks, strict=False) if name in block.values]
        rows = np.concatenate([np.asarray(block.rows.pop(name), np.int32) + start for start, block in having])
        rows = known.setdefault(hashlib.blake2b(rows.tobytes(), digest_size=16).digest(), rows)
        values = np.concatenate([np.asarray(block.values.pop(name)) for _, block in having])
        if name == "step" and values.dtype.kind == "f":
            whole = np.isfinite(values) & (np.abs(values) <= MOST_INTEGER)
            rows, values = rows[whole], values[whole].astype(np.int64)
        numbers[name] = rows, values
    others = {
        int(start) + row: fields
        for start, block in zip(starts, blocks, strict=False)
        for row, fields in block.others.items()
    }
    return Columns(int(starts[-1]), numbers, others)
