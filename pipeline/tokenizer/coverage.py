"""Bytes of a text that ids stand for, under tokenizers whose ids have no fixed bytes, or that lose some of the text.

What ids do not spell, no model that predicts them has predicted. A word-level tokenizer writes [UNK] for words that it
does not know, and a model that has learnt to write [UNK] reads next to nothing in bits per byte of a script that
nobody trained it on. One that writes everything in lower case leaves capitals out, one that cuts at white space the
spaces. A loss per byte of such a text is the loss of another text.
"""

import json
import re
from collections.abc import Iterable

import numpy as np

from pipeline.process.errors import DataError
from pipeline.tokenizer.encode import LEAST_COVERAGE, byte_alphabet, keeps_every_text, plain_backend

DIGITS = 6
NOT_SPELT = b"\xff"  # no byte of UTF-8: what an unknown token spells
BYTES = byte_alphabet()
BLANK = "\u2581"  # stands for a space in the tokens of SentencePiece
BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


def span_byte_lengths(tokenizer, text: str) -> tuple[list[int], list[int]]:
    """Return the ids of a text, none of them a control token, and the bytes of text that each covers; for any
    tokenizer.

    Each byte is counted once, at the first id that covers it: of several ids that share a character (byte fallback)
    the first has its bytes and the others 0, and all of them are scored. Text that the tokenizer drops is not counted.
    """
    encoding = plain_backend(tokenizer).encode(text, add_special_tokens=False)
    ends = np.cumsum([0, *(len(character.encode()) for character in text)])  # Bytes before each character.
    lengths, covered = [], 0
    for start, end in encoding.offsets:
        start = max(start, covered)  # several ids may share a character
        lengths.append(int(ends[max(start, end)] - ends[start]))
        covered = max(covered, end)
    return encoding.ids, lengths


def coverage(tokenizer, texts: Iterable[str]) -> float:
    """Return the share of the texts' UTF-8 bytes that their ids restore, 1.0 for no bytes.

    A byte counts where the ids over it spell it: not under an unknown token, not where a normalizer put something else
    in its place, not between tokens. Of spelt words a blank may be missing or too many at the beginning of a text.
    """
    if keeps_every_text(tokenizer):
        return 1.0
    backend, spelling = plain_backend(tokenizer), Spelling(tokenizer)
    kept = total = 0
    for text in texts:
        whole, encoding = text.encode(), backend.encode(text, add_special_tokens=False)
        spelt = spelling.of(encoding.ids)
        total += len(whole)
        if b"".join(spelt) in (whole, b" " + whole):
            kept += len(whole)
        else:
            kept += _kept(text, encoding.offsets, spelt)
    if kept == total:
        return 1.0
    return min(round(kept / total, DIGITS), 1 - 10**-DIGITS)  # one byte of a gigabyte lost is not everything kept


def require_coverage(share: float, *, where: str) -> None:
    """Raise DataError for a share of the text that is too small to speak of bits per byte of it."""
    if share < LEAST_COVERAGE:
        raise DataError(
            f"{where}: {lost_text(share)}, so bits per byte of it would be too low. Score it with a tokenizer that "
            "keeps the text (byte-level, or with byte fallback)."
        )


def lost_text(share: float) -> str:
    """Say how much of a text the tokenizer loses."""
    return (
        f"the tokenizer drops or replaces {100 * (1 - share):.3g} % of the text's bytes (unknown words, capitals, "
        "white space: what its ids do not spell)"
    )


class Spelling:
    """The bytes that each id of a tokenizer spells in the middle of a text, as its decoder writes them."""

    def __init__(self, tokenizer):
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        model, steps = backend["model"], [backend["normalizer"], backend["pre_tokenizer"], backend["decoder"]]
        written = json.dumps(steps, ensure_ascii=False)
        self.is_byte_level, self.has_blanks = '"ByteLevel"' in written, BLANK in written
        self.prefix, self.suffix = model.get("continuing_subword_prefix") or "", model.get("end_of_word_suffix") or ""
        self.byte_fallback = bool(model.get("byte_fallback"))
        self.names = {i: token for token, i in tokenizer.get_vocab().items()}
        self.added = {i: token.content for i, token in tokenizer.added_tokens_decoder.items()}
        unknown = model.get("unk_token")
        self.unknown = model.get("unk_id") if unknown is None else tokenizer.get_vocab().get(unknown)
        self.known: dict[int, bytes] = {}

    def of(self, ids: list[int]) -> list[bytes]:
        """Return what each of the ids spells."""
        for i in set(ids) - self.known.keys():
            self.known[i] = self._spell(i)
        return [self.known[i] for i in ids]

    def _spell(self, i: int) -> bytes:
        if i == self.unknown or i not in self.names:
            return NOT_SPELT
        if i in self.added:
            return self.added[i].encode()
        token = self.names[i].removeprefix(self.prefix)
        if self.is_byte_level:
            if not BYTES.keys() >= set(token):
                return NOT_SPELT
            return bytes(map(BYTES.__getitem__, token))
        byte = BYTE_TOKEN.fullmatch(token)
        if self.byte_fallback and byte:
            return bytes([int(byte[1], 16)])
        token = token.removesuffix(self.suffix)
        if self.has_blanks:
            token = token.replace(BLANK, " ")
        return token.encode()


def _kept(text: str, offsets: list[tuple[int, int]], spelt: list[bytes]) -> int:
    """Return how many bytes of the text its ids spell. Ids that share a character are looked at together."""
    kept = end = first = 0
    while first < len(offsets):
        start, until = offsets[first]
        last = first + 1
        while last < len(offsets) and offsets[last][0] < until:
            until, last = max(until, offsets[last][1]), last + 1
        # What the ids spell, the text under them, and the text since the ids before.
        found, under, since = b"".join(spelt[first:last]), text[start:until].encode(), text[end:until].encode()
        if found == since:  # with what comes before it: offsets of byte-level tokens may leave their space out
            kept += len(since)
        elif found == under or (start == 0 and found == b" " + under):
            kept += len(under)
        first, end = last, max(end, until)
    return kept
