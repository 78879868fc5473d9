"""Packing documents and conversations into rows."""

import copy
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

# Rows under construction: pieces fitted into bins, bins laid out as arrays. T = row_tokens.

Origin = tuple[int, int, int]  # file, row group, row of a source


@dataclass
class PackedRows:
    """n finished rows."""

    input_ids: np.ndarray  # (n, T + 1) uint16 or uint32
    origins: np.ndarray  # (n, 3) int32: origin of the row's first piece
    used: np.ndarray  # (n,) int32: positions before the padding
    trained: np.ndarray | None = None  # (n, T + 1) bool: token is a target; conversations only
    starts: np.ndarray | None = None  # (n, T + 1) bool: token begins a conversation; conversations only
    target_bytes: np.ndarray | None = None  # (n, T + 1) int32: bytes of text under the token; where the rows carry them

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
        """Return one after the other; at least one part."""
        names = [name for name, array in parts[0].arrays().items() if array is not None]
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def documents_begun(input_ids: np.ndarray, used: np.ndarray, starts: np.ndarray | None, *, bos: int) -> np.ndarray:
    """(n,) how many conversations (starts, (n, T + 1) bool) or pieces of text (each begins with BOS) begin in each row.

    A document that packing cut in two or more counts with every piece. A row's last token is the next row's first under
    `concat`, so what begins there begins in the next row.
    """
    begins = input_ids == bos if starts is None else starts
    row, at = np.divmod(np.flatnonzero(begins), begins.shape[1])
    counts = at < np.minimum(used[row], begins.shape[1] - 1)  # padding may have the id of BOS, or a start
    return np.bincount(row[counts], minlength=len(begins))


def best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Bins of piece numbers: longest piece first, each into the fullest bin that still holds it.

    No length may exceed capacity. Equal lengths keep their order; of equally full bins the oldest is taken. Bins and the
    pieces in them are returned in the order of the pieces: by length, the first rows of a block would all be long documents.
    """
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
    """Return (n, width) ids and (n,) used positions of the bins' pieces laid one after the other, each behind a `bos` where one is given."""
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
    """Arrays of different lengths as one array and their lengths; `unragged` takes them apart again."""
    lengths = np.array([len(a) for a in arrays], dtype=np.int64)
    return (np.concatenate(arrays).astype(dtype) if arrays else np.zeros(0, dtype)), lengths


