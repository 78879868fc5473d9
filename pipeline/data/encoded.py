"""A block of a source as token ids: what is costly of preparing data, a pure function of the block that any process may compute.

Packing is cheap and ordered; it takes the blocks one after the other (shard_writer.py). Blocks that other processes encode
(workers.py) lie as files beside the shards, from when they are made until the rows that hold them are sealed.
"""

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.data.packing import fit_conversation
from pipeline.data.shards import safetensors_bytes
from pipeline.process.errors import DataError
from pipeline.process.storage import write_bytes
from pipeline.tokenizer.chat import render, rendered_talks
from pipeline.tokenizer.encode import encode_documents, span_byte_lengths

FOLDER = "encoded-2"  # of the folder of shards; raise the number when the files are others
ENCODE_CHARS = 8_000_000  # handed to the tokenizer at once: bounds its memory when documents are huge
OUTCOMES = ("whole", "cut", "too_long", "no_target")  # of fit_conversation


@dataclass
class EncodedBlock:
    """n documents or conversations of a block, in order; flat arrays hold theirs one after the other."""

    file: int
    index: int
    empty_rows: int
    bad_rows: list[str]
    ids: np.ndarray  # flat, of the rows' dtype
    lengths: np.ndarray  # (n,) int64 ids of each; 0 also of a conversation that is dropped
    origins: np.ndarray  # (n, 2) int32 row group and row
    text_bytes: np.ndarray | None = None  # (n,) int64 of UTF-8; documents only
    target_bytes: np.ndarray | None = None  # flat int32 bytes of text under each id; where the rows carry them
    trained: np.ndarray | None = None  # flat bool: id is a target; conversations only
    rendered: np.ndarray | None = None  # (n,) int64 ids of the whole conversation
    outcomes: np.ndarray | None = None  # (n,) uint8 index into OUTCOMES
    seen: np.ndarray | None = None  # sorted uint64 hashes of a watch-list's n-grams in the text; None: nobody looked

    def each(self, flat: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the part of a flat array that is each item's."""
        at = 0
        for length in self.lengths.tolist():
            yield flat[at : at + length]
            at += length

    def places(self) -> list[tuple[int, int, int]]:
        """Return (file, row group, row) of each item."""
        return [(self.file, *place) for place in self.origins.tolist()]

    def content(self) -> bytes:
        """Return the block as a file: the CRC-32 of the rest, the length of the JSON, the JSON, tensors.

        A CRC finds a damaged file, and takes a third of SHA-256's time: one process reads what all others write.
        """
        arrays, about = {}, {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                arrays[field.name] = value.astype(np.uint8) if value.dtype == bool else value
            else:
                about[field.name] = value
        head = json.dumps(about).encode()
        rest = len(head).to_bytes(8, "little") + head + safetensors_bytes(arrays)
        return zlib.crc32(rest).to_bytes(4, "little") + rest


def encoded_path(folder: Path, file: int, block: int, watchlist_id: str | None) -> Path:
    """Return where an encoded block of a folder of shards lies; one that was searched for a watch-list is another file."""
    return folder / FOLDER / f"{file:05d}-{block:07d}{f'-{watchlist_id}' if watchlist_id else ''}.safetensors"


def read_encoded(path: Path) -> EncodedBlock | None:
    """Return the block that a file holds; None where there is none, or not as it was written."""
    from safetensors.numpy import load

    try:
        with open(path, "rb") as file:
            sum_and_length = file.read(12)
            about, tensors = file.read(int.from_bytes(sum_and_length[4:], "little")), file.read()
    except (FileNotFoundError, OverflowError, MemoryError):
        return None
    if zlib.crc32(tensors, zlib.crc32(sum_and_length[4:] + about)).to_bytes(4, "little") != sum_and_length[:4]:
        return None
    arrays: dict[str, Any] = load(tensors)
    if "trained" in arrays:
        arrays["trained"] = arrays["trained"].astype(bool)
    return EncodedBlock(**json.loads(about), **arrays)


def write_encoded(path: Path, encoded: EncodedBlock) -> None:
    write_bytes(path, encoded.content())


def encode_block(
    block: Any,
    *,
    source: Any,
    tokenizer: Any,
    settings: dict,
    num_proc: int | None = None,
    watchlist: Any | None = None,
) -> EncodedBlock:
    """Return the ids of a block of the source. settings: of its sequence (plan.py). watchlist: looked for in the text, where given."""
    encode = _encode_conversations if settings["kind"] == "chat" else _encode_documents
    encoded = encode(block, source, tokenizer, settings, num_proc)
    if watchlist is not None:
        encoded.seen = watchlist.found_in(block.items)
    return encoded


def _encoded(block: Any, bad_rows: list[str], items: list, ids: list, dtype: Any, **more: np.ndarray) -> EncodedBlock:
    return EncodedBlock(
        file=block.file,
        index=block.index,
        empty_rows=block.empty_rows,
        bad_rows=bad_rows,
        ids=_flat(ids, dtype),
        lengths=np.array([len(a) for a in ids], np.int64),
        origins=np.array([(item.row_group, item.row) for item in items], np.int32).reshape(-1, 2),
        **more,
    )


def _flat(arrays: list, dtype: Any) -> np.ndarray:
    return np.concatenate([np.asarray(a, dtype) for a in arrays]) if arrays else np.zeros(0, dtype)


def _encode_documents(block: Any, source: Any, tokenizer: Any, settings: dict, num_proc: int | None) -> EncodedBlock:
    ids: list[np.ndarray] = []
    more: dict[str, np.ndarray] = {}
    if settings.get("target_bytes"):
        spans = [span_byte_lengths(tokenizer, document.text) for document in block.items]
        ids = [np.array(found) for found, _ in spans]
        more["target_bytes"] = _flat([lengths for _, lengths in spans], np.int32)
    else:
        for documents in batches_of(block.items, ENCODE_CHARS):
            ids += encode_documents(tokenizer, [document.text for document in documents], num_proc=num_proc)
    more["text_bytes"] = np.array([len(document.text.encode()) for document in block.items], np.int64)
    return _encoded(block, block.bad_rows, block.items, ids, settings["dtype"], **more)


def _encode_conversations(
    block: Any, source: Any, tokenizer: Any, settings: dict, num_proc: int | None
) -> EncodedBlock:
    bad, talks, ids, trained, rendered, outcomes = list(block.bad_rows), [], [], [], [], []
    capacity, overflow = settings["row_tokens"] + 1, settings["max_row_overflow"]
    for talk, whole in zip(block.items, rendered_talks(tokenizer, block.items), strict=True):
        if isinstance(whole, DataError):
            bad.append(f"{source.files[talk.file].label}:{talk.row}: {whole}")
            continue
        fitted, targets, outcome = fit_conversation(
            talk.messages, whole, partial(render, tokenizer), capacity=capacity, overflow=overflow
        )
        talks.append(talk)
        ids.append(fitted or [])
        trained.append(targets or [])
        rendered.append(len(whole[0]))
        outcomes.append(OUTCOMES.index(outcome))
    return _encoded(
        block,
        bad,
        talks,
        ids,
        settings["dtype"],
        trained=_flat(trained, bool),
        rendered=np.array(rendered, np.int64),
        outcomes=np.array(outcomes, np.uint8),
    )


def batches_of(documents: list, characters: int) -> Iterator[list]:
    """Yield the documents in order, in lists of at most so many characters or one document."""
    batch: list = []
    size = 0
    for document in documents:
        if batch and size + len(document.text) > characters:
            yield batch
            batch, size = [], 0
        batch.append(document)
        size += len(document.text)
    if batch:
        yield batch
