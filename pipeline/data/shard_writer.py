"""Makes a source's shards one after the other: the same bytes whether or not it was interrupted in between.

Between two shards the whole state is: the packer before the block of documents that is being worked on, that block's
place in the source, and how many of the rows it gives are already sealed. Going on reads and packs that block again.
"""

import copy
import hashlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.data.encoded import OUTCOMES, EncodedBlock, encode_block
from pipeline.data.packing import (
    PACKERS,
    BytesPacker,
    ConversationPacker,
    PackedRows,
    count_conversation,
    documents_begun,
    new_counts,
    snapshot,
)
from pipeline.data.shards import (
    end_path,
    map_tensors,
    read_seal,
    safetensors_bytes,
    seal_path,
    shard_path,
    shard_tensors,
    state_path,
    write_shard,
)
from pipeline.process.errors import DataError
from pipeline.process.storage import remove_file, write_bytes, write_sealed_json

STATES_KEPT_EVERY = 16  # a shard that was deleted is made again from the nearest earlier state


class SequenceWriter:
    """One source packed into one folder of shards. settings: the packing part of the key (plan.py)."""

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

        ahead: gives the source's blocks as other processes encode them (workers.EncodedReader); None: they are encoded here.
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
        self.pending: list[PackedRows] = []
        self.bad_rows: list[str] = []
        self.wanted, self.skip = from_shard, 0
        self.number = self._first_unsealed() if from_shard is None else from_shard
        self.blocks = self._packed_blocks(self._restore())

    def extend(self) -> bool:
        """Seal one more shard; False when the source is used up, which is then sealed too."""
        shard_rows = self.settings["shard_rows"]
        while sum(map(len, self.pending)) < shard_rows:
            packed = next(self.blocks, None)
            if packed is None:
                break
            self.cursor, self.before, rows = packed
            self.block_rows = self.skip + sum(map(len, rows))
            self.skip = 0
            self.pending += rows
        if not sum(map(len, self.pending)):
            self._write_end()
            return False
        ready = PackedRows.joined(self.pending)
        self.pending = [ready[shard_rows:]] if len(ready) > shard_rows else []
        self._seal(ready[:shard_rows])
        if not self.pending and self.cursor["finishing"]:
            self._write_end()
        return True

    def _seal(self, rows: PackedRows) -> None:
        # Rows that are left over all come from the block that is being worked on: those before it went into this shard.
        cursor = {**self.cursor, "skip": self.block_rows - sum(map(len, self.pending))}
        documents = documents_begun(rows.input_ids, rows.used, rows.starts, bos=self.settings["bos"])
        counts = {
            "documents": int(documents.sum()),
            "bad_rows": self.bad_rows,
            "read": self._counts(),
            "cursor": cursor,
        }
        self.bad_rows = []
        if self.scanner:
            self.scanner.seal(self.number)
        if seal_path(self.folder, self.number).exists():
            if self.number == self.wanted:  # The shards before it are only passed through.
                self._make_again(rows)
        else:
            write_bytes(state_path(self.folder, self.number), safetensors_bytes(self.before.state()))
            write_shard(self.folder, self.number, rows, counts)
            if self.number and (self.number - 1) % STATES_KEPT_EVERY:
                remove_file(state_path(self.folder, self.number - 1))
            if self.ahead is not None:
                self.ahead.forget()
        self.number += 1

    def _make_again(self, rows: PackedRows) -> None:
        """Restore the file of a shard whose seal is there; its bytes are those of the seal or the source has changed."""
        path = shard_path(self.folder, self.number)
        content = safetensors_bytes(shard_tensors(rows))
        if hashlib.sha256(content).hexdigest() != read_seal(self.folder, self.number)["sha256"]:
            raise DataError(
                f"{path}: made again, this shard differs from its seal, so source {self.source.name!r} no longer gives what it "
                f"gave before. Delete {self.folder} to prepare it anew; runs that used it cannot be continued exactly."
            )
        write_bytes(path, content)

    def _write_end(self) -> None:
        # The last seal counts what was read up to it; blocks after it gave no row.
        write_sealed_json(
            end_path(self.folder),
            {"shards": self.number, "read": self._counts(), "bad_rows": self.bad_rows},
        )
        self.bad_rows = []

    def _counts(self) -> dict[str, Any]:
        return copy.deepcopy({**self.read, **self.packer.counts})

    def _first_unsealed(self) -> int:
        number = 0
        while seal_path(self.folder, number).exists():
            number += 1
        return number

    def _new_packer(self):
        s = self.settings
        common = {
            "row_tokens": s["row_tokens"],
            "pad": s["pad"],
            "dtype": s["dtype"],
            "documents": s["packing_documents"],
        }
        if s["kind"] == "chat":
            return ConversationPacker(**common)
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
        """Yield (cursor, packer before it, rows) of each block from the cursor on; last the rest that the packer holds."""
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
        """Yield the source's blocks from that cursor on: those of other processes, or else made here as they are asked for."""
        if self.ahead is not None:
            for encoded in self.ahead.read(file=file, block=block):
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
