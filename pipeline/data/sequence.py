"""A source's sealed shards as readers see them: they only ever grow at the end, until the source is used up."""

from pathlib import Path
from typing import Any

import numpy as np

from pipeline.data.shards import Shard, end_path, open_shard, read_end, read_seal, seal_path, shard_path

OPEN_SHARDS = 8  # kept mapped; the rows of a step lie in one or two shards of a source


class Sequence:
    """Shards of one cache key. `rows` counts what is sealed so far, `end` is None until all there is is sealed.

    sums: for each n up to the number of seals, targets, padding and documents of the first n shards; without documents where
    not counts_documents, as of shards sealed by an earlier version.
    """

    def __init__(self, folder: str | Path, *, shard_rows: int):
        self.folder, self.shard_rows = Path(folder), shard_rows
        self.seals: list[dict] = []
        self.rows = 0
        self.sums = [np.zeros(3, np.int64)]
        self.counts_documents = True
        self._bad_rows = [0]
        self.end: dict | None = None
        self._open: dict[int, Shard] = {}
        self.refresh()

    def refresh(self) -> bool:
        """Look for new seals; whether there were any."""
        before = len(self.seals), self.end
        if self.end is not None:
            return False
        # The end first: shards sealed between the two looks are then counted, never missed.
        end = read_end(self.folder) if end_path(self.folder).exists() else None
        while seal_path(self.folder, len(self.seals)).exists():
            seal = read_seal(self.folder, len(self.seals))
            self.seals.append(seal)
            self.rows += seal["rows"]
            self.sums.append(self.sums[-1] + [seal["targets"], seal["padded"], seal.get("documents", 0)])
            self.counts_documents &= "documents" in seal
            self._bad_rows.append(self._bad_rows[-1] + len(seal["bad_rows"]))
        # A seal that is missing before the end is to be made again: without it rows would be left out in silence.
        self.end = end if end and len(self.seals) >= end["shards"] else None
        return before != (len(self.seals), self.end)

    def shard(self, number: int) -> Shard:
        """The shard, verified against its seal when it is opened."""
        if number not in self._open:
            while len(self._open) >= OPEN_SHARDS:
                del self._open[next(iter(self._open))]
            self._open[number] = open_shard(self.folder, number)
        return self._open[number]

    def is_there(self, number: int) -> bool:
        """Whether a sealed shard's file is: with data.keep_shards it comes and goes."""
        return number in self._open or shard_path(self.folder, number).exists()

    def num_bad_rows(self, shards: int) -> int:
        """How many bad_rows(shards) names."""
        behind_the_last = len(self.end["bad_rows"]) if self.end and shards >= len(self.seals) else 0
        return self._bad_rows[shards] + behind_the_last

    def bad_rows(self, shards: int) -> list[str]:
        """The unreadable rows named in the first `shards` seals."""
        seals = [*self.seals[:shards], *([self.end] if self.end and shards >= len(self.seals) else [])]
        return [line for seal in seals for line in seal["bad_rows"]]

    def totals(self, shards: int | None = None) -> dict[str, Any]:
        """Sums over the first `shards` seals (all sealed): shards rows positions targets padded bytes bad_rows, and what was
        read of the source by then: documents text_tokens text_bytes cropped_tokens split_documents ..."""
        seals = self.seals[:shards]
        sums = {name: sum(seal[name] for seal in seals) for name in ("rows", "positions", "targets", "padded", "bytes")}
        last = self.end if self.end and len(seals) == len(self.seals) else (seals or [{"read": {}}])[-1]
        return {"shards": len(seals), **sums, "bad_rows": len(self.bad_rows(len(seals))), **last["read"]}
