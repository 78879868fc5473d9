"""The raw bytes of every id."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.tokenizer.coverage import span_byte_lengths
from pipeline.tokenizer.encode import (
    SPECIALS,
    byte_lengths,
    control_ids,
    encode_documents,
    is_byte_level,
)

anything = st.text(st.characters(exclude_categories=["Cs"]))
quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=["tokenizer", "gpt2"], scope="module")
def byte_level(request):
    """A tokenizer and its byte lengths."""
    tokenizer = request.getfixturevalue(request.param)
    return tokenizer, byte_lengths(tokenizer)


@quick
@given(
    text=st.one_of(
        anything,
        st.lists(st.sampled_from([*SPECIALS, "<|endoftext|>", "<", "|>", " ", "e\u0301", "\U0001f600", "\u4e2d"])).map(
            "".join
        ),
    )
)
def test_bytes_of_a_texts_ids_sum_to_its_utf8_length(byte_level, text):
    tokenizer, lengths_V = byte_level
    ids = encode_documents(tokenizer, [text])[0]
    assert lengths_V[ids].sum() == len(text.encode())
    assert lengths_V[ids].all()


@quick
@given(text=anything)
def test_spans_of_a_texts_ids_cover_every_byte_once_for_any_tokenizer(tokenizer, gpt2, stories, text):
    for each in (tokenizer, gpt2, stories):
        ids, lengths = span_byte_lengths(each, text)
        assert len(ids) == len(lengths)
        assert sum(lengths) == len(text.encode())


def test_control_tokens_and_ids_that_do_not_exist_have_no_bytes(tokenizer):
    lengths_V = byte_lengths(tokenizer)
    assert lengths_V.dtype == np.int32
    assert lengths_V.shape == (len(tokenizer),)
    assert [i for i, length in enumerate(lengths_V) if length == 0] == sorted(control_ids(tokenizer))


def test_half_a_character_counts_only_its_own_bytes_and_no_replacement(tokenizer):
    ids = encode_documents(tokenizer, ["\u4e2d"])[0]
    assert len(ids) > 1
    assert byte_lengths(tokenizer)[ids].tolist() == [1] * 3


def test_added_words_that_are_text_count_their_utf8_bytes(gpt2):
    import copy

    widened = copy.deepcopy(gpt2)
    widened.add_tokens(["stra\u00dfe"])
    assert byte_lengths(widened)[widened.convert_tokens_to_ids("stra\u00dfe")] == 7


def test_a_tokenizer_without_fixed_bytes_is_refused_and_fallback_counted_once(stories):
    assert not is_byte_level(stories)
    with pytest.raises(ValueError, match="span_byte_lengths"):
        byte_lengths(stories)
    ids, lengths = span_byte_lengths(stories, "Hi \u4e2d!")
    assert len([i for i in ids if stories.convert_ids_to_tokens(i).startswith("<0x")]) == 3
    assert sum(lengths) == 7
