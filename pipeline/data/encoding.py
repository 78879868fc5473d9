"""Blocks of a source as token ids: the costly part of preparing data, and a pure function."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from pipeline.data.losses import fit_conversation
from pipeline.data.shards import NO_TEXT
from pipeline.process.errors import DataError
from pipeline.tokenizer.chat import render, rendered_talks
from pipeline.tokenizer.encode import encode_documents

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
    seen: np.ndarray | None = None  # sorted uint64 hashes of the watched n-grams in the text; where it was searched

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
        """Return the block as a safetensors file, whose metadata holds what is no array."""
        arrays, about = {}, {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                arrays[field.name] = value
            elif value is not None:
                about[field.name] = value
        return save(arrays, metadata={"about": json.dumps(about)})


def read_encoded(path: Path) -> EncodedBlock | None:
    """Return the block that a file holds; None where there is none, or only a part of one."""
    try:
        with safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            return EncodedBlock(**json.loads(file.metadata()["about"]), **arrays)
    except (FileNotFoundError, SafetensorError):
        return None


def num_encoded(path: Path) -> int | None:
    """Return the number of ids in a file, from its header; None where there is none."""
    try:
        with safe_open(path, framework="numpy") as file:
            return file.get_slice("ids").get_shape()[0]
    except (FileNotFoundError, SafetensorError):
        return None


def encode_block(
    block: Any,
    *,
    source: Any,
    tokenizer: Any,
    settings: dict,
    num_proc: int | None = None,
    watchlist: Any | None = None,
) -> EncodedBlock:
    """Return the ids of a block of the source. settings: those in the plan of its shards. watchlist: for which the text
    is searched."""
    if settings["kind"] == "chat":
        encoded = _encode_conversations(block, source, tokenizer, settings)
    else:
        encoded = _encode_documents(block, tokenizer, settings, num_proc)
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


def _encode_documents(block: Any, tokenizer: Any, settings: dict, num_proc: int | None) -> EncodedBlock:
    ids: list[np.ndarray] = []
    more: dict[str, np.ndarray] = {}
    if settings.get("target_bytes"):
        from pipeline.tokenizer.coverage import span_byte_lengths

        # One text at a time: the places of its ids in it tell the bytes under each.
        lengths = []
        for document in block.items:
            found, num_bytes = span_byte_lengths(tokenizer, document.text)
            ids.append(np.array(found))
            lengths.append(num_bytes)
        if "end" in settings:
            lengths = _with_end(lengths, NO_TEXT, settings)
        more["target_bytes"] = _flat(lengths, np.int32)
    else:
        for documents in batches_of(block.items, ENCODE_CHARS):
            ids += encode_documents(tokenizer, [document.text for document in documents], num_proc=num_proc)
    if "end" in settings:
        ids = _with_end(ids, settings["end"], settings)
    more["text_bytes"] = np.array([len(document.text.encode()) for document in block.items], np.int64)
    return _encoded(block, block.bad_rows, block.items, ids, settings["dtype"], **more)


def _with_end(documents: list, end: int, settings: dict) -> list:
    """Return each document's numbers with one more at its end.

    Not behind a document that fills its last row without: in a row of its own the end would teach to write nothing.
    """
    cuts = settings["packing"] in ("cut_and_fit", "one_text")
    ended = []
    for document in documents:
        left = len(document)
        if cuts:
            left %= settings["row_tokens"]  # of its last row, behind the BOS
        if left:
            document = np.append(document, end)
        ended.append(document)
    return ended


def _encode_conversations(block: Any, source: Any, tokenizer: Any, settings: dict) -> EncodedBlock:
    bad, talks = list(block.bad_rows), []
    ids, trained, rendered, outcomes = [], [], [], []
    capacity, overflow = settings["row_tokens"] + 1, settings["max_row_overflow"]
    for talk, whole in zip(block.items, rendered_talks(tokenizer, block.items), strict=True):
        if isinstance(whole, DataError):
            bad.append(f"{source.files[talk.file].label}:{talk.row}: {whole}")
            continue
        fitted, targets, outcome = fit_conversation(
            talk.messages, whole, partial(render, tokenizer, tools=talk.tools), capacity=capacity, overflow=overflow
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
