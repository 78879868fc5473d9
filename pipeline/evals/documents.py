"""Whole documents as batches to score: each byte is a target exactly once, whatever the tokenizer.

This makes bits per byte comparable across tokenizers and packings. What still differs between models is how far back they
see, which is why the window is a part of the protocol.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from pipeline.artifacts.errors import DataError
from pipeline.artifacts.protocol import Protocol, digest
from pipeline.evals.bpb import IGNORED
from pipeline.tokenizer.byte_lengths import byte_lengths, is_byte_level, span_byte_lengths
from pipeline.tokenizer.encode import encode_documents
from pipeline.tokenizer.specials import document_start

RULE = 1  # raise it when the same texts under the same window give another figure


def documents_protocol(
    texts: Iterable[str], *, window: int, scored_bytes: int, coverage: float, dtype: str
) -> Protocol:
    """Return the protocol of these documents in this order, the same for any tokenizer that keeps the text and any rows of a
    batch. scored_bytes, coverage: under this tokenizer."""
    return Protocol(
        {
            "score": "documents",
            "texts": digest([digest(text) for text in texts]),
            "bytes": scored_bytes,
            "window": window,
            "stride": "window",
            "bos": "each piece",
            "dtype": dtype,
            "coverage": coverage,
            "rule": RULE,
        }
    )


def document_batches(tokenizer, texts: list[str], *, window: int, rows: int) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of up to `rows` pieces of at most `window` targets, longest first, with `target_bytes`.

    A document longer than the window is cut, and every piece begins with BOS as in training, so that no text token is
    lost as a first input. Raises DataError when the tokenizer has no token to begin with.
    """
    start = document_start(tokenizer)
    if start is None:
        raise DataError(
            "the tokenizer has neither a BOS nor an EOS token, so the first token of a text cannot be scored. Set bos_token in its tokenizer_config.json."
        )
    pieces = [
        (ids[first : first + window], lengths[first : first + window])
        for ids, lengths in _encoded(tokenizer, texts)
        for first in range(0, len(ids), window)
    ]
    pieces.sort(key=lambda piece: -len(piece[0]))  # Rows of a batch are about equally long: little padding.
    for first in range(0, len(pieces), rows):
        yield _batch(pieces[first : first + rows], start)


def _encoded(tokenizer, texts: list[str]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Ids of each text and the bytes under each of them; control strings in a text are text."""
    if is_byte_level(tokenizer):
        lengths_V = byte_lengths(tokenizer)
        for ids in encode_documents(tokenizer, texts):
            yield ids.astype(np.int64), lengths_V[ids].astype(np.int64)
    else:
        for text in texts:
            spans = span_byte_lengths(tokenizer, text)
            yield np.array(spans[0], np.int64), np.array(spans[1], np.int64)


def _batch(pieces: list[tuple[np.ndarray, np.ndarray]], start: int) -> dict[str, torch.Tensor]:
    width = len(pieces[0][0])
    input_ids_BT = np.full((len(pieces), width), start, np.int64)
    labels_BT = np.full((len(pieces), width), IGNORED, np.int64)
    bytes_BT = np.full((len(pieces), width), -1, np.int64)
    for row, (ids, lengths) in enumerate(pieces):
        input_ids_BT[row, 1 : len(ids)] = ids[:-1]
        labels_BT[row, : len(ids)] = ids
        bytes_BT[row, : len(ids)] = lengths
    arrays = {"input_ids": input_ids_BT, "shift_labels": labels_BT, "target_bytes": bytes_BT}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
