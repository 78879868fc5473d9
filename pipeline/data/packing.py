"""Documents and conversations packed into rows, and the shards that are written of them one after the other."""

import copy
import hashlib
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from pipeline.data.losses import count_conversation, new_counts
from pipeline.data.stream import (
    FORMAT,
    NO_TEXT,
    documents_begun,
    end_path,
    map_tensors,
    read_seal,
    seal_path,
    shard_path,
    state_path,
)
from pipeline.data.workers import OUTCOMES, EncodedBlock, encode_block, safetensors_parts
from pipeline.process.errors import DataError
from pipeline.process.storage import remove_file, write_bytes, write_sealed_json

Item = TypeVar("Item")
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
        """(n,) int32 trained targets of each row; a row's first token is nobody's target."""
        return self.used - 1 if self.trained is None else self.trained[:, 1:].sum(1, dtype=np.int32)

    def __getitem__(self, rows: slice) -> "PackedRows":
        some: dict[str, Any] = {name: None if array is None else array[rows] for name, array in vars(self).items()}
        return PackedRows(**some)

    @classmethod
    def joined(cls, parts: list["PackedRows"]) -> "PackedRows":
        """Return one after the other; at least one part."""
        names = [name for name, array in vars(parts[0]).items() if array is not None]
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


# Rows under construction: pieces fitted into bins, bins laid out as arrays. T = row_tokens.


