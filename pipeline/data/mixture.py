"""Which row of which source is global row i: arithmetic alone, so a resume is a seek and every rank agrees.

Inside a segment the rows follow a pattern of slots, each slot a source, repeated for ever: source s owns counts[s] slots,
as evenly spread as they can be, and its k-th row stands in its k-th slot. A new segment begins where a source with
`at_end: drop` is used up. Sources with epochs own a fixed number of rows of the run, so then the pattern is the whole run.
"""

from dataclasses import dataclass

import numpy as np

PATTERN_SLOTS = 4096  # shares are exact to 1/8192 of the rows
LARGEST_PATTERN = 1 << 20


@dataclass(frozen=True)
class Part:
    """A source's place in a mixture: a weight or a number of epochs."""

    weight: float | None = 1.0
    epochs: float | None = None
    at_end: str = "repeat"


def apportion(weights: list[float], slots: int) -> list[int]:
    """Whole slots by weight that sum to `slots`: largest remainder, the first of equals."""
    total = sum(weights)
    exact = [weight * slots / total for weight in weights]
    counts = [int(x) for x in exact]
    by_remainder = sorted(range(len(weights)), key=lambda s: (counts[s] - exact[s], s))
    for s in by_remainder[: slots - sum(counts)]:
        counts[s] += 1
    return counts


def spread(counts: list[int]) -> np.ndarray:
    """(sum of counts,) source of each slot: the j-th of n slots of a source lies nearest (j + 1/2) / n of the way."""
    sources = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    times = np.concatenate([(np.arange(n) + 0.5) / n for n in counts if n] or [np.zeros(0)])
    return sources[np.argsort(times, kind="stable")]


