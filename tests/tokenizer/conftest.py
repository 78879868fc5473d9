"""Tokenizers that the tests of this folder share, trained once on the texts below."""

import os
from pathlib import Path

import pytest

from pipeline.tokenizer.train import train_bpe

TEXTS = [Path(__file__).read_text(), "The quick brown fox can't jump over 12345 lazy dogs; it's 3.14! " * 20] + [
    path.read_text() for path in sorted(Path(__file__).parents[2].glob("pipeline/tokenizer/*.py"))
]
SHARED = Path(os.environ.get("TANDEM_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))


@pytest.fixture(scope="session")
def tokenizer():
    return train_bpe(TEXTS, vocab_size=700, split_pattern="nanochat")


def _shared(name):
    from transformers import AutoTokenizer

    if not (SHARED / name).is_dir():
        pytest.skip(f"{name} is not here")
    return AutoTokenizer.from_pretrained(SHARED / name)


@pytest.fixture(scope="session")
def gpt2():
    return _shared("tokenizer_gpt2")


@pytest.fixture(scope="session")
def stories():
    return _shared("reference_model_stories260K")
