"""Validation documents that are trained on, too: files of other content may still hold the same documents."""

import hashlib
import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

from pipeline.sources.bad_rows import row_name

DOCUMENTS = 2_000  # of each validation source that are looked for
TRAINED_CHARS = 50_000_000  # of each training source that are looked at: a second or two
HELD_OUT_CHARS = 250_000_000  # of each validation source that are read for them; of one file also the rows between


def overlap_note(train: list[Any], validation: list[Any]) -> str | None:
    """How many of the first validation documents stand in the training text, as far as it lies here; None when none does.

    Equal means equal but for white space around it. Nothing is fetched for it.
    """
    held = {digest for source in validation for digest in _held_out(source)}
    found: dict[bytes, str] = {}
    for source in train if held else []:
        chars = 0
        for digest, place, length in _documents(source):
            if digest in held and digest not in found:
                found[digest] = place
            chars += length
            if chars > TRAINED_CHARS:
                break
    if not found:
        return None
    return (
        f"{len(found):,} of the first {len(held):,} validation documents are trained on, too (such as {next(iter(found.values()))}): to that share "
        "validation measures memory. Take duplicates out of the files, or name other ones in data.validation."
    )


def _held_out(source: Any) -> Iterator[bytes]:
    """Digests of the first validation documents, until so many are found or so much text was read for them."""
    chars = 0
    for digest, _, read in islice(_documents(source), DOCUMENTS):
        yield digest
        chars += read
        if chars > HELD_OUT_CHARS:
            return


def _documents(source: Any) -> Iterator[tuple[bytes, str, int]]:
    """(digest, place, characters read for it) of each document of the source's first files, until one is not here."""
    for number, file in enumerate(source.files):
        if file.path is None:
            return
        rows = file.period if file.part == "validation" else 1
        for block in source.read(file=number):
            if block.file != number:
                break
            for item in block.items:
                text = item.text if source.kind == "text" else json.dumps(item.messages, sort_keys=True)
                digest = hashlib.blake2b(text.strip().encode(), digest_size=16).digest()
                yield digest, row_name(file.label, item.row), len(text) * rows
