"""Sealed shards of several sources and the mixture of their rows: what is there, what is missing next, which row is which."""

from dataclasses import dataclass

import numpy as np

from pipeline.data.mixture import Mixture
from pipeline.data.sequence import Sequence
from pipeline.data.shards import Shard


@dataclass(frozen=True)
class RowPlace:
    """Where a global row lies."""

    source: int
    k: int  # running row number of the source, over epochs
    epoch: int
    shard: int
    row: int  # in the shard


class Stream:
    """One order of rows over several sequences. keys: each sequence's cache key; seed None: rows stay as they were packed."""

    def __init__(self, sequences: list[Sequence], mixture: Mixture, *, keys: list[str], seed: int | None):
        self.sequences, self.mixture, self.keys, self.seed = sequences, mixture, keys, seed
        self._permutations: dict[tuple[int, int, int], np.ndarray] = {}
        self.refresh()

    def refresh(self) -> None:
        for sequence in self.sequences:
            sequence.refresh()
        self.mixture.learn([s.rows if s.end is not None else None for s in self.sequences])

    def undecided(self) -> int | None:
        """A source of which more must be sealed before the run's order or length is known."""
        for s, sequence in enumerate(self.sequences):
            if sequence.end is None and self.mixture.must_be_counted(s):
                return s
        for s, sequence in enumerate(self.sequences):
            part = self.mixture.parts[s]
            if sequence.end is None and part.at_end == "stop" and self._first_unsealed_use(s) is not None:
                return s
        return None

    def _first_unsealed_use(self, source: int) -> int | None:
        """The first global row of the run that is not sealed yet because of this source."""
        sequence = self.sequences[source]
        return None if sequence.end is not None else self.mixture.first_use(source, sequence.rows)

    def missing(self, rows: int | None = None) -> int | None:
        """The source whose next shard is needed first, for the first `rows` global rows (None: the whole run); None when
        all of it is sealed. What decides the order or the length comes before everything."""
        if rows is None or not self.mixture.ready:
            source = self.undecided()
            if source is not None:
                return source
        uses = [(at, s) for s in range(len(self.sequences)) if (at := self._first_unsealed_use(s)) is not None]
        needed = [(at, s) for at, s in uses if rows is None or at < rows]
        return min(needed)[1] if needed else None

    def shards_needed(self, source: int) -> int:
        """Shards of a source that the run reads, as far as they are sealed."""
        sequence = self.sequences[source]
        if self.mixture.total_rows is None:
            return len(sequence.seals)
        used = self.mixture.used(self.mixture.total_rows)[source]
        return min(len(sequence.seals), -(-used // sequence.shard_rows))

    def places(self, first: int, count: int) -> list[RowPlace]:
        """Where the global rows first ... first + count - 1 lie; they must be sealed."""
        sources, ks = self.mixture.locate(first, count)
        return [self._place(int(s), int(k)) for s, k in zip(sources, ks, strict=True)]

    def _place(self, source: int, k: int) -> RowPlace:
        sequence = self.sequences[source]
        epoch, row = (0, k) if k < sequence.rows else divmod(k, sequence.rows)
        shard, row = divmod(row, sequence.shard_rows)
        if self.seed is not None:
            row = int(self.order(source, epoch, shard)[row])
        return RowPlace(source, k, epoch, shard, row)

    def order(self, source: int, epoch: int, shard: int) -> np.ndarray:
        """(rows,) in which the rows of a shard are read in an epoch; only where there is a seed."""
        at = source, epoch, shard
        if at not in self._permutations:
            while len(self._permutations) >= 64:
                del self._permutations[next(iter(self._permutations))]
            start = int(self.keys[source][:16], 16)
            self._permutations[at] = permutation(
                self.sequences[source].seals[shard]["rows"], self.seed or 0, start, epoch, shard
            )
        return self._permutations[at]

    def shard(self, place: RowPlace) -> Shard:
        return self.sequences[place.source].shard(place.shard)


def permutation(n: int, *numbers: int) -> np.ndarray:
    """(n,) permutation of 0 ... n-1 that is a pure function of the numbers, on every version of every library.

    numpy does not promise its generators' streams, so the sort keys are SplitMix64's, spelt out.
    """
    mask = (1 << 64) - 1

    def mixed(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    state = 0
    for number in numbers:
        state = mixed((state + number + 0x9E3779B97F4A7C15) & mask)
    with np.errstate(over="ignore"):
        x = np.uint64(state) + np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return np.argsort(x, kind="stable")