def best_fit(lengths: list[int], capacity: int, *, one_text: bool = False) -> list[list[int]]:
    """Bins of piece numbers: longest piece first, each into the fullest bin that still holds it.

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
    """Arrays of different lengths as one array and their lengths; `unragged` takes them apart again."""
    lengths = np.array([len(a) for a in arrays], dtype=np.int64)
    return (np.concatenate(arrays).astype(dtype) if arrays else np.zeros(0, dtype)), lengths


def unragged(flat: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    return np.split(flat, np.cumsum(lengths)[:-1]) if len(lengths) else []


# Conversations in, rows of isolated conversations out: whole turns only, never a row without a trained target.


class ConversationPacker:
    """Best fit with padding inside a block of conversations; interface as packing.Packer, fed rendered
    conversations."""

    def __init__(self, *, row_tokens: int, pad: int, dtype, documents: int, one_text: bool = False):
        self.row_tokens, self.pad, self.dtype, self.documents = row_tokens, pad, np.dtype(dtype), documents
        self.one_text = one_text
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
        bins = best_fit([len(p) for p in pieces], width, one_text=self.one_text)
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
        bins = best_fit([len(p) + 1 for p in pieces], width, one_text=self.one_text)
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
        for arrival in range(before, self.arrivals):
            if arrival in self.buffer:  # copied: one that waits long must not hold the whole block that it came in
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
        width, is_begun = self.row_tokens + 1, self.room <= self.row_tokens
        count = len(self.first_origins) - is_begun
        flat = np.concatenate(self.laid, dtype=self.dtype, casting="unsafe")
        rows, first = flat[: count * width].reshape(count, width), np.array(self.first_origins[:count], np.int32)
        self.laid, self.first_origins = [flat[count * width :].copy()] if is_begun else [], self.first_origins[count:]
        return [PackedRows(rows, first, np.full(count, width, np.int32))] if count else []

    def state(self):
        order = sorted(self.buffer)
        flat, lengths = ragged([self.with_bos(self.buffer[i][0]) for i in order], self.dtype)
        origins = [self.buffer[i][1] for i in order] + (self.first_origins or [(0, 0, 0)])
        return {
            "ids": flat,
            "lengths": lengths,
            "origins": np.array(origins, np.int32),
            "row": np.concatenate([self.bos_piece[:0], *self.laid]),
        }

    def restore(self, state):
        *origins, first = [tuple(o) for o in state["origins"].tolist()]
        pieces = [piece[1:] for piece in unragged(state["ids"], state["lengths"])]
        # Arrivals are renumbered: only their order matters.
        self.buffer = dict(enumerate(zip(pieces, origins, strict=True)))
        self.by_length = sorted((len(piece) + 1) << 40 | i for i, piece in enumerate(pieces))
        self.arrivals = len(pieces)
        self.room = self.row_tokens + 1 - len(state["row"])
        self.laid, self.first_origins = ([state["row"]], [first]) if len(state["row"]) else ([], [])


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


PACKERS: dict[str, type[Packer]] = {
    "cut_and_fit": CutAndFit,
    "best_fit_crop": BestFitCrop,
    "concat": Concat,
    "one_text": OneText,
}


# Rows that carry how many bytes of text each token covers, for tokenizers whose ids have no fixed bytes.


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


def made_ahead(items: Iterator[Item], thread: ThreadPoolExecutor, count: int) -> Iterator[Item]:
    """Yield the items while a thread makes up to `count` more. Raises what making an item raises, in its turn."""
    coming: deque[Future[Item | None]] = deque()
    while True:
        while len(coming) <= count:
            coming.append(thread.submit(next, items, None))
        item = coming.popleft().result()
        if item is None:
            return
        yield item


def shard_tensors(rows: PackedRows) -> dict[str, np.ndarray]:
    tensors = {"input_ids": rows.input_ids, "origins": rows.origins, "used": rows.used, "targets": rows.targets}
    if rows.trained is not None and rows.starts is not None:
        tensors |= {"trained": np.packbits(rows.trained, axis=1), "starts": np.packbits(rows.starts, axis=1)}
    if rows.target_bytes is not None:
        tensors["target_bytes"] = rows.target_bytes
    return tensors


def sha256_of(parts: list[bytes | memoryview]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def write_rows(folder: Path, number: int, rows: PackedRows) -> dict[str, Any]:
    """Write the file of a shard; return what its seal says of it."""
    parts = safetensors_parts(shard_tensors(rows))
    write_bytes(shard_path(folder, number), *parts)
    return {
        "format": FORMAT,
        "shard": number,
        "rows": len(rows),
        "positions": len(rows) * (rows.input_ids.shape[1] - 1),
        "targets": int(rows.targets.sum()),
        "padded": int(rows.input_ids.size - rows.used.sum()),
        "bytes": sum(map(len, parts)),
        "sha256": sha256_of(parts),
    }


# Makes a source's shards one after the other: the same bytes whether or not it was interrupted in between.
#
# Between two shards the whole state is: the packer before the block of documents that is being worked on, that block's
# place in the source, and how many of the rows it gives are already sealed. Going on reads and packs that block again.

STATES_KEPT_EVERY = 16  # a shard that was deleted is made again from the nearest earlier state
AHEAD = 2  # shards behind the one that is sealed next, in memory


@dataclass
class PackedShard:
    """A shard that is not sealed yet, and what of the source went into it. rows: None for what came behind the last
    shard."""

    rows: PackedRows | None
    before: Any  # packer before the block that is being worked on
    about: dict[str, Any]  # in the seal
    is_last: bool
    seen: list[Future]  # of the scanner
    used: list[Path]  # encoded blocks that are not needed once it is sealed
    written: Future[dict] | None = None  # its counts, where threads write it


class SequenceWriter:
    """One source packed into one folder of shards. settings: the packing part of the key (preparation.py)."""

    def __init__(
        self,
        folder: Path,
        *,
        source: Any,
        tokenizer: Any,
        settings: dict,
        num_proc: int | None = None,
        from_shard: int | None = None,
        watchlist: Any | None = None,
        ahead: Any | None = None,
    ):
        """Stands after the last sealed shard, or at or before `from_shard` to make that one again.

        ahead: gives the source's blocks as other processes encode them (workers.EncodedReader), which threads pack and
        write while the shard before is sealed; None: all is done here, one after the other.
        """
        self.folder, self.source, self.tokenizer, self.settings = Path(folder), source, tokenizer, settings
        self.num_proc, self.ahead = num_proc, ahead
        self.scanner = watchlist.scanner(self.folder) if watchlist is not None else None
        self.folder.mkdir(parents=True, exist_ok=True)
        for kind in ("safetensors", "json"):
            for torn in self.folder.glob(f".*.{kind}.*"):
                remove_file(torn)  # left by a process that was killed while it wrote
        self.packer = self._new_packer()
        self.read = new_counts(settings["kind"])
        self.bad_rows: list[str] = []
        self.wanted, self.skip = from_shard, 0
        unsealed = next(number for number in count() if not seal_path(self.folder, number).exists())
        self.number = unsealed if from_shard is None else from_shard
        if from_shard is None:
            self._forget_state(self.number - 2)  # of a process that was killed when it had sealed the next shard
        cursor = self._restore()
        self.num_packed = self.number
        self.shards = self._packed_shards(cursor)
        if ahead is not None:
            self.reading, self.packing, self.writing = (ThreadPoolExecutor(n) for n in (1, 1, AHEAD))
        self.coming: deque[Future[PackedShard | None]] = deque()

    def extend(self, *, ahead: int = 0) -> bool:
        """Seal one more shard; False when the source is used up, which is then sealed too.

        ahead: shards behind it that are needed too, of which up to AHEAD are packed meanwhile.
        """
        if self.ahead is None:
            shard = next(self.shards, None)
        else:
            while len(self.coming) <= min(ahead, AHEAD):
                self.coming.append(self.packing.submit(next, self.shards, None))
            shard = self.coming.popleft().result()
        if shard is not None and shard.rows is not None:
            self._seal(shard, shard.rows)
        if shard is not None and shard.is_last:
            read, bad_rows = shard.about["read"], [] if shard.rows is not None else shard.about["bad_rows"]
            write_sealed_json(end_path(self.folder), {"shards": self.number, "read": read, "bad_rows": bad_rows})
        return shard is not None and shard.rows is not None

    def close(self) -> None:
        """End the threads, and delete what they wrote that was not to be sealed."""
        if self.ahead is not None:
            self.ahead.closed = True
            for threads in (self.reading, self.packing, self.writing):
                threads.shutdown(cancel_futures=True)
            for number in range(self.number, self.num_packed):
                if not seal_path(self.folder, number).exists():
                    remove_file(shard_path(self.folder, number))

    def _packed_shards(self, start: dict) -> Iterator[PackedShard]:
        """Yield the shards from a cursor on; where the source goes on behind the last one, that without rows."""
        pending: list[PackedRows] = []
        for cursor, before, rows in self._packed_blocks(start):
            block_rows, self.skip = self.skip + sum(map(len, rows)), 0
            pending += rows
            if cursor["finishing"] and not sum(map(len, pending)):
                yield self._shard(None, before, cursor, is_last=True)
            while (left := sum(map(len, pending))) >= self.settings["shard_rows"] or (left and cursor["finishing"]):
                ready = PackedRows.joined(pending)
                ready, rest = ready[: self.settings["shard_rows"]], ready[self.settings["shard_rows"] :]
                pending = [rest] if len(rest) else []
                # Rows that are left over all come from the block that is being worked on: those before it went into
                # this shard.
                place = {**cursor, "skip": block_rows - len(rest)}
                yield self._shard(ready, before, place, is_last=cursor["finishing"] and not pending)

    def _shard(self, rows: PackedRows | None, before: Any, cursor: dict, *, is_last: bool) -> PackedShard:
        about = {
            "bad_rows": self.bad_rows,
            "read": copy.deepcopy({**self.read, **self.packer.counts}),
            "cursor": cursor,
        }
        self.bad_rows = []
        seen = self.scanner.take() if self.scanner else []
        used = self.ahead.take_used(cursor["file"], cursor["block"]) if self.ahead is not None else []
        shard = PackedShard(rows, before, about, is_last, seen, used)
        if self.ahead is not None and rows is not None and not seal_path(self.folder, self.num_packed).exists():
            shard.written = self.writing.submit(self._write, self.num_packed, rows)
        self.num_packed += rows is not None
        return shard

    def _write(self, number: int, rows: PackedRows) -> dict:
        """Write a shard's file; return the counts for its seal."""
        documents = documents_begun(rows.input_ids, rows.used, rows.starts, bos=self.settings["bos"])
        return {**write_rows(self.folder, number, rows), "documents": int(documents.sum())}

    def _seal(self, shard: PackedShard, rows: PackedRows) -> None:
        if self.scanner:
            self.scanner.seal(self.number, shard.seen)
        if seal_path(self.folder, self.number).exists():
            if self.number == self.wanted:  # The shards before it are only passed through.
                self._make_again(rows)
        else:
            write_bytes(state_path(self.folder, self.number), *safetensors_parts(shard.before.state()))
            counts = shard.written.result() if shard.written else self._write(self.number, rows)
            write_sealed_json(seal_path(self.folder, self.number), {**counts, **shard.about})
            self._forget_state(self.number - 1)
        for path in shard.used:
            remove_file(path)
        self.number += 1

    def _forget_state(self, number: int) -> None:
        if number > 0 and number % STATES_KEPT_EVERY:
            remove_file(state_path(self.folder, number))

    def _make_again(self, rows: PackedRows) -> None:
        """Restore the file of a shard whose seal is there; its bytes are those of the seal or the source has
        changed."""
        path = shard_path(self.folder, self.number)
        parts = safetensors_parts(shard_tensors(rows))
        if sha256_of(parts) != read_seal(self.folder, self.number)["sha256"]:
            raise DataError(
                f"{path}: made again, this shard differs from its seal, so source {self.source.name!r} no longer "
                f"gives what it gave before. Delete {self.folder} to prepare it anew; runs that used it cannot be "
                "continued exactly."
            )
        write_bytes(path, *parts)

    def _new_packer(self):
        s = self.settings
        common = {name: s[name] for name in ("row_tokens", "pad", "dtype")} | {"documents": s["packing_documents"]}
        if s["kind"] == "chat":
            return ConversationPacker(one_text=s.get("packing") == "one_text", **common)
        if s.get("target_bytes"):
            return BytesPacker(PACKERS[s["packing"]], bos=s["bos"], **common)
        return PACKERS[s["packing"]](bos=s["bos"], **common)

    def _restore(self) -> dict:
        """Cursor to go on at; the packer and the counts are set to what they were there."""
        while self.number > 0 and not state_path(self.folder, self.number - 1).exists():
            self.number -= 1
        self.resumed = self.number > 0
        if not self.resumed:
            return {"file": 0, "block": 0, "finishing": False}
        cursor = read_seal(self.folder, self.number - 1)["cursor"]
        state = map_tensors(state_path(self.folder, self.number - 1))
        self.packer.restore({name: array.copy() for name, array in state.items()})
        self.packer.counts, self.read, self.skip = dict(cursor["packed"]), dict(cursor["read"]), cursor["skip"]
        return cursor

    def _packed_blocks(self, cursor: dict) -> Iterator[tuple[dict, Any, list[PackedRows]]]:
        """Yield (cursor, packer before it, rows) of each block from the cursor on; last the rest that the packer
        holds."""
        place = {"file": cursor["file"], "block": cursor["block"]}
        again = self.resumed  # the first block was read before: its bad rows are named in the seal before
        if not cursor["finishing"]:
            for block in self._encoded_blocks(**place):
                place = {"file": block.file, "block": block.index}
                cursor, before = self._cursor(place, finishing=False), snapshot(self.packer)
                rows = self._pack(block)
                self.bad_rows += [] if again else block.bad_rows
                yield cursor, before, self._without_skipped(rows)
                again = False
                if self.is_full():
                    break
        cursor, before = self._cursor(place, finishing=True), snapshot(self.packer)
        if self.scanner:
            self.scanner.look([])
        yield cursor, before, self._without_skipped(self.packer.finish())

    def _encoded_blocks(self, *, file: int, block: int) -> Iterator[EncodedBlock]:
        """Yield the source's blocks from that cursor on: those of other processes, or else made here as they are asked
        for."""
        if self.ahead is not None:
            for encoded in made_ahead(self.ahead.read(file=file, block=block), self.reading, AHEAD):
                if self.scanner:
                    self.scanner.add(encoded.seen)
                yield encoded
            return
        for read in self.source.read(file=file, block=block):
            if self.scanner:
                self.scanner.look(read.items)
            yield encode_block(
                read, source=self.source, tokenizer=self.tokenizer, settings=self.settings, num_proc=self.num_proc
            )

    def _cursor(self, place: dict, *, finishing: bool) -> dict:
        return {**place, "finishing": finishing, "packed": dict(self.packer.counts), "read": copy.deepcopy(self.read)}

    def _without_skipped(self, rows: list[PackedRows]) -> list[PackedRows]:
        if not self.skip:
            return rows
        rest = PackedRows.joined(rows)[self.skip :]
        return [rest] if len(rest) else []

    def is_full(self) -> bool:
        limit = self.settings.get("limit_bytes")
        return limit is not None and self.read["text_bytes"] >= limit

    def _pack(self, block: EncodedBlock) -> list[PackedRows]:
        """Return the rows that the block finishes."""
        pack = pack_conversations if self.settings["kind"] == "chat" else pack_documents
        self.read["empty_rows"] += block.empty_rows
        return pack(self, block)