class Segment:
    """Global rows from `start` on, by one pattern; bases: rows that each source had given before."""

    def __init__(self, start: int, bases: list[int], counts: list[int]):
        self.start, self.bases, self.counts = start, np.array(bases, np.int64), np.array(counts, np.int64)
        self.order = spread(counts)
        self.slots = [np.flatnonzero(self.order == s) for s in range(len(counts))]
        self.rank = np.empty(len(self.order), np.int64)
        for slots in self.slots:
            self.rank[slots] = np.arange(len(slots))

    def locate(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(n,) sources and (n,) their row numbers k (which run on over epochs)."""
        block, slot = np.divmod(rows - self.start, len(self.order))
        sources = self.order[slot]
        return sources, self.bases[sources] + block * self.counts[sources] + self.rank[slot]

    def used(self, row: int) -> list[int]:
        """Rows of each source among the global rows before `row`."""
        block, slot = divmod(row - self.start, len(self.order))
        return [
            int(base + block * count + np.searchsorted(slots, slot))
            for base, count, slots in zip(self.bases, self.counts, self.slots, strict=True)
        ]

    def first_use(self, source: int, k: int) -> int | None:
        """The global row at which a source's row k stands; None when the source has no slot."""
        if not self.counts[source]:
            return None
        block, rank = divmod(max(0, k - int(self.bases[source])), int(self.counts[source]))
        return self.start + block * len(self.order) + int(self.slots[source][rank])


class Mixture:
    """The order of the rows of a run, as far as it is known.

    total_rows: length of the run, None when `epochs` (of all sources) sets it. `learn` takes in which sources are fully
    prepared; until `ready`, nothing is known, because some source's length decides the order or the end.
    """

    def __init__(self, parts: list[Part], *, total_rows: int | None = None, epochs: float | None = None):
        assert (total_rows is None) != (epochs is None)
        self.parts, self.horizon, self.epochs = parts, total_rows, epochs
        self.ends: list[int | None] = [None] * len(parts)
        self.segments: list[Segment] = []
        self.total_rows: int | None = None
        self._build()

    def must_be_counted(self, source: int) -> bool:
        """Whether the source must be prepared to its end before the first row is known."""
        return self.epochs is not None or self.parts[source].epochs is not None

    @property
    def ready(self) -> bool:
        return self.total_rows is not None

    def learn(self, ends: list[int | None]) -> None:
        """ends: rows of each source that is fully prepared, else None."""
        if ends != self.ends:
            self.ends = list(ends)
            self._build()

    def _build(self) -> None:
        self.segments, self.total_rows = [], None
        if any(self.must_be_counted(s) and end is None for s, end in enumerate(self.ends)):
            return
        fixed = [None if p.epochs is None else round(p.epochs * (self.ends[s] or 0)) for s, p in enumerate(self.parts)]
        if self.horizon is not None:
            total = self.horizon
        else:
            assert self.epochs is not None
            rows = [self.ends[s] or 0 if n is None else n for s, n in enumerate(fixed)]
            total = round(self.epochs * sum(rows))
            fixed = [None if n is None else round(self.epochs * n) for n in fixed]
        alive = [s for s in range(len(self.parts)) if self.ends[s] != 0]
        segment = self._segment(0, [0] * len(self.parts), fixed, alive, total)
        while segment is not None:
            self.segments.append(segment)
            cut, gone = total, None
            for s in alive:
                end, part = self.ends[s], self.parts[s]
                if part.epochs is None and end is not None and part.at_end != "repeat":
                    at = segment.first_use(s, end)
                    if at is not None and at < cut:
                        cut, gone = at, s
            if gone is None or self.parts[gone].at_end == "stop":
                total = cut
                break
            alive = [s for s in alive if s != gone]
            bases = segment.used(cut)
            segment = self._segment(cut, bases, fixed, alive, total)
            if segment is None:
                total = cut
        self.total_rows = total if self.segments else 0

    def _segment(
        self, start: int, bases: list[int], fixed: list[int | None], alive: list[int], total: int
    ) -> Segment | None:
        """The pattern from `start` on; None when no source is left to fill it."""
        weights = [(self.parts[s].weight or 0.0) if s in alive and fixed[s] is None else 0.0 for s in range(len(fixed))]
        if not any(n is not None for n in fixed):
            if not any(weights):
                return None
            slots = 1 if sum(w > 0 for w in weights) == 1 else PATTERN_SLOTS
            counts = apportion(weights, slots)
            while any(w > 0 and not n for w, n in zip(weights, counts, strict=True)) and slots < LARGEST_PATTERN:
                slots *= 2
                counts = apportion(weights, slots)
            return Segment(start, bases, counts)
        counts = [0 if n is None else n - base for n, base in zip(fixed, bases, strict=True)]
        room = total - start - sum(counts)
        if any(weights) and room > 0:
            shares = apportion(weights, room)
            counts = [a + b for a, b in zip(counts, shares, strict=True)]
        return Segment(start, bases, counts) if sum(counts) else None

    def locate(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(count,) sources and (count,) row numbers k of the global rows first ... first + count - 1."""
        rows = np.arange(first, first + count, dtype=np.int64)
        sources, ks = np.empty(count, np.int64), np.empty(count, np.int64)
        starts = [segment.start for segment in self.segments] + [first + count]
        for segment, end in zip(self.segments, starts[1:], strict=True):
            here = (rows >= segment.start) & (rows < end)
            if here.any():
                sources[here], ks[here] = segment.locate(rows[here])
        return sources, ks

    def used(self, row: int) -> list[int]:
        """Rows of each source among the global rows before `row`."""
        if not self.segments:  # No source has a row.
            return [0] * len(self.parts)
        return next(s for s in reversed(self.segments) if s.start <= row).used(row)

    def first_use(self, source: int, k: int) -> int | None:
        """The global row at which row k of a source is first needed; None when that lies after the run."""
        if self.total_rows is None:
            return None
        for segment, end in zip(self.segments, [s.start for s in self.segments[1:]] + [self.total_rows], strict=True):
            at = segment.first_use(source, k)
            if at is not None and at < end:
                return at
        return None
