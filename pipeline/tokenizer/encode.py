"""Text to ids, fast, and never a control token: what a document spells is only text."""

import os
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from pipeline.tokenizer.tiktoken_twin import TiktokenTwin

SAMPLE_TEXTS, SAMPLE_CHARS = 64, 4_000  # Of the given texts, for the proof that tiktoken gives the same ids.


# Tokenizers that are in use: their plain backend and encoder, with their size when these were made.
_backends: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_encoders: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def plain_backend(tokenizer):
    """A copy of the tokenizer's backend that reads control strings as the text they are; not to be changed."""
    from tokenizers import Tokenizer

    backend, known_size = _backends.get(tokenizer, (None, None))
    if known_size != len(tokenizer):  # One that has got new tokens since is another tokenizer.
        backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        _backends[tokenizer] = (backend, len(tokenizer))
    return backend


class Encoder:
    """Encodes lists of texts with one tokenizer, by tiktoken when that proves to give the same ids.

    num_proc: threads; default all cores. (For `tokenizers` it can only be set before its first use in a process.)
    """

    def __init__(self, tokenizer, *, num_proc: int | None = None):
        self.threads = num_proc or os.cpu_count() or 1
        if num_proc:
            os.environ.setdefault("RAYON_NUM_THREADS", str(num_proc))
        self.backend = plain_backend(tokenizer)
        self.dtype = np.uint16 if max(tokenizer.get_vocab().values()) < 2**16 else np.uint32
        self.twin = TiktokenTwin.of(self.backend)
        self.proved = False

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """One array of ids per text: uint16, or uint32 for vocabularies above 65,536."""
        if self.twin is None:
            return self._encode_slowly(texts)
        if not self.proved:
            # Once, on what is about to be encoded: any difference, and tiktoken is out for good.
            sample = [text[:SAMPLE_CHARS] for text in texts[:: max(1, len(texts) // SAMPLE_TEXTS)]]
            self.proved = bool(sample)
            if not self.twin.agrees(self.backend, sample):
                self.twin = None
                return self._encode_slowly(texts)
        return self._encode_by_twin(texts)

    def _encode_slowly(self, texts: list[str]) -> list[np.ndarray]:
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self.dtype) for encoding in encodings]

    def _encode_by_twin(self, texts: list[str]) -> list[np.ndarray]:
        assert self.twin is not None
        if self.threads == 1 or len(texts) < 2:
            found = [self.twin.encode(text) for text in texts]
        else:
            with ThreadPoolExecutor(self.threads) as pool:  # tiktoken works without the interpreter's lock.
                found = list(pool.map(self.twin.encode, texts, chunksize=16))
        return [
            self._encode_slowly([text])[0] if ids is None else ids.astype(self.dtype)
            for text, ids in zip(texts, found, strict=True)
        ]


def encode_documents(tokenizer, texts: list[str], *, num_proc: int | None = None) -> list[np.ndarray]:
    """The ids of each text, without BOS or any other control token. Texts must be encodable as UTF-8."""
    size = (len(tokenizer), num_proc)
    encoder, known_size = _encoders.get(tokenizer, (None, None))
    if encoder is None or known_size != size:
        encoder = Encoder(tokenizer, num_proc=num_proc)
        _encoders[tokenizer] = (encoder, size)
    return encoder.encode(texts)
