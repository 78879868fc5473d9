"""Documents and conversations packed into rows of row_tokens + 1 ids: three ways for text, one for conversations."""

import copy
from bisect import bisect_left, insort
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from pipeline.data.shards import NO_TEXT

Origin = tuple[int, int, int]  # file, row group, row of a source


@dataclass
class PackedRows:
    """n finished rows."""

    input_ids: np.ndarray  # (n, T + 1) uint16 or uint32
    origins: np.ndarray  # (n, 3) int32: origin of the row's first piece
    used: np.ndarray  # (n,) int32: positions before the padding
    trained: np.ndarray | None = None  # (n, T + 1) bool: token is a target; conversations only
    starts: np.ndarray | None = None  # (n, T + 1) bool: token begins a conversation; conversations only
    # (n, T + 1) int32: bytes of text under the token; where the rows carry them
    target_bytes: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def targets(self) -> np.ndarray:
        """Return (n,) int32 trained targets of each row; a row's first token is nobody's target."""
        return self.used - 1 if self.trained is None else self.trained[:, 1:].sum(1, dtype=np.int32)

    def __getitem__(self, rows: slice) -> "PackedRows":
        return PackedRows(**{name: array[rows] for name, array in vars(self).items() if array is not None})

    @classmethod
    def joined(cls, parts: list["PackedRows"]) -> "PackedRows":
        """Return one after the other; at least one part."""
        arrays = {}
        for name, array in vars(parts[0]).items():
            if array is not None:
                arrays[name] = np.concatenate([getattr(part, name) for part in parts])
        return cls(**arrays)


def best_fit(lengths: list[int], capacity: int, *, one_text: bool = False) -> list[list[int]]:
    """Return bins of piece numbers: longest piece first, each into the fullest bin that still holds it.

    No length may exceed capacity. Equal lengths keep their order; of equally full bins the oldest is taken. Bins and
    the pieces in them are returned in the order of the pieces: by length, the first rows of a block would all be long
    documents. one_text: each piece in a bin of its own.
    """
    if one_text:
        return [[piece] for piece in range(len(lengths))]
    bins: list[list[int]] = []
    open_bins: list[int] = []  # remaining room << 32 | bin, sorted: a bisect finds the tightest fit
    for piece in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):  # equal ones keep their order
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
    pieces: list[np.ndarray], bins: list[list[int]], *, width: int, pad: int, dtype, bos: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return (n, width) ids and (n,) used positions of the bins' pieces laid one after the other, each behind a `bos`
    where one is given."""
    rows = np.empty((len(bins), width), dtype=dtype)
    used = []
    for row, numbers in zip(rows, bins, strict=True):
        at = 0
        for number in numbers:
            if bos is not None:
                row[at] = bos
                at += 1
            piece = pieces[number]
            end = at + len(piece)
            row[at:end] = piece
            at = end
        row[at:] = pad
        used.append(at)
    return rows, np.array(used, dtype=np.int32)


def ragged(arrays: list[np.ndarray], dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return arrays of different lengths as one array, and their lengths; `unragged` takes them apart again."""
    lengths = np.fromiter(map(len, arrays), np.int64)
    # The empty array gives the type where there are no others.
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype), lengths


