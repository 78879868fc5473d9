"""Runs of words as numbers, whatever tokenizer a model has: what two texts share is found by looking up integers.

A text's words are the runs of its UTF-8 bytes that are neither white space nor punctuation, ASCII letters in lower case:
"It's 3.5\n" has the words it, s, 3, 5. Dashes, quotes and spaces of Unicode's General Punctuation (U+2000 to U+203F) and
the signs of Latin-1 (U+0080 to U+00BF) divide words too. Other letters stay as they are, so case counts in them, and a
script without spaces has hardly any words.
"""

import string
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

CHUNK_CHARS = 500_000  # looked at together: long enough for numpy, short enough to stay near the processor
BETWEEN_TEXTS = 0xFF  # a byte that no UTF-8 text has; as a word between two texts it keeps n-grams from spanning both
DIVIDERS = (string.whitespace + string.punctuation).encode() + bytes(range(32)) + b"\x7f"
FOLDED = bytes(0 if byte in DIVIDERS else ord(chr(byte).lower()) if byte < 128 else byte for byte in range(256))

# A polynomial modulo 2**64 with an odd base, which has an inverse: a run's hash is the difference of two prefix sums.
BASE = 0x9E3779B97F4A7C15
INVERSE = pow(BASE, -1, 1 << 64)


@dataclass(frozen=True)
class Words:
    """Folded bytes of texts (0 between words) and where each of the W words begins; BETWEEN_TEXTS is a word of its own."""

    folded: np.ndarray
    begins: np.ndarray

    @classmethod
    def of(cls, texts: list[bytes]) -> "Words":
        """The words of UTF-8 texts, or of pieces of `folded`."""
        folded = np.frombuffer(bytearray(b" \xff ".join([b"", *texts, b""]).translate(FOLDED)), np.uint8)
        _divide_at_signs(folded)
        inside = folded != 0
        return cls(folded, np.flatnonzero(inside[1:] & ~inside[:-1]) + 1)

    @cached_property
    def hashes(self) -> np.ndarray:
        """(W,) uint64 of each word."""
        inside = self.folded != 0
        ends = np.flatnonzero(inside[:-1] & ~inside[1:]) + 1
        return _hashes_of_runs(OF_BYTES[self.folded], self.begins, ends)

    @cached_property
    def texts(self) -> np.ndarray:
        """(W,) number of the text to which each word belongs; the word before a text counts as its first."""
        return np.cumsum(self.folded[self.begins] == BETWEEN_TEXTS) - 1

    def runs_within_texts(self, n: int) -> np.ndarray:
        """The words at which a run of n words of one text begins."""
        texts, count = self.texts, max(0, len(self.begins) - n + 1)
        first = self.folded[self.begins[:count]] == BETWEEN_TEXTS
        return np.flatnonzero((texts[:count] == texts[n - 1 :][:count]) & ~first)


def _divide_at_signs(folded: np.ndarray) -> None:
    """Set the bytes of dividing characters above ASCII to 0: E2 80 xx and C2 xx."""
    at = np.flatnonzero((folded == 0xE2) | (folded == 0xC2))
    general = at[(folded[at] == 0xE2) & (folded[at + 1] == 0x80)]
    for signs, width in ((general, 3), (at[folded[at] == 0xC2], 2)):
        for byte in range(width):
            folded[signs + byte] = 0


def ngram_hashes(words: Words, *, n: int) -> tuple[np.ndarray, np.ndarray]:
    """(hashes, texts): the uint64 hash of each run of n words within a text, in order, and the number of that text.

    It depends on the n words alone: not on case, on what divides them, nor on what stands around them.
    """
    begins = words.runs_within_texts(n)
    return _hashes_of_runs(words.hashes, begins, begins + n), words.texts[begins]


def _hashes_of_runs(values: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """A hash of each values[begin:end] (uint64), the same wherever the run stands."""
    powers, inverses = (np.cumprod(np.full(len(values), base, np.uint64)) for base in (BASE, INVERSE))
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(values * powers)])
    return _mixed((sums[ends] - sums[begins]) * inverses[begins] + (ends - begins).astype(np.uint64))


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """SplitMix64's last step: every bit of a number moves every bit of the result."""
    x = numbers.astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


OF_BYTES = _mixed(np.arange(1, 257))


def chunks(texts: list[str]) -> Iterator[list[bytes]]:
    """The texts in order as UTF-8, in lists of CHUNK_CHARS characters or a little more; a text is never cut."""
    chunk: list[bytes] = []
    size = 0
    for text in texts:
        chunk.append(text.encode())
        size += len(text)
        if size >= CHUNK_CHARS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
