"""Rows under construction: pieces fitted into bins, bins laid out as arrays. T = row_tokens."""

from bisect import bisect_left, insort
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

Origin = tuple[int, int, int]  # file, row group, row of a source


@dataclass
class PackedRows:
    """n finished rows."""

    input_ids: np.ndarray  # (n, T + 1) uint16 or uint32
    origins: np.ndarray  # (n, 3) int32: origin of the row's first piece
    used: np.ndarray  # (n,) int32: positions before the padding
    trained: np.ndarray | None = None  # (n, T + 1) bool: token is a target; conversations only
    starts: np.ndarray | None = None  # (n, T + 1) bool: token begins a conversation; conversations only
    target_bytes: np.ndarray | None = None  # (n, T + 1) int32: bytes of text under the token; scored_bytes.py only

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def targets(self) -> np.ndarray:
        """(n,) int32 trained targets of each row; a row's first token is nobody's target."""
        return self.used - 1 if self.trained is None else self.trained[:, 1:].sum(1, dtype=np.int32)

    def __getitem__(self, rows: slice) -> "PackedRows":
        some: dict[str, Any] = {name: None if a is None else a[rows] for name, a in self.arrays().items()}
        return PackedRows(**some)

    def arrays(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def joined(cls, parts: list["PackedRows"]) -> "PackedRows":
        """One after the other; at least one part."""
        names = [name for name, array in parts[0].arrays().items() if array is not None]
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def documents_begun(input_ids: np.ndarray, used: np.ndarray, starts: np.ndarray | None, *, bos: int) -> np.ndarray:
    """(n,) how many conversations (starts, (n, T + 1) bool) or pieces of text (each begins with BOS) begin in each row.

    A document that packing cut in two or more counts with every piece. A row's last token is the next row's first under
    `concat`, so what begins there begins in the next row.
    """
    begins = (input_ids == bos if starts is None else starts)[:, :-1]
    return (begins & (np.arange(begins.shape[1]) < used[:, None])).sum(1)  # padding may have the id of BOS, or a start


def best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Bins of piece numbers: longest piece first, each into the fullest bin that still holds it.

    No length may exceed capacity. Equal lengths keep their order; of equally full bins the oldest is taken. Bins and the
    pieces in them are returned in the order of the pieces: by length, the first rows of a block would all be long documents.
    """
    bins: list[list[int]] = []
    open_bins: list[int] = []  # remaining room << 32 | bin, sorted: a bisect finds the tightest fit
    for piece in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[piece]
        at = bisect_left(open_bins, length << 32)
        if at < len(open_bins):
            key = open_bins.pop(at)
            room, number = key >> 32, key & 0xFFFFFFFF
            bins[number].append(piece)
        else:
            room, number = capacity, len(bins)
            bins.append([piece])
        if room - length >= 2:  # a piece is BOS and at least one token
            insort(open_bins, (room - length) << 32 | number)
    return sorted(sorted(numbers) for numbers in bins)


def fill_rows(
    pieces: list[np.ndarray], bins: list[list[int]], *, width: int, pad: int, dtype
) -> tuple[np.ndarray, np.ndarray]:
    """(n, width) ids and (n,) used positions of the bins' pieces laid one after the other."""
    rows = np.full((len(bins), width), pad, dtype=dtype)
    used = np.zeros(len(bins), dtype=np.int32)
    for row, numbers in zip(rows, bins, strict=True):
        at = 0
        for number in numbers:
            piece = pieces[number]
            row[at : at + len(piece)] = piece
            at += len(piece)
    for i, numbers in enumerate(bins):
        used[i] = sum(len(pieces[n]) for n in numbers)
    return rows, used


def ragged(arrays: list[np.ndarray], dtype) -> tuple[np.ndarray, np.ndarray]:
    """Arrays of different lengths as one array and their lengths; `unragged` takes them apart again."""
    lengths = np.array([len(a) for a in arrays], dtype=np.int64)
    return (np.concatenate(arrays).astype(dtype) if arrays else np.zeros(0, dtype)), lengths


def unragged(flat: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    return np.split(flat, np.cumsum(lengths)[:-1]) if len(lengths) else []