def unragged(flat: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    return np.split(flat, np.cumsum(lengths)[:-1]) if len(lengths) else []


class ConversationPacker:
    """Best fit with padding inside a block of rendered conversations, whose rows keep them apart; interface as
    Packer."""

    def __init__(self, *, row_tokens: int, pad: int, dtype, documents: int, one_text: bool = False):
        self.row_tokens, self.pad, self.dtype, self.documents = row_tokens, pad, np.dtype(dtype), documents
        self.one_text = one_text
        # The conversations of the block so far.
        self.ids: list[np.ndarray] = []
        self.trained: list[np.ndarray] = []
        self.origins: list[Origin] = []
        self.counts: dict[str, int] = {}

    def add(self, ids: list[int], trained: list[bool], origin: Origin) -> list[PackedRows]:
        self.ids.append(np.array(ids, dtype=self.dtype))
        self.trained.append(np.array(trained, dtype=bool))
        self.origins.append(origin)
        return self.finish() if len(self.ids) >= self.documents else []

    def finish(self) -> list[PackedRows]:
        if not self.ids:
            return []
        width = self.row_tokens + 1
        bins = best_fit(list(map(len, self.ids)), width, one_text=self.one_text)
        rows, used = fill_rows(self.ids, bins, width=width, pad=self.pad, dtype=self.dtype)
        trained, _ = fill_rows(self.trained, bins, width=width, pad=0, dtype=bool)
        starts = np.zeros(rows.shape, dtype=bool)
        for row, numbers in zip(starts, bins, strict=True):
            at = 0
            for number in numbers:
                row[at] = True
                at += len(self.ids[number])
            if at < width:
                row[at] = True  # the padding is a segment as well
        first = np.array([self.origins[numbers[0]] for numbers in bins], dtype=np.int32)
        self.ids, self.trained, self.origins = [], [], []
        return [PackedRows(rows, first, used, trained, starts)]

    def state(self) -> dict[str, np.ndarray]:
        flat, lengths = ragged(self.ids, self.dtype)
        masks, _ = ragged(self.trained, np.uint8)
        origins = np.array(self.origins, np.int32).reshape(-1, 3)
        return {"ids": flat, "lengths": lengths, "trained": masks, "origins": origins}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        self.ids = unragged(state["ids"], state["lengths"])
        self.trained = unragged(state["trained"].astype(bool), state["lengths"])
        self.origins = list(map(tuple, state["origins"].tolist()))


class Packer:
    """Base class of the packers. `counts` only grow: cropped_tokens (lost), split_documents (cut in two or more)."""

    def __init__(self, *, row_tokens: int, bos: int, pad: int, dtype, documents: int):
        self.row_tokens, self.documents = row_tokens, documents
        self.bos, self.pad, self.dtype = bos, pad, np.dtype(dtype)
        self.counts = {"cropped_tokens": 0, "split_documents": 0}

    def add(self, documents: list[tuple[np.ndarray, Origin]]) -> list[PackedRows]:
        """Return rows that are finished now. Of each document (n,) text tokens, n >= 1, no specials."""
        raise NotImplementedError

    def finish(self) -> list[PackedRows]:
        """Return the remaining rows; nothing may be added afterwards."""
        raise NotImplementedError

    def state(self) -> dict[str, np.ndarray]:
        raise NotImplementedError

    def restore(self, state: dict[str, np.ndarray]) -> None:
        raise NotImplementedError

    def with_bos(self, ids: np.ndarray) -> np.ndarray:
        piece = np.empty(len(ids) + 1, dtype=self.dtype)
        piece[0] = self.bos
        piece[1:] = ids
        return piece


def snapshot(packer: Any) -> Any:
    """Return a packer whose state() stays what it is now.

    The packer's own arrays and lists are copied; arrays in lists are never changed, and are shared.
    """
    held = copy.copy(packer)
    held.__dict__ = {k: snapshot(v) if isinstance(v, Packer) else copy.copy(v) for k, v in vars(packer).items()}
    return held


class CutAndFit(Packer):
    """Every document of a block cut into pieces, then best fit with padding. A cut piece fills its row, so the BOS
    that the model learns to predict always follows a real end of a document."""

    one_text = False

    def __init__(self, **settings):
        super().__init__(**settings)
        # The documents of the block so far.
        self.ids: list[np.ndarray] = []
        self.origins: list[Origin] = []

    def add(self, documents):
        rows = []
        for ids, origin in documents:
            self.ids.append(ids)
            self.origins.append(origin)
            if len(self.ids) >= self.documents:
                rows += self.finish()
        return rows

    def finish(self):
        if not self.ids:
            return []
        # Pieces of row_tokens: with its BOS, one that a document is cut at fills a row.
        pieces, origins = [], []
        for ids, origin in zip(self.ids, self.origins, strict=True):
            if len(ids) > self.row_tokens:
                self.counts["split_documents"] += 1
            for at in range(0, len(ids), self.row_tokens):
                pieces.append(ids[at : at + self.row_tokens])
                origins.append(origin)
        self.ids, self.origins = [], []
        width = self.row_tokens + 1
        bins = best_fit([len(piece) + 1 for piece in pieces], width, one_text=self.one_text)
        rows, used = fill_rows(pieces, bins, width=width, pad=self.pad, dtype=self.dtype, bos=self.bos)
        first = np.array([origins[numbers[0]] for numbers in bins], dtype=np.int32)
        return [PackedRows(rows, first, used)]

    def state(self):
        flat, lengths = ragged(self.ids, self.dtype)
        return {"ids": flat, "lengths": lengths, "origins": np.array(self.origins, np.int32).reshape(-1, 3)}

    def restore(self, state):
        self.ids = unragged(state["ids"], state["lengths"])
        self.origins = list(map(tuple, state["origins"].tolist()))


class OneText(CutAndFit):
    """Every piece in a row of its own, for models in which the documents of a row see each other."""

    one_text = True


class BestFitCrop(Packer):
    """nanochat's rule: every row full and beginning with BOS; what is cropped off a document is lost.

    The buffer is kept at exactly `documents` documents; a document is taken when it is full. nanochat refills it by
    128 when it is less full, so that its rows are others. It scans the buffer, here a sorted list and bisect find the
    same document. Only a source's very last row may end in padding.
    """

    def __init__(self, **settings):
        super().__init__(**settings)
        self.buffer: dict[int, tuple[np.ndarray, Origin]] = {}  # by arrival
        self.by_length: list[int] = []  # length with BOS << 40 | arrival, sorted
        self.arrivals = 0
        # Rows are full, so that pieces laid one after the other are rows: first those that add() or finish() is about
        # to return.
        self.laid: list[np.ndarray] = []
        self.first_origins: list[Origin] = []  # of each row that is begun
        self.room = self.row_tokens + 1  # of the row under construction
        self.bos_piece = np.array([self.bos], dtype=self.dtype)

    def add(self, documents):
        before = self.arrivals
        for ids, origin in documents:
            self.buffer[self.arrivals] = (ids, origin)
            insort(self.by_length, (len(ids) + 1) << 40 | self.arrivals)
            self.arrivals += 1
            if len(self.buffer) >= self.documents:
                self._take()
        rows = self._full_rows()
        # Ids are parts of the block's array: a document that waits long must not keep all of that in memory.
        for arrival in range(before, self.arrivals):
            if arrival in self.buffer:
                ids, origin = self.buffer[arrival]
                self.buffer[arrival] = (ids.copy(), origin)
        return rows

    def finish(self):
        while self.buffer:
            self._take()
        rows = self._full_rows()
        used = self.row_tokens + 1 - self.room
        if used >= 2:
            row = np.concatenate([*self.laid, np.full(self.room, self.pad, dtype=self.dtype)])
            rows.append(PackedRows(row[None], np.array(self.first_origins, np.int32), np.array([used], np.int32)))
            self.laid, self.first_origins, self.room = [], [], self.row_tokens + 1
        return rows

    def _take(self):
        """Put one document of the buffer into the row."""
        room, by_length = self.room, self.by_length
        fits = bisect_left(by_length, (room + 1) << 40)
        # Of the longest that fit, the first to arrive; when none fits, the shortest, again the first to arrive.
        at = bisect_left(by_length, by_length[fits - 1] >> 40 << 40) if fits else 0
        key = by_length.pop(at)
        length = key >> 40
        ids, origin = self.buffer.pop(key & ~(-1 << 40))
        if room == self.row_tokens + 1:
            self.first_origins.append(origin)
        if length > room:
            self.counts["cropped_tokens"] += length - room
            ids, length = ids[: room - 1], room
        self.laid += (self.bos_piece, ids)
        self.room = room - length or self.row_tokens + 1

    def _full_rows(self):
        if not self.laid:
            return []
        width = self.row_tokens + 1
        flat = np.concatenate(self.laid, dtype=self.dtype, casting="unsafe")
        count = len(flat) // width
        rows, rest = flat[: count * width].reshape(count, width), flat[count * width :]
        first = np.array(self.first_origins[:count], np.int32)
        # What is laid of the row under construction; without the copy it would hold the rows in memory.
        self.laid = [rest.copy()] if len(rest) else []
        self.first_origins = self.first_origins[count:]
        return [PackedRows(rows, first, np.full(count, width, np.int32))] if count else []

    def state(self):
        waiting = [self.buffer[arrival] for arrival in sorted(self.buffer)]
        flat, lengths = ragged([self.with_bos(ids) for ids, _ in waiting], self.dtype)
        # Last the origin of the row under construction, or of none.
        origins = [origin for _, origin in waiting] + (self.first_origins or [(0, 0, 0)])
        return {
            "ids": flat,
            "lengths": lengths,
            "origins": np.array(origins, np.int32),
            "row": np.concatenate([self.bos_piece[:0], *self.laid]),
        }

    def restore(self, state):
        *origins, first = map(tuple, state["origins"].tolist())
        pieces = [piece[1:] for piece in unragged(state["ids"], state["lengths"])]
        # Arrivals are renumbered: only their order matters.
        self.buffer = dict(enumerate(zip(pieces, origins, strict=True)))
        self.by_length = sorted((len(piece) + 1) << 40 | i for i, piece in enumerate(pieces))
        self.arrivals = len(pieces)
        self.room = self.row_tokens + 1 - len(state["row"])
        self.laid, self.first_origins = [], []
        if len(state["row"]):
            self.laid, self.first_origins = [state["row"]], [first]


class Concat(Packer):
    """One stream cut every row_tokens tokens; a row begins with the last token of the row before."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.rest = np.zeros(0, dtype=self.dtype)
        self.rest_origin: Origin = (0, 0, 0)

    def add(self, documents):
        if not documents:
            return []
        pieces = [self.rest, *(self.with_bos(ids) for ids, _ in documents)]
        origins = np.array([self.rest_origin, *(origin for _, origin in documents)], np.int32)
        stream, size = np.concatenate(pieces), self.row_tokens
        ends = np.cumsum([len(piece) for piece in pieces])
        count = max(0, len(stream) - 1) // size
        # A row that ends within a document splits it.
        self.counts["split_documents"] += int(((ends[1:] - 1) // size * size > ends[:-1]).sum())
        # Of what each row begins with, and the rest.
        first = origins[np.searchsorted(ends, np.arange(count + 1) * size, side="right")]
        self.rest, self.rest_origin = stream[count * size :].copy(), tuple(first[-1].tolist())
        if not count:
            return []
        rows = sliding_window_view(stream, size + 1)[::size]  # a view, in which rows overlap by one token
        return [PackedRows(rows.copy(), first[:-1], np.full(count, size + 1, np.int32))]

    def finish(self):
        if len(self.rest) < 2:
            return []
        # One token alone is no target of anything.
        row = np.full((1, self.row_tokens + 1), self.pad, dtype=self.dtype)
        row[0, : len(self.rest)] = self.rest
        used = np.array([len(self.rest)], np.int32)
        self.rest = self.rest[:0]
        return [PackedRows(row, np.array([self.rest_origin], np.int32), used)]

    def state(self):
        return {"rest": self.rest, "rest_origin": np.array(self.rest_origin, np.int32)}

    def restore(self, state):
        self.rest, self.rest_origin = state["rest"], tuple(state["rest_origin"].tolist())


PACKERS: dict[str, type[Packer]] = {
    "cut_and_fit": CutAndFit,
    "best_fit_crop": BestFitCrop,
    "concat": Concat,
    "one_text": OneText,
}


class BytesPacker:
    """Interface of Packer, with the bytes of text under every token as a third part of each document: for tokenizers
    whose ids have no fixed bytes."""

    def __init__(self, kind: type[Packer], *, bos: int, pad: int, dtype: str, **settings):
        self.ids = kind(bos=bos, pad=pad, dtype=dtype, **settings)
        self.lengths = kind(bos=NO_TEXT, pad=NO_TEXT, dtype="int32", **settings)

    @property
    def counts(self) -> dict[str, int]:
        return self.ids.counts

    @counts.setter
    def counts(self, counts: dict[str, int]) -> None:
        self.ids.counts = counts

    def add(self, documents: list[tuple[np.ndarray, Origin, np.ndarray]]) -> list[PackedRows]:
        lengths = self.lengths.add([(lengths, origin) for _, origin, lengths in documents])
        return _together(self.ids.add([(ids, origin) for ids, origin, _ in documents]), lengths)

    def finish(self) -> list[PackedRows]:
        return _together(self.ids.finish(), self.lengths.finish())

    def state(self) -> dict[str, np.ndarray]:
        return self.ids.state() | {f"bytes.{name}": array for name, array in self.lengths.state().items()}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        ids, lengths = {}, {}
        for name, array in state.items():
            if name.startswith("bytes."):
                lengths[name.removeprefix("bytes.")] = array
            else:
                ids[name] = array
        self.ids.restore(ids)
        self.lengths.restore(lengths)


def _together(ids: list[PackedRows], lengths: list[PackedRows]) -> list[PackedRows]:
    return [replace(rows, target_bytes=counts.input_ids) for rows, counts in zip(ids, lengths, strict=True)]
