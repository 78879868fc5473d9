"""Held-out rows under a fixed protocol: what they are depends on no key of the packing, batch or world size."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np

from pipeline.data.losses import nothing_left
from pipeline.data.mixture import MixedDataset
from pipeline.data.preparation import Preparation
from pipeline.data.row_plan import ONE_TEXT, VALIDATION_BUFFER, open_stream
from pipeline.data.rows import RowReader, bits, rows_of_micro_batch
from pipeline.data.shards import Shard
from pipeline.metrics import SFT_BPB, VAL_BPB, VAL_BPB_DOCUMENTS, Protocol, digest
from pipeline.process.errors import DataError
from pipeline.tokenizer.encode import LEAST_COVERAGE, byte_lengths, is_byte_level, keeps_every_text

RULE = 1  # raise it when the same files, tokenizer and window give other validation rows, or another figure of them
LOOKED_AT_BYTES = 1_000_000  # of each source, for the share of it that the tokenizer keeps
ROWS_AT_ONCE = 512


class ValidationRows:
    """Rows by best_fit_crop for val/bpb (conversations: packed whole) and whole documents cut into isolated pieces,
    every byte once, for val/bpb_documents.

    The documents of a row see each other as they do in training: data.isolate_documents, and of conversations never.

    coverage: share of the held-out text that the tokenizer's ids restore; whoever has the sources sets it.
    """

    def __init__(self, preparation: Preparation):
        self.preparation, self.plan = preparation, preparation.plan
        self.coverage = 1.0
        self.has_documents: bool = self.plan["documents"] is not None  # of conversations there are none
        # Of a mixture, the names of its sources, each once; batches then carry `source` (B,), -1 for a filler.
        named = [about["name"] for about in self.plan["validation"]["sequences"]]
        self.sources: list[str] = []
        if len(named) > 1:
            for number, name in enumerate(named):
                if named.count(name) > 1:
                    name = f"{name}-{number}"
                self.sources.append(name)

    @property
    def keeps_text(self) -> bool:
        """Return whether so much of the text is kept that there are bits per byte of it."""
        return self.coverage >= LEAST_COVERAGE

    def protocol(self, name: str, *, scored_bytes: int | None, dtype: str) -> Protocol:
        """Return the protocol of val/bpb, sft/assistant_bpb or val/bpb_documents. scored_bytes: None where none are
        known."""
        is_chat, of_documents = self.plan["kind"] == "chat", name == VAL_BPB_DOCUMENTS
        about = self.plan["documents" if of_documents else "validation"]
        texts = []
        for sequence, part in zip(about["sequences"], about["parts"], strict=True):
            texts.append([sequence["settings"]["source"], part["weight"]])
        first = about["sequences"][0]["settings"]
        if of_documents:
            score, bos = "documents", "each piece"
        elif is_chat:
            score, bos, packing = "assistant", "as the template", "whole conversations"
        else:
            score, bos, packing = "rows", "each document", f"best_fit_crop of {VALIDATION_BUFFER}"
            if first["packing"] == ONE_TEXT:
                packing = "one document"
        # In the order in which people read them.
        parts = {"score": score, "texts": digest(texts), "bytes": scored_bytes}
        if scored_bytes is None:
            parts["rows"] = about["total_rows"]
        parts |= {"window": self.plan["row_tokens"], "stride": "window", "bos": bos}
        if "end" in first:
            parts["end"] = "each document"
        if not of_documents:
            # Which bytes of a document a row has left over depends on the tokenizer.
            parts |= {"packing": packing, "tokenizer": first["tokenizer"][:16]}
            if self.plan["isolated"] and not is_chat:
                parts["isolated"] = "documents"
        return Protocol({**parts, "dtype": dtype, "coverage": self.coverage, "rule": RULE})

    def batches(self, *, rows: int, rank: int = 0, world_size: int = 1) -> Iterator[dict]:
        """Yield a rank's batches of `rows` rows for val/bpb; every rank gets equally many, the last ones filled up
        with fillers."""
        yield from self._batches("validation", rows=rows, rank=rank, world_size=world_size)

    def document_batches(self, *, rows: int, rank: int = 0, world_size: int = 1) -> Iterator[dict]:
        """Yield the same for val/bpb_documents; nothing for conversations."""
        if self.plan["documents"] is not None:
            yield from self._batches("documents", rows=rows, rank=rank, world_size=world_size)

    def num_rows(self, role: str = "validation") -> int:
        """Return rows that are scored; waits until they are prepared."""
        return self._sealed(role).mixture.total_rows or 0

    def scored_bytes(self, tokenizer: Any) -> dict[str, int]:
        """Return bytes of text that each validation number is over, by its name; waits until they are prepared.

        Empty where the ids of conversations have no fixed bytes, and where nothing is held out.
        """
        lengths_V = byte_lengths(tokenizer) if is_byte_level(tokenizer) else None
        is_chat = self.plan["kind"] == "chat"
        if not self.plan["validation"]["sequences"] or (is_chat and lengths_V is None):
            return {}
        if is_chat:
            return {SFT_BPB: self._bytes("validation", lengths_V)}
        roles = {VAL_BPB: "validation", VAL_BPB_DOCUMENTS: "documents"}
        return {name: self._bytes(role, lengths_V) for name, role in roles.items() if self.plan[role] is not None}

    def _bytes(self, role: str, lengths_V: np.ndarray | None) -> int:
        stream, total = self._sealed(role), 0
        for dataset, rows in zip(stream.datasets, stream.mixture.used(self.num_rows(role)), strict=True):
            rows = min(rows, dataset.rows)
            for number in range(-(-rows // dataset.shard_rows)):
                total += _bytes_of(dataset.shard(number), rows - number * dataset.shard_rows, lengths_V)
        return total

    def _sealed(self, role: str) -> MixedDataset:
        stream = open_stream(self.plan, role)
        self.preparation.wait_until(stream.is_sealed, what="the validation rows")
        if not stream.mixture.total_rows:
            why = nothing_left(self.plan, role, stream)
            raise DataError(f"data.validation: what is held out gives no row to score. {why} Or name other files.")
        return stream

    def _batches(self, role: str, *, rows: int, rank: int, world_size: int) -> Iterator[dict]:
        stream = self._sealed(role)
        total = stream.mixture.total_rows or 0
        packed = self.plan[role]["sequences"][0]["settings"].get("packing") != ONE_TEXT
        isolated = packed and (role == "documents" or self.plan["isolated"])
        reader = RowReader(
            row_tokens=self.plan["row_tokens"], bos=self.plan["bos"], pad=self.plan["pad"], isolated=isolated
        )
        import torch

        for step in range(-(-total // (rows * world_size))):
            found: list[tuple[Shard, int] | None] = [None] * rows
            sources = [-1] * rows
            for at, number in enumerate(
                rows_of_micro_batch(step, rank=rank, world_size=world_size, rows=rows, total=total)
            ):
                if number is not None:
                    (place,) = stream.places(number, 1)
                    found[at], sources[at] = (stream.shard(place), place.row), place.source
            batch = reader.batch(found)
            if self.sources:
                batch["source"] = torch.tensor(sources)
            yield batch


def held_out_coverage(tokenizer: Any, sources: list[Any]) -> float:
    """Return the share of the held-out text that the tokenizer's ids restore, by the first bytes of each source."""
    if keeps_every_text(tokenizer):
        return 1.0
    texts = (text for source in sources for text in first_texts(source, num_bytes=LOOKED_AT_BYTES))
    from pipeline.tokenizer.coverage import coverage

    return coverage(tokenizer, texts)


