"""Tokenizers: trained on the run's own text or ready made, with a chat template, and the raw bytes of every id.

`load_or_train` is the way in; `chat`, `encode` and `byte_lengths` take what it gives.
"""

from pipeline.tokenizer.load import identity, load_or_train

__all__ = ["identity", "load_or_train"]
