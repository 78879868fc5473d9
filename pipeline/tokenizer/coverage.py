"""Share of a text that a tokenizer's ids keep: what they do not spell, no model that predicts them has predicted.

A word-level tokenizer writes [UNK] for words that it does not know, and a model that has learnt to write [UNK] reads next to
nothing in bits per byte of a script that nobody trained it on. One that writes everything in lower case leaves capitals out,
one that cuts at white space the spaces. A loss per byte of such a text is the loss of another text.
"""

import json
import re
from collections.abc import Iterable

from pipeline.process.errors import DataError
from pipeline.tokenizer.encode import byte_alphabet, is_byte_level, plain_backend

# Below this share there are no bits per byte. Were every byte that is left out to cost 8 bits, the figure would be at most
# 0.008 higher.
LEAST_COVERAGE = 0.999
DIGITS = 6
NOT_SPELT = b"\xff"  # no byte of UTF-8: what an unknown token spells
BYTES = byte_alphabet()
BLANK = "\u2581"  # stands for a space in the tokens of SentencePiece
BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


def keeps_every_text(tokenizer) -> bool:
    """Return whether the ids of any text restore it: all 256 bytes have an id, and nothing is normalized before."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    whole = backend["normalizer"] is None and _only_cuts(backend["pre_tokenizer"])
    return is_byte_level(tokenizer) and whole and BYTES.keys() <= backend["model"]["vocab"].keys()


def coverage(tokenizer, texts: Iterable[str]) -> float:
    """Return the share of the texts' UTF-8 bytes that their ids restore, 1.0 for no bytes.

    A byte counts where the ids over it spell it: not under an unknown token, not where a normalizer put something else in
    its place, not between tokens. Of spelt words a blank may be missing or too many at the beginning of a text.
    """
    if keeps_every_text(tokenizer):
        return 1.0
    backend, spelling = plain_backend(tokenizer), Spelling(tokenizer)
    kept = total = 0
    for text in texts:
        size = len(text.encode())
        encoding = backend.encode(text, add_special_tokens=False)
        spelt = spelling.of(encoding.ids)
        total += size
        kept += (
            size if b"".join(spelt) in (text.encode(), b" " + text.encode()) else _kept(text, encoding.offsets, spelt)
        )
    if kept == total:
        return 1.0
    return min(round(kept / total, DIGITS), 1 - 10**-DIGITS)  # one byte of a gigabyte lost is not everything kept


def require_coverage(share: float, *, where: str) -> None:
    """Raise DataError for a share of the text that is too small to speak of bits per byte of it."""
    if share < LEAST_COVERAGE:
        raise DataError(
            f"{where}: {lost_text(share)}, so bits per byte of it would be too low. Score it with a tokenizer that keeps the text (byte-level, or with byte fallback)."
        )


def lost_text(share: float) -> str:
    """Say how much of a text the tokenizer loses."""
    return f"the tokenizer drops or replaces {100 * (1 - share):.3g} % of the text's bytes (unknown words, capitals, white space: what its ids do not spell)"


def _only_cuts(step: dict) -> bool:
    """Return whether a pre-tokenizer is known to leave nothing of the text out."""
    if step["type"] == "Sequence":
        return all(map(_only_cuts, step["pretokenizers"]))
    return step["type"] in ("ByteLevel", "Digits") or (step["type"] == "Split" and step["behavior"] != "Removed")


class Spelling:
    """The bytes that each id of a tokenizer spells in the middle of a text, as its decoder writes them."""

    def __init__(self, tokenizer):
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        model, steps = backend["model"], [backend["normalizer"], backend["pre_tokenizer"], backend["decoder"]]
        written = json.dumps(steps, ensure_ascii=False)
        self.is_byte_level, self.has_blanks = '"ByteLevel"' in written, BLANK in written
        self.prefix, self.suffix = (
            model.get(name) or "" for name in ("continuing_subword_prefix", "end_of_word_suffix")
        )
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
            return bytes(BYTES[character] for character in token) if BYTES.keys() >= set(token) else NOT_SPELT
        if self.byte_fallback and (byte := BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        if self.suffix:
            token = token.removesuffix(self.suffix)
        return (token.replace(BLANK, " ") if self.has_blanks else token).encode()


def _kept(text: str, offsets: list[tuple[int, int]], spelt: list[bytes]) -> int:
    """Return how many bytes of the text its ids spell. Ids that share a character are looked at together."""
    kept = end = first = 0
    while first < len(offsets):
        start, until = offsets[first]
        last = first + 1
        while last < len(offsets) and offsets[last][0] < until:
            until, last = max(until, offsets[last][1]), last + 1
        found, under, since = b"".join(spelt[first:last]), text[start:until].encode(), text[end:until].encode()
        if found == since:  # with what comes before it: offsets of byte-level tokens may leave their space out
            kept += len(since)
        elif found == under or (start == 0 and found == b" " + under):
            kept += len(under)
        first, end = last, max(end, until)
    return kept
