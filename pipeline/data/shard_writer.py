"""A source's shards, written one after the other: the same bytes whether or not it was interrupted in between.

Between two shards the whole state is the packer as it was before the block of documents that is being worked on, that
block's place in the source, and how many of the rows that it gives are sealed. To continue, that block is read and
packed again.
"""

import copy
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from pipeline.data.encoding import OUTCOMES, EncodedBlock, encode_block
from pipeline.data.losses import count_conversation, new_counts
from pipeline.data.packing import PACKERS, BytesPacker, ConversationPacker, PackedRows, snapshot
from pipeline.data.shards import (
    FORMAT,
    documents_begun,
    end_path,
    map_tensors,
    read_seal,
    seal_path,
    shard_path,
    state_path,
)
from pipeline.process.errors import DataError
from pipeline.process.storage import remove_file, write_bytes, write_sealed_json

STATES_KEPT_EVERY = 16  # a shard that was deleted is made again from the nearest earlier state


def shard_content(rows: PackedRows) -> bytes:
    """Return the bytes of a shard's file."""
    tensors = {"input_ids": rows.input_ids, "origins": rows.origins, "used": rows.used, "targets": rows.targets}
    if rows.trained is not None and rows.starts is not None:
        tensors["trained"] = np.packbits(rows.trained, axis=1)
        tensors["starts"] = np.packbits(rows.starts, axis=1)
    if rows.target_bytes is not None:
        tensors["target_bytes"] = rows.target_bytes
    return save(tensors)


