"""Generation token by token and in batches, against transformers' own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.chat.conversation import TextStream
from pipeline.generation.texts import (
    complete,
    continuations,
    document_ids,
    generator_of,
    next_tokens,
    positions,
    stream,
)
from pipeline.process.errors import DataError
from pipeline.tokenizer.encode import encode_documents


def reference(model, ids, *, max_new_tokens):
    """transformers' greedy continuation, without the end token."""
    out = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        do_sample=False,
        max_new_tokens=max_new_tokens,
    )
    new = out[0, len(ids) :].tolist()
    ends = model.generation_config.eos_token_id
    return [i for i in new if i not in (ends if isinstance(ends, list) else [ends])]


PROMPTS = ["def complete", "it's 12345! return", "the model writes after each prompt, it's", "\u00e9\u4e2d"]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_equals_generate(model, tokenizer, prompt):
    ids = document_ids(tokenizer, prompt)
    stops = model.generation_config.eos_token_id
    found = list(
        stream(model, tokenizer, ids, max_new_tokens=40, stop_ids=stops if isinstance(stops, list) else [stops])
    )
    assert found == reference(model, ids, max_new_tokens=40)
    assert len(set(found)) > 3


def test_a_batch_gives_what_each_prompt_gives_alone(model, tokenizer):
    settings = {"chat": False, "max_new_tokens": 30, "seed": 3}
    for sampling in ({}, {"temperature": 0.7, "top_k": 20}):
        alone = complete(model, tokenizer, PROMPTS, **settings, **sampling)
        assert complete(model, tokenizer, PROMPTS, batch_size=3, **settings, **sampling) == alone
        assert len(set(alone)) == len(PROMPTS)


def test_a_prompt_is_sampled_alike_whatever_stands_before_it(model, tokenizer):
    kwargs = {"max_new_tokens": 20, "temperature": 1.0}
    ids = document_ids(tokenizer, "def")
    assert (
        list(stream(model, tokenizer, ids, seed=5, **kwargs))
        == continuations(model, tokenizer, [[1, 2, 3], ids], batch_size=2, seed=4, **kwargs)[1]
    )
    assert list(stream(model, tokenizer, ids, seed=5, **kwargs)) != list(
        stream(model, tokenizer, ids, seed=6, **kwargs)
    )


def test_no_global_random_state_gradient_switch_or_mode_moves(model, tokenizer):
    model.train()
    before = torch.get_rng_state()
    tokens = stream(model, tokenizer, document_ids(tokenizer, "def"), max_new_tokens=10, temperature=1.0, stop_ids=())
    next(tokens)
    assert torch.is_grad_enabled()  # In the middle of a generation, too.
    assert model.training
    list(tokens)
    complete(model, tokenizer, PROMPTS, chat=True, max_new_tokens=5, temperature=1.0, batch_size=4)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    model.eval()


def test_stop_ids_end_the_text_and_are_not_part_of_it(model, tokenizer):
    ids = document_ids(tokenizer, "def complete")
    whole = list(stream(model, tokenizer, ids, max_new_tokens=20, stop_ids=()))
    stop = whole[10]
    assert list(stream(model, tokenizer, ids, max_new_tokens=20, stop_ids={stop})) == whole[: whole.index(stop)]
    together = continuations(model, tokenizer, [ids, ids[:2]], batch_size=2, max_new_tokens=20, stop_ids={stop})
    assert together[0] == whole[: whole.index(stop)]


def test_generation_ends_where_the_models_positions_end(model, tokenizer):
    limit = positions(model)
    ids = encode_documents(tokenizer, ["prompt " * 200])[0].tolist()
    near = ids[: limit - 3]
    assert len(list(stream(model, tokenizer, near, max_new_tokens=20, stop_ids=()))) == 3
    found = continuations(model, tokenizer, [near, near[:50]], batch_size=2, max_new_tokens=20, stop_ids=())
    assert [len(new) for new in found] == [3, 20]
    assert found[1] == list(stream(model, tokenizer, near[:50], max_new_tokens=20, stop_ids=()))
    with pytest.raises(DataError, match="97 tokens is longer than the model's 96 positions"):
        next(stream(model, tokenizer, ids[: limit + 1], max_new_tokens=1))
    with pytest.raises(ValueError, match="nothing to continue"):
        next(stream(model, tokenizer, [], max_new_tokens=1))


def test_top_k_and_top_p_keep_their_own_tokens_per_row():
    logits_V = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
    logits_BV = torch.stack([logits_V, logits_V[[2, 0, 3, 1]] + 5])

    def drawn(**kwargs):
        generators = [generator_of(0), generator_of(1)]
        sampling = {"temperature": 1.0, "top_k": None, "top_p": None} | kwargs
        first, second = zip(
            *(next_tokens(logits_BV, generators=generators, **sampling) for _ in range(300)), strict=True
        )
        assert {[2, 0, 3, 1][token] for token in second} == set(first)
        return set(first)

    assert drawn() == {0, 1, 2, 3}
    assert drawn(top_k=2) == {0, 1}
    assert drawn(top_p=0.5) == {0}
    assert drawn(top_p=0.51) == {0, 1}
    assert drawn(top_p=0.0) == {0}
    assert drawn(top_k=3, top_p=0.99) == {0, 1, 2}
    assert drawn(temperature=0) == {0}
    assert drawn(temperature=0.05) == {0}


def test_draws_follow_the_softmax_at_the_temperature():
    logits_V = torch.tensor([2.0, 1.0, 0.0])
    generator = generator_of(1)
    counts = torch.zeros(3)
    for _ in range(4000):
        counts[next_tokens(logits_V[None], temperature=2.0, top_k=None, top_p=None, generators=[generator])] += 1
    assert torch.allclose(counts / 4000, (logits_V / 2).softmax(-1), atol=0.03)


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_streamed_pieces_make_the_whole_text_and_never_show_half_a_character(tokenizer, text):
    shown = TextStream(tokenizer)
    pieces = [shown.push(int(i)) for i in encode_documents(tokenizer, [text])[0]]
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + shown.rest() == text


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(0, 255), max_size=12))
def test_bytes_that_are_no_characters_are_shown_as_the_tokenizer_decodes_them(tokenizer, ids):
    shown = TextStream(tokenizer)
    pieces = [shown.push(i) for i in ids]
    assert "".join(pieces) + shown.rest() == tokenizer.decode(ids)


def test_a_model_without_a_cache_is_refused_in_a_sentence(tokenizer):
    from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

    model = OpenAIGPTLMHeadModel(
        OpenAIGPTConfig(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=32)
    )
    with pytest.raises(DataError, match=r"^OpenAIGPTLMHeadModel keeps no cache"):
        list(stream(model, tokenizer, document_ids(tokenizer, "def"), max_new_tokens=4))