def unragged(flat: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    return np.split(flat, np.cumsum(lengths)[:-1]) if len(lengths) else []


# Conversations in, rows of isolated conversations out: whole turns only, never a row without a trained target.

Rendered = tuple[list[int], list[bool]]
Render = Callable[[list[dict]], Rendered]


def fit_conversation(messages: list[dict], rendered: Rendered, render: Render, *, capacity: int, overflow: str):
    """(ids, trained, outcome) of a conversation that fits `capacity` ids and trains at least one; ids is None when dropped.

    rendered: the whole conversation. outcome: whole | cut (ends at its last assistant turn that fits) | too_long | no_target.
    """
    ids, trained = rendered
    if not any(trained):
        return None, None, "no_target"
    if len(ids) <= capacity:
        return ids, trained, "whole"
    if overflow == "drop":
        return None, None, "too_long"
    ends = [i + 1 for i, message in enumerate(messages) if message["role"] == "assistant"]
    low, high, best = 0, len(ends), None
    while low < high:  # lengths grow with the turns: the largest end that fits
        middle = (low + high) // 2
        ids, trained = render(messages[: ends[middle]])
        if len(ids) <= capacity:
            best, low = (ids, trained), middle + 1
        else:
            high = middle
    if best is None or not any(best[1]):
        return None, None, "too_long"
    return *best, "cut"


READ_COUNTS = {
    "text": ("documents", "text_tokens", "text_bytes", "empty_rows"),
    "chat": ("conversations", "text_tokens", "empty_rows", "cut", "too_long", "no_target", "cut_tokens", "too_long_tokens"),
}  # fmt: skip
LENGTH_STEP = 64  # Tokens: finer advice on the length of a row is of no use, and the counts stay few.


def new_counts(kind: str) -> dict[str, Any]:
    """Return what is counted while a source is read, all 0. `longer` of conversations: by row length, those that need it."""
    return {**dict.fromkeys(READ_COUNTS[kind], 0), **({"longer": {}} if kind == "chat" else {})}


def count_conversation(counts: dict[str, Any], *, length: int, kept: int, outcome: str) -> None:
    """Add a conversation of `length` ids of which `kept` are trained, with the outcome of fit_conversation."""
    counts["conversations"] += 1
    counts["text_tokens"] += kept
    if outcome == "whole":
        return
    counts[outcome] += 1
    # Counts that an earlier version began have no lengths: those of a part would be taken for those of the whole.
    if outcome != "no_target" and "longer" in counts:
        counts[f"{outcome}_tokens"] += length - kept
        row = str(-(-(length - 1) // LENGTH_STEP) * LENGTH_STEP)
        counts["longer"][row] = counts["longer"].get(row, 0) + 1


class ConversationPacker:
    """Best fit with padding inside a block of conversations; interface as packing.Packer, fed rendered conversations."""

    def __init__(self, *, row_tokens: int, pad: int, dtype, documents: int):
        self.row_tokens, self.pad, self.dtype, self.documents = row_tokens, pad, np.dtype(dtype), documents
        self.block: list[tuple[np.ndarray, np.ndarray, Origin]] = []
        self.counts: dict[str, int] = {}

    def add(self, ids: list[int], trained: list[bool], origin: Origin) -> list[PackedRows]:
        self.block.append((np.array(ids, dtype=self.dtype), np.array(trained, dtype=bool), origin))
        return self.finish() if len(self.block) >= self.documents else []

    def finish(self) -> list[PackedRows]:
        if not self.block:
            return []
        pieces = [ids for ids, _, _ in self.block]
        masks = [trained for _, trained, _ in self.block]
        origins = [origin for _, _, origin in self.block]
        self.block = []
        width = self.row_tokens + 1
        bins = best_fit([len(p) for p in pieces], width)
        rows, used = fill_rows(pieces, bins, width=width, pad=self.pad, dtype=self.dtype)
        trained, _ = fill_rows(masks, bins, width=width, pad=0, dtype=bool)
        starts = np.zeros(rows.shape, dtype=bool)
        for row, numbers in zip(starts, bins, strict=True):
            at = 0
            for number in numbers:
                row[at] = True
                at += len(pieces[number])
            if at < width:
                row[at] = True  # the padding is a segment of its own
        first = np.array([origins[numbers[0]] for numbers in bins], dtype=np.int32)
        return [PackedRows(rows, first, used, trained, starts)]

    def state(self) -> dict[str, np.ndarray]:
        flat, lengths = ragged([ids for ids, _, _ in self.block], self.dtype)
        masks, _ = ragged([trained for _, trained, _ in self.block], np.uint8)
        origins = np.array([origin for _, _, origin in self.block], np.int32).reshape(-1, 3)
        return {"ids": flat, "lengths": lengths, "trained": masks, "origins": origins}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        ids = unragged(state["ids"], state["lengths"])
        masks = [mask.astype(bool) for mask in unragged(state["trained"], state["lengths"])]
        origins = [tuple(o) for o in state["origins"].tolist()]
        self.block = list(zip(ids, masks, origins, strict=True))


# Tokenized documents in, rows of row_tokens + 1 ids out: three ways to pack.


class Packer:
    """Base class of the packers. `counts` only grow: cropped_tokens (lost), split_documents (cut in two or more)."""

    def __init__(self, *, row_tokens: int, bos: int, pad: int, dtype, documents: int):
        self.row_tokens, self.bos, self.pad, self.dtype, self.documents = (
            row_tokens,
            bos,
            pad,
            np.dtype(dtype),
            documents,
        )
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
    """Every document of a block cut into pieces, then best fit with padding. A cut piece fills its row, so the BOS that
    the model learns to predict always follows a real end of a document."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.block: list[tuple[np.ndarray, Origin]] = []

    def add(self, documents):
        rows = []
        while documents:
            room = self.documents - len(self.block)
            self.block += documents[:room]
            documents = documents[room:]
            if len(self.block) >= self.documents:
                rows += self.finish()
        return rows

    def finish(self):
        if not self.block:
            return []
        pieces, origins = [], []
        for ids, origin in self.block:
            self.counts["split_documents"] += len(ids) > self.row_tokens
            for at in range(0, len(ids), self.row_tokens):
                pieces.append(ids[at : at + self.row_tokens])
                origins.append(origin)
        self.block = []
        width = self.row_tokens + 1
        bins = best_fit([len(p) + 1 for p in pieces], width)
        rows, used = fill_rows(pieces, bins, width=width, pad=self.pad, dtype=self.dtype, bos=self.bos)
        first = np.array([origins[numbers[0]] for numbers in bins], dtype=np.int32)
        return [PackedRows(rows, first, used)]

    def state(self):
        flat, lengths = ragged([ids for ids, _ in self.block], self.dtype)
        return {
            "ids": flat,
            "lengths": lengths,
            "origins": np.array([o for _, o in self.block], np.int32).reshape(-1, 3),
        }

    def restore(self, state):
        origins = [tuple(o) for o in state["origins"].tolist()]
        self.block = list(zip(unragged(state["ids"], state["lengths"]), origins, strict=True))


class BestFitCrop(Packer):
    """nanochat's rule: every row full and beginning with BOS; what is cropped off a document is lost.

    The buffer is kept at exactly `documents` documents; a document is taken when it is full. nanochat refills it by 128 when it
    is less full, so that its rows are others. It scans the buffer, here a sorted list and bisect find the same document. Only a
    source's very last row may end in padding.
    """

    def __init__(self, **settings):
        super().__init__(**settings)
        self.buffer: dict[int, tuple[np.ndarray, Origin]] = {}  # by arrival
        self.by_length: list[tuple[int, int]] = []  # (length, arrival), sorted
        self.arrivals = 0
        self.finished: list[tuple[np.ndarray, Origin, int]] = []  # rows that add() or finish() is about to return
        self._new_row()

    def _new_row(self):
        self.row, self.at, self.row_origin = np.full(self.row_tokens + 1, self.pad, dtype=self.dtype), 0, (0, 0, 0)

    def add(self, documents):
        for ids, origin in documents:
            piece = self.with_bos(ids)
            self.buffer[self.arrivals] = (piece, origin)
            insort(self.by_length, (len(piece), self.arrivals))
            self.arrivals += 1
            if len(self.buffer) >= self.documents:
                self._take()
        return self._finished_rows()

    def finish(self):
        while self.buffer:
            self._take()
        if self.at >= 2:
            self._finish_row()
        return self._finished_rows()

    def _take(self):
        """Put one document of the buffer into the row."""
        room = self.row_tokens + 1 - self.at
        fits = bisect_right(self.by_length, (room, self.arrivals))
        # Of the longest that fit, the first to arrive; when none fits, the shortest, again the first to arrive.
        at = bisect_left(self.by_length, (self.by_length[fits - 1][0], -1)) if fits else 0
        length, arrival = self.by_length.pop(at)
        piece, origin = self.buffer.pop(arrival)
        self.counts["cropped_tokens"] += max(0, length - room)
        if self.at == 0:
            self.row_origin = origin
        self.row[self.at : self.at + length] = piece[:room]
        self.at = min(self.at + length, self.row_tokens + 1)
        if self.at == self.row_tokens + 1:
            self._finish_row()

    def _finish_row(self):
        self.finished.append((self.row, self.row_origin, self.at))
        self._new_row()

    def _finished_rows(self):
        if not self.finished:
            return []
        rows, origins, used = zip(*self.finished, strict=True)
        self.finished = []
        return [PackedRows(np.stack(rows), np.array(origins, np.int32), np.array(used, np.int32))]

    def state(self):
        order = sorted(self.buffer)
        flat, lengths = ragged([self.buffer[i][0] for i in order], self.dtype)
        origins = [self.buffer[i][1] for i in order] + [self.row_origin]
        return {
            "ids": flat,
            "lengths": lengths,
            "origins": np.array(origins, np.int32),
            "row": self.row[: self.at].copy(),
        }

    def restore(self, state):
        *origins, self.row_origin = [tuple(o) for o in state["origins"].tolist()]
        pieces = unragged(state["ids"], state["lengths"])
        # Arrivals are renumbered: only their order matters.
        self.buffer = dict(enumerate(zip(pieces, origins, strict=True)))
        self.by_length = sorted((len(piece), i) for i, piece in enumerate(pieces))
        self.arrivals = len(pieces)
        row_origin = self.row_origin
        self._new_row()
        self.at, self.row_origin = len(state["row"]), row_origin
        self.row[: self.at] = state["row"]


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
        rows = sliding_window_view(stream, size + 1)[::size] if count else stream[:0]
        return [PackedRows(rows.copy(), first[:-1], np.full(count, size + 1, np.int32))] if count else []

    def finish(self):
        if len(self.rest) < 2:
            return []
        row = np.full((1, self.row_tokens + 1), self.pad, dtype=self.dtype)
        row[0, : len(self.rest)] = self.rest
        used = np.array([len(self.rest)], np.int32)
        self.rest = self.rest[:0]
        return [PackedRows(row, np.array([self.rest_origin], np.int32), used)]

    def state(self):
        return {"rest": self.rest, "rest_origin": np.array(self.rest_origin, np.int32)}

    def restore(self, state):
        self.rest, self.rest_origin = state["rest"], tuple(state["rest_origin"].tolist())


PACKERS: dict[str, type[Packer]] = {"cut_and_fit": CutAndFit, "best_fit_crop": BestFitCrop, "concat": Concat}


# Rows that carry how many bytes of text each token covers, for tokenizers whose ids have no fixed bytes.

NO_TEXT = -1


class BytesPacker:
    """Interface of Packer, with the bytes of every token as a third part of each document."""

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
        self.ids.restore({name: array for name, array in state.items() if not name.startswith("bytes.")})
        self.lengths.restore({n.removeprefix("bytes."): array for n, array in state.items() if n.startswith("bytes.")})


def _together(ids: list[PackedRows], lengths: list[PackedRows]) -> list[PackedRows]:
    return [replace(rows, target_bytes=counts.input_ids) for rows, counts in zip(ids, lengths, strict=True)]
