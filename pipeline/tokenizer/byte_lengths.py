"""How many bytes of text an id stands for: the denominator of bits per byte.

Counted from the byte-level alphabet, never by decoding: an id that holds part of a character decodes to U+FFFD, three
bytes that are not in the text.
"""

import json

import numpy as np


def is_byte_level(tokenizer) -> bool:
    """Whether every id of text stands for fixed bytes, whatever surrounds it."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    return backend["model"]["type"] == "BPE" and _contains_byte_level(backend.get("pre_tokenizer"))


def _contains_byte_level(step: dict | None) -> bool:
    if not step:
        return False
    return step["type"] == "ByteLevel" or any(map(_contains_byte_level, step.get("pretokenizers", [])))


def byte_lengths(tokenizer) -> np.ndarray:
    """(V,) int32 raw bytes per id, V = highest id + 1; 0 for control tokens and for ids that do not exist.

    Their sum over the ids of a text is its UTF-8 length (of the text as normalized, for the few tokenizers that change
    it first). Raises ValueError for a tokenizer that is not byte-level: its ids have no fixed bytes, see
    `span_byte_lengths`.
    """
    if not is_byte_level(tokenizer):
        raise ValueError("the tokenizer is not byte-level: its ids have no fixed bytes; use span_byte_lengths")
    vocabulary = tokenizer.get_vocab()
    added = tokenizer.added_tokens_decoder
    lengths_V = np.zeros(max(vocabulary.values()) + 1, dtype=np.int32)
    for token, i in vocabulary.items():
        if i in added:
            lengths_V[i] = 0 if added[i].special else len(added[i].content.encode())
        else:
            lengths_V[i] = len(token)  # One character of the byte-level alphabet is one byte.
    return lengths_V


def span_byte_lengths(tokenizer, text: str) -> tuple[list[int], list[int]]:
    """The ids of a text, none of them a control token, and the bytes of text that each covers; for any tokenizer.

    Each byte is counted once, at the first id that covers it: of several ids that share a character (byte fallback) the
    first has its bytes and the others 0, and all of them are scored. Text that the tokenizer drops is not counted.
    """
    from pipeline.tokenizer.encode import plain_backend

    encoding = plain_backend(tokenizer).encode(text, add_special_tokens=False)
    ends = np.cumsum([0] + [len(character.encode()) for character in text])  # Bytes before each character.
    lengths, covered = [], 0
    for start, end in encoding.offsets:
        start = max(start, covered)
        lengths.append(int(ends[end] - ends[start]) if end > start else 0)
        covered = max(covered, end)
    return encoding.ids, lengths