def first_texts(source: Any, *, num_bytes: int, role: str | None = None) -> Iterator[str]:
    """Yield the first documents of a source, or messages of conversations (those of a role), until they have so many
    bytes."""
    for item in chain.from_iterable(block.items for block in source.read()):
        if hasattr(item, "text"):
            texts = [item.text]
        else:
            said = [message for message in item.messages if role in (None, message.get("role"))]
            texts = [str(message.get("content") or "") for message in said]
        yield from texts
        num_bytes -= sum(len(text.encode()) for text in texts)
        if num_bytes <= 0:
            return


def _bytes_of(shard: Shard, rows: int, lengths_V: np.ndarray | None) -> int:
    """Return bytes of the text that the targets of a shard's first rows stand for."""
    # Some rows at a time: their lengths are a copy, of wider numbers than the ids.
    total, width = 0, shard.input_ids.shape[1]
    for first in range(0, min(rows, len(shard.used)), ROWS_AT_ONCE):
        part = slice(first, min(first + ROWS_AT_ONCE, rows))
        if shard.target_bytes is not None:
            lengths = np.maximum(shard.target_bytes[part], 0)
        else:
            assert lengths_V is not None
            lengths = lengths_V[shard.input_ids[part]]
        # A row's first token is nobody's target.
        if shard.trained is not None:
            is_target = bits(shard.trained[part], width)
        else:
            is_target = np.arange(width) < shard.used[part][:, None]
        total += int(lengths[:, 1:].sum(where=is_target[:, 1:], dtype=np.int64))
    return total
