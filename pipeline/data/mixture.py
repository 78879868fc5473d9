"""The order of the rows of a run: arithmetic alone says which row of which source is global row i, so a resume is a
seek and every rank agrees.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from pipeline.data.shards import Shard, ShardedDataset

PATTERN_SLOTS = 4096  # shares are exact to 1/8192 of the rows
LARGEST_PATTERN = 1 << 20


@dataclass(frozen=True)
class SourceWeight:
    """A source's place in a mixture: a weight or a number of epochs."""

    weight: float | None = 1.0
    epochs: float | None = None
    at_end: str = "repeat"


def largest_remainder(weights: list[float], slots: int) -> list[int]:
    """Return whole slots by weight that sum to `slots`: largest remainder, the first of equals."""
    exact = np.array(weights) * slots / sum(weights)
    counts = exact.astype(np.int64)
    by_remainder = np.argsort(counts - exact, kind="stable")
    counts[by_remainder[: slots - counts.sum()]] += 1
    return counts.tolist()


def interleave(counts: list[int]) -> np.ndarray:
    """Return (sum of counts,) source of each slot: the j-th of n slots of a source lies nearest (j + 1/2) / n of the
    way."""
    sources = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    times = np.concatenate([np.zeros(0), *((np.arange(n) + 0.5) / n for n in counts)])
    return sources[np.argsort(times, kind="stable")]


