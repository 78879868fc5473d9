"""A tokenizer small enough to tell its tokens by eye."""

import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pipeline.tokenizer.chat import built_in_template
from pipeline.tokenizer.encode import BOS, END, PAD, SPECIALS

SHARED = Path(os.environ.get("TANDEM_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))


@pytest.fixture(scope="session")
def tokenizer():
    """A byte-level tokenizer of 256 bytes and the specials."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {c: i for i, c in enumerate([*alphabet, *SPECIALS])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=END, pad_token=PAD)
    made.add_special_tokens({"additional_special_tokens": list(SPECIALS)})
    made.chat_template = built_in_template(list(SPECIALS))
    return made


@pytest.fixture(scope="session")
def stories() -> Path:
    """The folder of trained reference weights, where it is there."""
    folder = SHARED / "reference_model_stories260K"
    if not folder.is_dir():
        pytest.skip(f"no reference weights in {folder}")
    return folder