def write_rows(folder: Path, number: int, rows: PackedRows) -> dict[str, Any]:
    """Write the file of a shard; return what its seal says of it."""
    content = shard_content(rows)
    write_bytes(shard_path(folder, number), content)
    return {
        "format": FORMAT,
        "shard": number,
        "rows": len(rows),
        "positions": len(rows) * (rows.input_ids.shape[1] - 1),
        "targets": int(rows.targets.sum()),
        "padded": int(rows.input_ids.size - rows.used.sum()),
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


@dataclass
class PackedShard:
    """A shard that is not sealed yet. rows: empty for what came behind the last shard. before: the packer before the
    block at the cursor."""

    rows: PackedRows | None
    before: Any
    cursor: dict[str, Any]
    is_last: bool


class ShardWriter:
    """One source packed into one folder of shards. settings: those in the plan of its shards."""

    def __init__(
        self,
        folder: Path,
        *,
        source: Any,
        tokenizer: Any,
        settings: dict,
        num_proc: int | None = None,
        from_shard: int | None = None,
        encoded: Any | None = None,
        watchlist: Any | None = None,
    ):
        """Continue after the last sealed shard, or at `from_shard`, which is made again.

        encoded: gives the source's blocks as other processes encode them (workers.EncodedReader); None: they are
        encoded here. watchlist: for which the text is searched; what is found is kept before the shard is sealed.
        """
        self.folder, self.source, self.tokenizer, self.settings = Path(folder), source, tokenizer, settings
        self.num_proc, self.encoded, self.wanted = num_proc, encoded, from_shard
        self.watchlist = watchlist
        self.seen: list[np.ndarray] = []  # of the blocks since the last shard, with the one that it ended in
        self.folder.mkdir(parents=True, exist_ok=True)
        for kind in ("safetensors", "json"):
            for torn in self.folder.glob(f".*.{kind}.*"):
                remove_file(torn)  # left by a process that was killed while it wrote
        self.packer = self._new_packer()
        self.read = new_counts(settings["kind"])
        self.bad_rows: list[str] = []
        self.skip = 0  # rows of the first block that are sealed
        if from_shard is None:
            self.number = 0
            while seal_path(self.folder, self.number).exists():
                self.number += 1
            self._forget_state(self.number - 2)  # of a process that was killed when it had sealed the next shard
        else:
            self.number = from_shard
        self.shards = self._packed_shards(self._restore())

    def extend(self) -> bool:
        """Seal one more shard; return False when the source is used up, which is then sealed too."""
        shard = next(self.shards, None)
        if shard is None:
            return False
        about = {"bad_rows": self.bad_rows, "read": {**self.read, **self.packer.counts}, "cursor": shard.cursor}
        if shard.rows is not None:
            self._seal(shard, shard.rows, about)
            self.bad_rows = []
        if shard.is_last:
            end = {"shards": self.number, "read": about["read"], "bad_rows": self.bad_rows}
            write_sealed_json(end_path(self.folder), end)
        return shard.rows is not None

    def _seal(self, shard: PackedShard, rows: PackedRows, about: dict[str, Any]) -> None:
        if self.watchlist is not None:
            self.watchlist.write_seen(self.folder, self.number, self.seen)
            self.seen = self.seen[-1:]  # rows of the last block may continue in the next shard
        if seal_path(self.folder, self.number).exists():
            if self.number == self.wanted:  # the shards before it are only passed through
                self._make_again(rows)
        else:
            # The state, the rows, then the seal: a process that is killed in between leaves no seal, and what it wrote
            # is written again.
            write_bytes(state_path(self.folder, self.number), save(shard.before.state()))
            documents = documents_begun(rows.input_ids, rows.used, rows.starts, bos=self.settings["bos"])
            counts = {**write_rows(self.folder, self.number, rows), "documents": int(documents.sum())}
            write_sealed_json(seal_path(self.folder, self.number), {**counts, **about})
            self._forget_state(self.number - 1)
        if self.encoded is not None:
            self.encoded.discard(shard.cursor["file"], shard.cursor["block"])
        self.number += 1

    def _make_again(self, rows: PackedRows) -> None:
        """Restore the file of a shard whose seal is there; its bytes are those of the seal, or the source has
        changed."""
        path, content = shard_path(self.folder, self.number), shard_content(rows)
        if hashlib.sha256(content).hexdigest() != read_seal(self.folder, self.number)["sha256"]:
            raise DataError(
                f"{path}: source {self.source.name!r} no longer gives the rows of this shard. Delete {self.folder} to "
                "prepare it anew; runs that used it cannot be continued exactly."
            )
        write_bytes(path, content)

    def _forget_state(self, number: int) -> None:
        if number > 0 and number % STATES_KEPT_EVERY:
            remove_file(state_path(self.folder, number))

    def _packed_shards(self, start: dict) -> Iterator[PackedShard]:
        """Yield the shards from a cursor on; where the source continues behind the last one, that without rows."""
        shard_rows = self.settings["shard_rows"]
        pending: list[PackedRows] = []
        for cursor, before, rows in self._packed_blocks(start):
            num_rows = self.skip + sum(map(len, rows))
            self.skip = 0
            pending += rows
            is_end = cursor["finishing"]
            left = sum(map(len, pending))
            if is_end and not left:
                yield PackedShard(None, before, cursor, is_last=True)
            while left >= shard_rows or (left and is_end):
                joined = PackedRows.joined(pending)
                rest = joined[shard_rows:]
                left = len(rest)
                pending = [rest] if left else []
                # Rows that are left over all come from the block that is being worked on: those before it went into
                # this shard.
                yield PackedShard(
                    joined[:shard_rows], before, {**cursor, "skip": num_rows - left}, is_last=is_end and not left
                )

    def _packed_blocks(self, cursor: dict) -> Iterator[tuple[dict, Any, list[PackedRows]]]:
        """Yield (cursor, packer before it, rows) of each block from the cursor on; last the rest that the packer
        holds."""
        place = {"file": cursor["file"], "block": cursor["block"]}
        again = self.number > 0  # the first block was read before: its bad rows are named in the seal before
        if not cursor["finishing"]:
            for block in self._encoded_blocks(**place):
                place = {"file": block.file, "block": block.index}
                cursor, before = self._cursor(place, finishing=False), snapshot(self.packer)
                rows = self._pack(block)
                if block.seen is not None:
                    self.seen.append(block.seen)
                if not again:
                    self.bad_rows += block.bad_rows
                yield cursor, before, self._without_skipped(rows)
                again = False
                if self._is_full():
                    break
        cursor, before = self._cursor(place, finishing=True), snapshot(self.packer)
        self.seen.append(np.zeros(0, np.uint64))  # what the packer still holds was searched before
        yield cursor, before, self._without_skipped(self.packer.finish())

    def _encoded_blocks(self, *, file: int, block: int) -> Iterator[EncodedBlock]:
        if self.encoded is not None:
            yield from self.encoded.read(file=file, block=block)
            return
        for read in self.source.read(file=file, block=block):
            yield encode_block(
                read,
                source=self.source,
                tokenizer=self.tokenizer,
                settings=self.settings,
                num_proc=self.num_proc,
                watchlist=self.watchlist,
            )

    def _cursor(self, place: dict, *, finishing: bool) -> dict:
        packed, read = dict(self.packer.counts), copy.deepcopy(self.read)
        return {**place, "finishing": finishing, "packed": packed, "read": read}

    def _without_skipped(self, rows: list[PackedRows]) -> list[PackedRows]:
        if not self.skip:
            return rows
        rest = PackedRows.joined(rows)[self.skip :]
        return [rest] if len(rest) else []

    def _is_full(self) -> bool:
        limit = self.settings.get("limit_bytes")
        return limit is not None and self.read["text_bytes"] >= limit

    def _new_packer(self) -> Any:
        s = self.settings
        common = {name: s[name] for name in ("row_tokens", "pad", "dtype")} | {"documents": s["packing_documents"]}
        if s["kind"] == "chat":
            return ConversationPacker(one_text=s.get("packing") == "one_text", **common)
        if s.get("target_bytes"):
            return BytesPacker(PACKERS[s["packing"]], bos=s["bos"], **common)
        return PACKERS[s["packing"]](bos=s["bos"], **common)

    def _restore(self) -> dict:
        """Return the cursor to continue at; the packer and the counts are set to what they were there."""
        # The nearest state before: the shards from there on are packed again, and those that are sealed passed over.
        while self.number > 0 and not state_path(self.folder, self.number - 1).exists():
            self.number -= 1
        if self.number == 0:
            return {"file": 0, "block": 0, "finishing": False}
        cursor = read_seal(self.folder, self.number - 1)["cursor"]
        state = map_tensors(state_path(self.folder, self.number - 1))
        self.packer.restore({name: array.copy() for name, array in state.items()})
        self.packer.counts, self.read, self.skip = dict(cursor["packed"]), dict(cursor["read"]), cursor["skip"]
        return cursor

    def _pack(self, block: EncodedBlock) -> list[PackedRows]:
        """Return the rows that the block finishes."""
        self.read["empty_rows"] += block.empty_rows
        if self.settings["kind"] == "chat":
            return self._pack_conversations(block)
        return self._pack_documents(block)

    def _pack_documents(self, block: EncodedBlock) -> list[PackedRows]:
        assert block.text_bytes is not None
        # Up to the document that reaches the limit, where the settings have one (of val/bpb_documents).
        sizes, limit = block.text_bytes.cumsum(), self.settings.get("limit_bytes")
        taken = len(sizes)
        if limit is not None:
            taken = int(np.searchsorted(sizes, limit - self.read["text_bytes"])) + 1
        lengths, sizes = block.lengths[:taken], sizes[:taken]
        self.read["documents"] += len(lengths)
        self.read["text_tokens"] += int(lengths.sum())
        if len(sizes):
            self.read["text_bytes"] += int(sizes[-1])
        self.read["empty_rows"] += int((lengths == 0).sum())
        flat = [block.ids]
        if block.target_bytes is not None:
            flat.append(block.target_bytes)
        arrays = zip(*map(block.each, flat), strict=True)
        documents = islice(zip(block.places(), arrays, strict=True), taken)
        return self.packer.add([(ids, origin, *more) for origin, (ids, *more) in documents if len(ids)])

    def _pack_conversations(self, block: EncodedBlock) -> list[PackedRows]:
        rows: list[PackedRows] = []
        assert block.trained is not None
        assert block.rendered is not None
        assert block.outcomes is not None
        counts = zip(block.rendered.tolist(), block.outcomes.tolist(), strict=True)
        arrays = zip(block.each(block.ids), block.each(block.trained), strict=True)
        for origin, (length, outcome), (ids, trained) in zip(block.places(), counts, arrays, strict=True):
            count_conversation(self.read, length=length, kept=len(ids), outcome=OUTCOMES[outcome])
            if len(ids):
                rows += self.packer.add(ids, trained, origin)
        return rows
