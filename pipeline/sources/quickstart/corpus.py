"""From harvested prose to the quickstart's text: split by source file, lines deduplicated, nothing of held-out in training."""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import replace

from pipeline.sources.quickstart.harvest import SourceDocument

HELD_OUT_PER_MILLE = 25
MIN_DOCUMENT_CHARS = 200
SHINGLE_WORDS = 5
NEAR_DUPLICATE = 0.5  # Share of a training line's shingles that may not stand in held-out text.
WORDS = re.compile(r"[a-z0-9]+")
ORDINARY_WORD = re.compile(r"[(\"']*([A-Z]?[a-z]+|[A-Z]+|[A-Z]?[a-z]+[-'][a-z]+)[.,;:!?)\"']*$")


def is_held_out(path: str) -> bool:
    """Whether this source file is validation: by the hash of its path, so that no other file's coming or going moves it."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "big") % 1000 < HELD_OUT_PER_MILLE


def split_and_deduplicate(documents: list[SourceDocument]) -> tuple[list[SourceDocument], list[SourceDocument]]:
    """(training, held-out) documents with every line once in all, and without training lines that held-out ones repeat.

    Held-out files choose first. Lines are compared by their letters and digits; a training line is a near-duplicate when
    half of its five-word shingles stand in held-out text.
    """
    seen: set[str] = set()
    held_out = [d for d in (_kept(d, seen, frozenset()) for d in documents if is_held_out(d.path)) if d]
    shingles = frozenset(s for d in held_out for thing in d.things for line in thing.lines for s in shingles_of(line))
    training = [d for d in (_kept(d, seen, shingles) for d in documents if not is_held_out(d.path)) if d]
    return training, held_out


def _kept(document: SourceDocument, seen: set[str], avoid: frozenset[int]) -> SourceDocument | None:
    things = []
    for thing in document.things:
        lines = []
        for line in thing.lines:
            key = "".join(WORDS.findall(line.lower()))
            if key in seen or (avoid and overlap(line, avoid) >= NEAR_DUPLICATE):
                continue
            seen.add(key)
            lines.append(line)
        if lines:
            things.append(replace(thing, lines=lines))
    kept = SourceDocument(document.path, things)
    return kept if len(text_of(kept)) >= MIN_DOCUMENT_CHARS else None


def text_of(document: SourceDocument) -> str:
    """The document as it is trained on: a line a paragraph, a blank line between what different things document."""
    return "\n\n".join("\n".join(thing.lines) for thing in document.things)


def shingles_of(line: str) -> list[int]:
    """Hashes of the line's runs of five words; none for a shorter line."""
    words = WORDS.findall(line.lower())
    return [hash_of(words[i : i + SHINGLE_WORDS]) for i in range(len(words) - SHINGLE_WORDS + 1)]


def hash_of(words: list[str]) -> int:
    # Python's own hash of a str differs from process to process; membership does not, and nothing else is asked of it.
    return hash(tuple(words))


def overlap(line: str, shingles: frozenset[int]) -> float:
    """Share of the line's shingles that are among these."""
    own = shingles_of(line)
    return sum(s in shingles for s in own) / len(own) if own else 0.0


def code_share(texts: Iterable[str]) -> float:
    """Share of all characters, white space apart, outside ordinary words: identifiers, numbers, operators, markup."""
    total = words = 0
    for text in texts:
        for token in text.split():
            total += len(token)
            words += len(token) if ORDINARY_WORD.match(token) else 0
    return 1 - words / total if total else 0.0
