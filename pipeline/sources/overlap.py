"""Validation documents that are trained on, too: files of other content may still hold the same documents."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from pipeline.sources.verify import row_name

DOCUMENTS = 2_000  # of each validation source that are looked for
TRAINED_CHARS = 50_000_000  # of each training source that are looked at: a second or two
HELD_OUT_CHARS = 250_000_000  # of each validation source that are read for them; of one file also the rows between


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """documents: the first ones of validation, that were looked for. found: those of them that are trained on, too; place: of
    one of these. whole: all training text was looked through; else found is at least so many."""

    documents: int
    found: int
    place: str | None
    whole: bool

    def note(self) -> str | None:
        """Return what was found as a sentence for the user; None where nothing was found."""
        if not self.found:
            return None
        return (
            f"{self.found:,} of the first {self.documents:,} validation documents are trained on, too (such as {self.place}): to that share "
            "validation measures memory. Take duplicates out of the files, or name other ones in data.validation."
        )


_looked: dict[tuple, Overlap] = {}


def overlap_of(train: list[Any], validation: list[Any]) -> Overlap:
    """Return how many of the first validation documents are in the training text, as far as it is here.

    Equal means equal but for white space around it. Nothing is fetched for it, and a process looks once.
    """
    asked = tuple(tuple(source.fingerprint for source in sources) for sources in (train, validation))
    if asked not in _looked:
        _looked[asked] = _look(train, validation)
    return _looked[asked]


def _look(train: list[Any], validation: list[Any]) -> Overlap:
    # Built-in data is left out: its makers hold apart what is asked, and nobody else can take duplicates out.
    held = {digest for source in validation if not source.is_built_in for digest in _held_out(source)}
    found: dict[bytes, str] = {}
    whole = all(file.path is not None for source in train for file in source.files)
    for source in train if held else []:
        chars = 0
        for digest, place, length in _documents(source):
            if digest in held and digest not in found:
                found[digest] = place
            chars += length
            if chars > TRAINED_CHARS:
                whole = False
                break
    return Overlap(documents=len(held), found=len(found), place=next(iter(found.values()), None), whole=whole)


def _held_out(source: Any) -> Iterator[bytes]:
    """Yield digests of the first validation documents, until so many are found or so much text was read for them."""
    chars = 0
    for digest, _, read in islice(_documents(source), DOCUMENTS):
        yield digest
        chars += read
        if chars > HELD_OUT_CHARS:
            return


def _documents(source: Any) -> Iterator[tuple[bytes, str, int]]:
    """Yield (digest, place, characters read for it) of each document of the source's first files, until one is not here."""
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
