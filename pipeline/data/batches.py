"""Rows out of memory maps into the tensors of a training batch."""

import numpy as np

from pipeline.data.shards import Shard

IGNORED = -100


class RowReader:
    """Copies rows into batches. T = row_tokens, B = rows of the batch.

    isolated: position_ids restart where a document or conversation begins, which is how the model keeps them apart.
    """

    def __init__(self, *, row_tokens: int, bos: int, pad: int, isolated: bool):
        self.row_tokens, self.bos, self.pad, self.isolated = row_tokens, bos, pad, isolated

    def batch(self, rows: list[tuple[Shard, int] | None]) -> dict:
        """input_ids, labels, shift_labels (B, T) int64, position_ids (B, T) int64 when isolated.

        labels and shift_labels are one tensor: row[1:], -100 where nothing is trained. None is a filler of weight 0.
        target_bytes (B, T) int64, bytes of text under each target and -1 under a special one, where the shards hold them.
        """
        import torch

        T = self.row_tokens
        input_ids_BT = np.empty((len(rows), T), np.int64)
        labels_BT = np.empty((len(rows), T), np.int64)
        starts_BT = np.zeros((len(rows), T), bool) if self.isolated else None
        has_bytes = any(place is not None and place[0].target_bytes is not None for place in rows)
        bytes_BT = np.full((len(rows), T), -1, np.int64) if has_bytes else None
        for shard, at, numbers in _by_shard(rows):
            if shard is None:
                input_ids_BT[at], labels_BT[at] = self.pad, IGNORED
                continue
            ids = shard.input_ids[numbers]
            input_ids_BT[at], labels_BT[at] = ids[:, :-1], ids[:, 1:]
            if bytes_BT is not None and shard.target_bytes is not None:
                bytes_BT[at] = shard.target_bytes[numbers][:, 1:]
            if shard.trained is not None and shard.starts is not None:
                labels_BT[at] = np.where(bits(shard.trained[numbers], T + 1)[:, 1:], ids[:, 1:], np.int64(IGNORED))
                if starts_BT is not None:
                    starts_BT[at] = bits(shard.starts[numbers], T + 1)[:, :-1]
                continue
            if starts_BT is not None:
                # Text holds no control token, so a BOS is always the start of a piece.
                starts_BT[at] = ids[:, :-1] == self.bos
            used = shard.used[numbers]
            for n in np.flatnonzero(used <= T):
                i, end = at[n], int(used[n])
                labels_BT[i, end - 1 :] = IGNORED
                if starts_BT is not None:
                    starts_BT[i, end:] = False
                    starts_BT[i, end : end + 1] = True  # the padding is a segment too
        labels = torch.from_numpy(labels_BT)
        batch = {"input_ids": torch.from_numpy(input_ids_BT), "labels": labels, "shift_labels": labels}
        if bytes_BT is not None:
            batch["target_bytes"] = torch.from_numpy(bytes_BT)
        if starts_BT is not None:
            batch["position_ids"] = torch.from_numpy(positions(starts_BT))
        return batch


def _by_shard(rows: list[tuple[Shard, int] | None]) -> list[tuple[Shard | None, list[int], list[int]]]:
    """The rows of each shard: where they go in the batch, and their numbers in the shard; fillers are of None."""
    found: dict[int, tuple[Shard | None, list[int], list[int]]] = {}
    for i, place in enumerate(rows):
        shard, number = place or (None, 0)
        _, at, numbers = found.setdefault(id(shard), (shard, [], []))
        at.append(i)
        numbers.append(number)
    return list(found.values())


def bits(packed: np.ndarray, count: int) -> np.ndarray:
    """(..., count) bool out of (..., bytes)."""
    return np.unpackbits(packed, axis=-1, count=count).view(bool)


def positions(starts_BT: np.ndarray) -> np.ndarray:
    """(B, T) int64 positions that begin again at 0 at every start; a row begins at 0."""
    at = np.arange(starts_BT.shape[1], dtype=np.int64)
    return at - np.maximum.accumulate(np.where(starts_BT, at, 0), axis=1)


def rows_of_micro_batch(micro_step: int, *, rank: int, world_size: int, rows: int, total: int) -> list[int | None]:
    """Numbers of the rows, of `total`, that a rank gets in a micro-step; None for those past the end."""
    first = (micro_step * world_size + rank) * rows
    return [i if i < total else None for i in range(first, first + rows)]
