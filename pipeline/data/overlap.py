"""Validation documents that are trained on too: files of other content may still hold the same documents."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from pipeline.sources.verify import row_name

DOCUMENTS = 2_000  # of each validation source that are looked for
TRAINED_CHARS = 50_000_000  # of each training source that are searched: a second or two
HELD_OUT_CHARS = 250_000_000  # of each validation source that are read for them; of one file also the rows between


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """documents: the first ones of validation, that were looked for. found: those that are trained on too; place: of
    one of these. whole: all training text was searched; else found is at least so many."""

    documents: int
    found: int
    place: str | None
    whole: bool

    def note(self) -> str | None:
        """Return what was found as a sentence for the user; None where nothing was found."""
        if not self.found:
            return None
        return (
            f"{self.found:,} of the first {self.documents:,} validation documents are trained on, too (such as "
            f"{self.place}), so validation is partly memory. Remove duplicates, or name other files in "
            "data.validation."
        )


_overlaps: dict[tuple, Overlap] = {}


def overlap_of(train: list[Any], validation: list[Any]) -> Overlap:
    """Return how many of the first validation documents are in the training text, as far as it is here.

    Documents are equal when they differ in white space around them alone. Nothing is fetched, and a process searches
    once.
    """
    key = tuple(tuple(source.fingerprint for source in sources) for sources in (train, validation))
    if key not in _overlaps:
        _overlaps[key] = _search([source.once for source in train], validation)
    return _overlaps[key]


def _search(train: list[Any], validation: list[Any]) -> Overlap:
    held: set[bytes] = set()
    for source in validation:
        if not source.is_built_in:  # its makers hold apart what is asked, and nobody else can remove duplicates
            held |= _held_out(source)
    found: dict[bytes, str] = {}
    whole = all(file.path is not None for source in train for file in source.files)
    if not held:
        train = []  # nothing is looked for
    for source in train:
        chars = 0
        for digest, place, length in _documents(source):
            if digest in held:
                found.setdefault(digest, place)
            chars += length
            if chars > TRAINED_CHARS:
                whole = False
                break
    return Overlap(documents=len(held), found=len(found), place=next(iter(found.values()), None), whole=whole)


def _held_out(source: Any) -> set[bytes]:
    """Return digests of the first validation documents, as many as so much text that is read for them holds."""
    digests, chars = set(), 0
    for digest, _, length in islice(_documents(source), DOCUMENTS):
        digests.add(digest)
        chars += length
        if chars > HELD_OUT_CHARS:
            break
    return digests


def _documents(source: Any) -> Iterator[tuple[bytes, str, int]]:
    """Yield (digest, place, characters read for it) of each document of the source's first files, until one is not
    here."""
    for number, file in enumerate(source.files):
        if file.path is None:
            return
        # Of a file that is split by rows, those between two documents of validation are read as well.
        rows = file.period if file.part == "validation" else 1
        for block in source.read_file(number):
            for item in block.items:
                text = item.text if source.kind == "text" else json.dumps(item.messages, sort_keys=True)
                digest = hashlib.blake2b(text.strip().encode(), digest_size=16).digest()
                yield digest, row_name(file.label, item.row), len(text) * rows
