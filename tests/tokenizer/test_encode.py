"""Fast encoding."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.tokenizer.encode import SPECIALS, Encoder, TiktokenTwin, control_ids, encode_documents, plain_backend

TEXTS = [
    "Hello world, it's 12345!",
    "",
    "  \n\n x",
    "\u4e2d\u6587 e\u0301 \U0001f600",
    "def f(x):\n\treturn x",
    "".join(SPECIALS),
]


@pytest.fixture(params=["tokenizer", "gpt2"], scope="module")
def byte_level(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def proved(byte_level):
    """An encoder that has compared tiktoken with tokenizers."""
    encoder = Encoder(byte_level)
    encoder.encode(TEXTS)
    return encoder


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=5))
def test_tiktoken_gives_the_ids_of_tokenizers_for_any_unicode(byte_level, proved, texts):
    assert proved.twin is not None
    slow = [e.ids for e in plain_backend(byte_level).encode_batch(texts, add_special_tokens=False)]
    assert [ids.tolist() for ids in proved.encode(texts)] == slow


def test_text_that_spells_control_tokens_stays_text(byte_level):
    for text, ids in zip(TEXTS, encode_documents(byte_level, TEXTS), strict=True):
        assert ids.dtype == np.uint16
        assert not set(ids.tolist()) & control_ids(byte_level)
        assert byte_level.decode(ids) == text


def test_a_twin_that_differs_is_dropped(tokenizer):
    encoder = Encoder(tokenizer)
    other = Encoder(tokenizer).twin
    other.encode = lambda text: np.array([1], dtype=np.uint32)
    encoder.twin = other
    assert [ids.tolist() for ids in encoder.encode(TEXTS)] == [
        ids.tolist() for ids in Encoder(tokenizer).encode(TEXTS)
    ]
    assert encoder.twin is None


def test_runs_of_a_million_spaces_are_encoded_and_panic_nowhere(tokenizer, capfd):
    texts = ["a" + " " * 1_100_000 + "b", "\n" * 1_100_000]
    found = encode_documents(tokenizer, texts)
    assert [tokenizer.decode(ids) == text for ids, text in zip(found, texts, strict=True)] == [True, True]
    assert "panicked" not in capfd.readouterr().err


def test_a_panic_of_tiktoken_sends_that_text_the_other_way(tokenizer, monkeypatch):
    class PanicException(BaseException):
        pass

    def panic(*_, **__):
        raise PanicException("StackOverflow")

    encoder = Encoder(tokenizer)
    encoder.encode(TEXTS)
    monkeypatch.setattr(encoder.twin.encoding, "encode_to_numpy", panic)
    assert [ids.tolist() for ids in encoder.encode(TEXTS)] == [
        ids.tolist() for ids in encode_documents(tokenizer, TEXTS)
    ]


def test_encoding_by_tokenizers_and_with_one_thread_gives_the_same(tokenizer, monkeypatch):
    expected = [ids.tolist() for ids in encode_documents(tokenizer, TEXTS)]
    assert [ids.tolist() for ids in encode_documents(tokenizer, TEXTS, num_proc=1)] == expected
    monkeypatch.setattr(TiktokenTwin, "of", lambda backend: None)
    encoder = Encoder(tokenizer)
    assert encoder.twin is None
    assert [ids.tolist() for ids in encoder.encode(TEXTS)] == expected


def test_a_tokenizer_that_is_not_byte_level_goes_without_tiktoken(stories):
    ids = encode_documents(stories, ["Once <s> upon"])[0].tolist()
    assert not set(ids) & control_ids(stories)
    assert stories.decode(ids) == "Once <s> upon"


def test_a_tokenizer_that_got_new_tokens_is_encoded_anew(gpt2):
    import copy

    widened = copy.deepcopy(gpt2)
    before = encode_documents(widened, ["say xyzzy"])[0]
    widened.add_tokens(["xyzzy"])
    after = encode_documents(widened, ["say xyzzy"])[0]
    assert len(after) < len(before)