def pack_documents(writer: SequenceWriter, block: EncodedBlock) -> list[PackedRows]:
    assert block.text_bytes is not None
    read, limit, sizes = writer.read, writer.settings.get("limit_bytes"), block.text_bytes.cumsum()
    taken = len(sizes) if limit is None else int(np.searchsorted(sizes, limit - read["text_bytes"])) + 1
    lengths = block.lengths[:taken]
    read["documents"] += len(lengths)
    read["text_tokens"] += int(lengths.sum())
    read["text_bytes"] += int(sizes[:taken][-1]) if len(lengths) else 0
    read["empty_rows"] += int((lengths == 0).sum())
    flat = [block.ids] if block.target_bytes is None else [block.ids, block.target_bytes]
    arrays = zip(*map(block.each, flat), strict=True)
    documents = islice(zip(block.places(), arrays, strict=True), taken)
    return writer.packer.add([(ids, origin, *more) for origin, (ids, *more) in documents if len(ids)])


def pack_conversations(writer: SequenceWriter, block: EncodedBlock) -> list[PackedRows]:
    rows: list[PackedRows] = []
    assert block.trained is not None
    assert block.rendered is not None
    assert block.outcomes is not None
    counts = zip(block.rendered.tolist(), block.outcomes.tolist(), strict=True)
    arrays = zip(block.each(block.ids), block.each(block.trained), strict=True)
    for origin, (length, outcome), (ids, trained) in zip(block.places(), counts, arrays, strict=True):
        count_conversation(writer.read, length=length, kept=len(ids), outcome=OUTCOMES[outcome])
        if len(ids):
            rows += writer.packer.add(ids, trained, origin)
    return rows
