"""Tokenized documents in, rows of row_tokens + 1 ids out: three ways to pack.

A piece is BOS + at most row_tokens text tokens, so it fits a row, and each text token of it is a target exactly once.
Padding stands only at a row's end. T = row_tokens.

cut_and_fit     long documents cut into pieces, best fit with padding inside a block of documents; no token is lost
best_fit_crop   nanochat's: the largest document of a buffer that fits, else the shortest is cropped to fill the row
concat          one endless stream BOS doc BOS doc ..., cut every T tokens (rows share one token, so none is lost)

A packer is fed documents in order and is a pure function of them: `state()` between two documents is all there is to it.
"""

from bisect import bisect_left, bisect_right, insort

import numpy as np

from pipeline.data.packing import Origin, PackedRows, best_fit, fill_rows, ragged, unragged


class Packer:
    """What the packers share. `counts` only grow: cropped_tokens (lost), split_documents (cut in two or more)."""

    def __init__(self, *, row_tokens: int, bos: int, pad: int, dtype, documents: int):
        self.row_tokens, self.bos, self.pad, self.dtype, self.documents = (
            row_tokens,
            bos,
            pad,
            np.dtype(dtype),
            documents,
        )
        self.counts = {"cropped_tokens": 0, "split_documents": 0}

    def add(self, ids: np.ndarray, origin: Origin) -> list[PackedRows]:
        """Rows that are finished now. ids: (n,) text tokens of one document, n >= 1, no specials."""
        raise NotImplementedError

    def finish(self) -> list[PackedRows]:
        """The remaining rows; nothing may be added afterwards."""
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


class CutAndFit(Packer):
    """Every document of a block cut into pieces, then best fit with padding. A cut piece fills its row, so the BOS that
    the model learns to predict always follows a real end of a document."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.block: list[tuple[np.ndarray, Origin]] = []

    def add(self, ids, origin):
        self.block.append((np.asarray(ids, dtype=self.dtype), origin))
        return self.finish() if len(self.block) >= self.documents else []

    def finish(self):
        if not self.block:
            return []
        pieces, origins = [], []
        for ids, origin in self.block:
            self.counts["split_documents"] += len(ids) > self.row_tokens
            for at in range(0, len(ids), self.row_tokens):
                pieces.append(self.with_bos(ids[at : at + self.row_tokens]))
                origins.append(origin)
        self.block = []
        width = self.row_tokens + 1
        bins = best_fit([len(p) for p in pieces], width)
        rows, used = fill_rows(pieces, bins, width=width, pad=self.pad, dtype=self.dtype)
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
        self._new_row()

    def _new_row(self):
        self.row, self.at, self.row_origin = np.full(self.row_tokens + 1, self.pad, dtype=self.dtype), 0, (0, 0, 0)

    def add(self, ids, origin):
        piece = self.with_bos(ids)
        self.buffer[self.arrivals] = (piece, origin)
        insort(self.by_length, (len(piece), self.arrivals))
        self.arrivals += 1
        return self._take() if len(self.buffer) >= self.documents else []

    def finish(self):
        rows = []
        while self.buffer:
            rows += self._take()
        if self.at >= 2:
            rows.append(self._finished())
        return rows

    def _take(self):
        """Put one document of the buffer into the row; the row in a list when that fills it."""
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
        return [self._finished()] if self.at == self.row_tokens + 1 else []

    def _finished(self):
        done = PackedRows(self.row[None], np.array([self.row_origin], np.int32), np.array([self.at], np.int32))
        self._new_row()
        return done

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

    def add(self, ids, origin):
        if not len(self.rest):
            self.rest_origin = origin
        before, size = len(self.rest), self.row_tokens
        stream = np.concatenate([self.rest, self.with_bos(ids)])
        rows = (len(stream) - 1) // size
        self.counts["split_documents"] += rows > 0 and before < rows * size
        if rows == 0:
            self.rest = stream
            return []
        ids_out = np.stack([stream[i * size : i * size + size + 1] for i in range(rows)])
        origins = np.array([self.rest_origin] + [origin] * (rows - 1), np.int32)
        self.rest, self.rest_origin = stream[rows * size :], origin
        return [PackedRows(ids_out, origins, np.full(rows, size + 1, np.int32))]

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
