"""What a run has trained on of each source: a pure function of the rows used, so that a resume needs no state for it."""

from dataclasses import dataclass

import numpy as np

from pipeline.data.batches import bits
from pipeline.data.packing import documents_begun
from pipeline.data.shards import Shard
from pipeline.data.stream import Stream


@dataclass(frozen=True)
class Consumed:
    """Of one source, over its epochs.

    samples: rows. tokens: trained targets. padded: positions behind the text of a row. documents: as documents_begun counts,
    None where shards were sealed before they counted them. bad_rows: unreadable ones in what was read, each counted once.
    """

    samples: int
    tokens: int
    padded: int
    documents: int | None
    bad_rows: int


class ConsumedCounter:
    """Sums over the first rows of a run, by source: whole shards by their seals, the one that is being read row by row, once."""

    def __init__(self, stream: Stream, *, bos: int):
        self.stream, self.bos = stream, bos
        self._current: dict[int, tuple[tuple[int, int], np.ndarray]] = {}  # source -> (epoch, shard), its running sums

    def consumed(self, rows: int) -> list[Consumed | None]:
        """Of the first `rows` rows, which must be sealed; None for a source whose current shard is deleted (data.keep_shards)."""
        return [self._of(source, k) for source, k in enumerate(self.stream.mixture.used(rows))]

    def _of(self, source: int, k: int) -> Consumed | None:
        sequence = self.stream.sequences[source]
        epoch, row = (0, k) if k <= sequence.rows else divmod(k, sequence.rows)
        number, row = divmod(row, sequence.shard_rows)
        sums = sequence.sums[number] + epoch * sequence.sums[-1]
        if row:
            if not sequence.is_there(number):
                return None
            sums = sums + self._running_sums(source, epoch, number)[row - 1]
        tokens, padded, documents = sums.tolist()
        shards_read = len(sequence.seals) if epoch else number + (row > 0)
        return Consumed(
            samples=k,
            tokens=tokens,
            padded=padded,
            documents=documents if sequence.counts_documents else None,
            bad_rows=sequence.num_bad_rows(shards_read),
        )

    def _running_sums(self, source: int, epoch: int, number: int) -> np.ndarray:
        """(rows, 3) targets, padding and documents of the shard's first rows, in the order of this epoch."""
        at = epoch, number
        if source not in self._current or self._current[source][0] != at:
            counts = row_counts(self.stream.sequences[source].shard(number), bos=self.bos)
            if self.stream.seed is not None:
                counts = counts[self.stream.order(source, epoch, number)]
            self._current[source] = at, counts.cumsum(0)
        return self._current[source][1]


def row_counts(shard: Shard, *, bos: int) -> np.ndarray:
    """(rows, 3) int64 targets, padding and documents of each row."""
    width = shard.input_ids.shape[1]
    starts = None if shard.starts is None else bits(shard.starts, width)
    documents = documents_begun(shard.input_ids, shard.used, starts, bos=bos)
    return np.stack([shard.targets, width - shard.used, documents], axis=1).astype(np.int64)