class MixturePhase:
    """Global rows from `start` on, by one pattern; bases: rows that each source had given before."""

    def __init__(self, start: int, bases: list[int], counts: list[int]):
        self.start, self.bases, self.counts = start, np.array(bases, np.int64), np.array(counts, np.int64)
        self.order = interleave(counts)
        self.slots = [np.flatnonzero(self.order == s) for s in range(len(counts))]
        self.rank = np.empty(len(self.order), np.int64)
        for slots in self.slots:  # rank: of each slot, how many of its source come before it in the pattern
            self.rank[slots] = np.arange(len(slots))

    def locate(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (n,) sources and (n,) their row numbers k (which run on over epochs)."""
        block, slot = np.divmod(rows - self.start, len(self.order))
        sources = self.order[slot]
        return sources, self.bases[sources] + block * self.counts[sources] + self.rank[slot]

    def used(self, row: int) -> list[int]:
        """Return rows of each source among the global rows before `row`."""
        # Whole repetitions of the pattern, and the slots of one that is begun.
        block, slot = divmod(row - self.start, len(self.order))
        in_block = [np.searchsorted(slots, slot) for slots in self.slots]
        return (self.bases + block * self.counts + in_block).tolist()

    def first_use(self, source: int, k: int) -> int | None:
        """Return the global row of a source's row k; None when the source has no slot."""
        if not self.counts[source]:
            return None
        block, rank = divmod(max(0, k - int(self.bases[source])), int(self.counts[source]))
        return self.start + block * len(self.order) + int(self.slots[source][rank])


class Mixture:
    """The order of the rows of a run, as far as it is known.

    total_rows: length of the run, None when `epochs` (of all sources) sets it. `learn` takes in which sources are
    fully prepared; until `ready`, nothing is known, because some source's length decides the order or the end.
    """

    def __init__(self, weights: list[SourceWeight], *, total_rows: int | None = None, epochs: float | None = None):
        assert (total_rows is None) != (epochs is None)
        self.weights, self.horizon, self.epochs = weights, total_rows, epochs
        self.ends: list[int | None] = [None] * len(weights)
        self.phases: list[MixturePhase] = []
        self.total_rows: int | None = None
        self._build()

    def must_be_counted(self, source: int) -> bool:
        """Return whether the source must be prepared to its end before the first row is known."""
        return self.epochs is not None or self.weights[source].epochs is not None

    @property
    def ready(self) -> bool:
        return self.total_rows is not None

    def learn(self, ends: list[int | None]) -> None:
        """ends: rows of each source that is fully prepared, else None."""
        if ends != self.ends:
            self.ends = list(ends)
            self._build()

    def _build(self) -> None:
        self.phases, self.total_rows = [], None
        if any(self.must_be_counted(s) and end is None for s, end in enumerate(self.ends)):
            return
        lengths = [end or 0 for end in self.ends]
        # 1. Rows of the sources whose epochs are given; by weight, the others share what is left.
        fixed: dict[int, int] = {}
        for s, weight in enumerate(self.weights):
            if weight.epochs is not None:
                fixed[s] = round(weight.epochs * lengths[s])
        # 2. Rows of the run.
        if self.horizon is not None:
            total = self.horizon
        else:
            assert self.epochs is not None
            total = round(self.epochs * sum(fixed.get(s, length) for s, length in enumerate(lengths)))
            fixed = {s: round(self.epochs * rows) for s, rows in fixed.items()}
        # 3. One pattern until a source ends that is not repeated, then another one without it.
        alive = [s for s in range(len(self.weights)) if self.ends[s] != 0]
        phase = self._phase(0, [0] * len(self.weights), fixed, alive, total)
        while phase is not None:
            self.phases.append(phase)
            # The first of the sources that would be used up before the run ends; of equals the first listed.
            cut, gone = total, None
            for s in alive:
                end, part = self.ends[s], self.weights[s]
                if part.epochs is None and end is not None and part.at_end != "repeat":
                    at = phase.first_use(s, end)
                    if at is not None and at < cut:
                        cut, gone = at, s
            if gone is None or self.weights[gone].at_end == "stop":
                total = cut
                break
            alive = [s for s in alive if s != gone]
            bases = phase.used(cut)
            phase = self._phase(cut, bases, fixed, alive, total)
            if phase is None:
                total = cut
        self.total_rows = total if self.phases else 0

    def _phase(
        self, start: int, bases: list[int], fixed: dict[int, int], alive: list[int], total: int
    ) -> MixturePhase | None:
        """Return the pattern from `start` on; None when no source is left to fill it."""
        weights = [0.0] * len(self.weights)
        for s in alive:
            if s not in fixed:
                weights[s] = self.weights[s].weight or 0.0
        num_weighted = np.count_nonzero(weights)
        if not fixed:
            if not num_weighted:
                return None
            slots = 1 if num_weighted == 1 else PATTERN_SLOTS
            counts = largest_remainder(weights, slots)
            # Longer, where a source of a small weight got no slot.
            while np.count_nonzero(counts) < num_weighted and slots < LARGEST_PATTERN:
                slots *= 2
                counts = largest_remainder(weights, slots)
            return MixturePhase(start, bases, counts)
        counts = [0] * len(weights)
        for s, rows in fixed.items():
            counts[s] = rows - bases[s]
        room = total - start - sum(counts)
        if num_weighted and room > 0:
            counts = np.add(counts, largest_remainder(weights, room)).tolist()
        return MixturePhase(start, bases, counts) if sum(counts) else None

    def locate(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (count,) sources and (count,) row numbers k of the global rows first ... first + count - 1."""
        # A range of rows may reach over the end of a phase; most lie in one.
        rows = np.arange(first, first + count, dtype=np.int64)
        sources, ks = np.empty(count, np.int64), np.empty(count, np.int64)
        starts = [phase.start for phase in self.phases] + [first + count]
        for phase, end in zip(self.phases, starts[1:], strict=True):
            here = (rows >= phase.start) & (rows < end)
            if here.any():
                sources[here], ks[here] = phase.locate(rows[here])
        return sources, ks

    def used(self, row: int) -> list[int]:
        """Return rows of each source among the global rows before `row`."""
        if not self.phases:  # No source has a row.
            return [0] * len(self.weights)
        phase = bisect_right(self.phases, row, key=lambda phase: phase.start) - 1
        return self.phases[phase].used(row)

    def first_use(self, source: int, k: int) -> int | None:
        """Return the global row at which row k of a source is first needed; None when that lies after the run."""
        if self.total_rows is None:
            return None
        ends = [phase.start for phase in self.phases[1:]] + [self.total_rows]
        for phase, end in zip(self.phases, ends, strict=False):
            at = phase.first_use(source, k)
            if at is not None and at < end:
                return at
        return None


@dataclass(frozen=True)
class RowPlace:
    """Place of a global row in its source's shards."""

    source: int
    k: int  # running row number of the source, over epochs
    epoch: int
    shard: int
    row: int  # in the shard


class MixedDataset:
    """One order of rows over several datasets. keys: each dataset's cache key; seed None: rows stay as they were
    packed."""

    def __init__(self, datasets: list[ShardedDataset], mixture: Mixture, *, keys: list[str], seed: int | None):
        self.datasets, self.mixture, self.keys, self.seed = datasets, mixture, keys, seed
        self.refresh()

    def refresh(self) -> None:
        for dataset in self.datasets:
            dataset.refresh()
        self.mixture.learn([dataset.length for dataset in self.datasets])

    def undecided(self) -> int | None:
        """Return a source of which more must be sealed before the run's order or length is known."""
        open_ones = [s for s, dataset in enumerate(self.datasets) if dataset.end is None]
        for s in open_ones:
            if self.mixture.must_be_counted(s):
                return s
        for s in open_ones:
            if self.mixture.weights[s].at_end == "stop" and self._first_unsealed_use(s) is not None:
                return s
        return None

    def _first_unsealed_use(self, source: int) -> int | None:
        """Return the first global row of the run that is not sealed yet because of this source."""
        dataset = self.datasets[source]
        if dataset.end is not None:
            return None
        return self.mixture.first_use(source, dataset.rows)

    def missing(self, rows: int | None = None) -> int | None:
        """Return the source whose next shard is needed first, for the first `rows` global rows (None: the whole run);
        None when all of it is sealed. What decides the order or the length comes before everything."""
        if rows is None or not self.mixture.ready:
            source = self.undecided()
            if source is not None:
                return source
        needed = []
        for s in range(len(self.datasets)):
            at = self._first_unsealed_use(s)
            if at is not None and (rows is None or at < rows):
                needed.append((at, s))
        return min(needed)[1] if needed else None

    def is_decided(self) -> bool:
        """Look for new seals, and return whether the run's order and length are known."""
        self.refresh()
        return self.undecided() is None

    def is_sealed(self, rows: int | None = None) -> bool:
        """Look for new seals, and return whether nothing is missing for so many rows."""
        self.refresh()
        return self.missing(rows) is None

    def shards_needed(self, source: int) -> int:
        """Return how many shards of a source the run reads, as far as they are sealed."""
        dataset = self.datasets[source]
        if self.mixture.total_rows is None:
            return len(dataset.seals)
        used = self.mixture.used(self.mixture.total_rows)[source]
        return min(len(dataset.seals), -(-used // dataset.shard_rows))

    def places(self, first: int, count: int) -> list[RowPlace]:
        """Return where the global rows first ... first + count - 1 lie; they must be sealed."""
        sources, ks = self.mixture.locate(first, count)
        return [self._place(int(s), int(k)) for s, k in zip(sources, ks, strict=True)]

    def _place(self, source: int, k: int) -> RowPlace:
        dataset = self.datasets[source]
        epoch, row = (0, k) if k < dataset.rows else divmod(k, dataset.rows)
        shard, row = divmod(row, dataset.shard_rows)
        if self.seed is not None:
            row = int(self.order(source, epoch, shard)[row])
        return RowPlace(source, k, epoch, shard, row)

    def order(self, source: int, epoch: int, shard: int) -> np.ndarray:
        """Return (rows,) in which the rows of a shard are read in an epoch; only where there is a seed."""
        rows, start = self.datasets[source].seals[shard]["rows"], int(self.keys[source][:16], 16)
        return permutation(rows, self.seed or 0, start, epoch, shard)

    def shard(self, place: RowPlace) -> Shard:
        return self.datasets[place.source].shard(place.shard)


def mixed(numbers: np.ndarray) -> np.ndarray:
    """Return SplitMix64's last step of uint64 numbers: every bit of a number moves every bit of the result."""
    x = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@lru_cache(maxsize=192)  # orders of a process: 64 for each of its three streams
def permutation(n: int, *numbers: int) -> np.ndarray:
    """Return an (n,) permutation of 0 ... n-1 that is a pure function of the numbers, on every version of every
    library.

    numpy does not promise its generators' streams, so the sort keys are SplitMix64's, spelt out.
    """
    step = np.uint64(0x9E3779B97F4A7C15)
    state = np.zeros(1, np.uint64)
    for number in numbers:
        state = mixed(state + np.uint64(number % 2**64) + step)
    return np.argsort(mixed(state + np.arange(1, n + 1, dtype=np.uint64) * step), kind="stable")
