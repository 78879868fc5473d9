"""Batches of prompts against one prompt at a time, on models with windows, convolution states and learned positions."""

import pytest
import torch

from pipeline.generation.texts import continuations, document_ids, positions
from pipeline.process.errors import DataError
from tests.conftest import docstrings, shared_data
from tests.model.tiny_models import random_ids, tiny

LENGTHS = [1, 33, 2, 9, 9, 50, 17, 3, 61, 64, 9, 26]
STOPS = set(range(0, 330, 11))  # A row in eleven steps ends, so that most leave a batch early.


def prompts_of(lengths, vocab_size):
    return [random_ids(1, length, seed=n, vocab_size=vocab_size)[0].tolist() for n, length in enumerate(lengths)]


@pytest.mark.parametrize("lengths", [LENGTHS, [9] * 7], ids=["padded", "equal lengths"])
@pytest.mark.parametrize("name", ["gpt2", "modern"])
def test_a_batch_of_any_size_gives_what_each_prompt_gives_alone(name, lengths, tokenizer):
    model = tiny(name, vocab_size=len(tokenizer))
    prompts = prompts_of(lengths, len(tokenizer))
    for sampling in ({}, {"temperature": 1.0, "top_k": 50, "top_p": 0.9}):
        settings = {"max_new_tokens": 20, "stop_ids": STOPS, **sampling}
        alone = continuations(model, tokenizer, prompts, batch_size=1, **settings)
        assert len({len(new) for new in alone}) > 2
        assert len({token for new in alone for token in new}) > 8
        for batch_size in (5, len(prompts)):
            assert continuations(model, tokenizer, prompts, batch_size=batch_size, **settings) == alone


@pytest.mark.parametrize("name", ["gpt2", "modern"])
def test_rows_run_to_the_models_last_position_and_no_further(name, tokenizer):
    model = tiny(name, vocab_size=len(tokenizer))
    prompts = prompts_of(LENGTHS, len(tokenizer))
    found = continuations(model, tokenizer, prompts, batch_size=5, max_new_tokens=40, stop_ids=())
    assert [len(new) for new in found] == [min(40, positions(model) - length) for length in LENGTHS]
    assert found == continuations(model, tokenizer, prompts, batch_size=1, max_new_tokens=40, stop_ids=())


def test_a_trained_model_writes_the_same_in_batches():
    if shared_data() is None:
        pytest.skip("no shared data")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = shared_data() / "reference_model_stories260K"
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    beginnings = ["Once upon a time", "Lily", "The dog and the cat went to the park. ", *docstrings(modules=3)[:9]]
    prompts = [document_ids(tokenizer, text[: 10 + 37 * n])[:450] for n, text in enumerate(beginnings)]
    dots = tokenizer.convert_tokens_to_ids(".")
    settings = {"max_new_tokens": 60, "stop_ids": {tokenizer.eos_token_id, tokenizer.bos_token_id, dots}}
    alone = continuations(model, tokenizer, prompts, batch_size=1, **settings)
    assert len({len(new) for new in alone}) > 3
    assert continuations(model, tokenizer, prompts, batch_size=4, **settings) == alone
    assert continuations(model, tokenizer, prompts, batch_size=len(prompts), **settings) == alone


def test_what_a_batch_goes_through_may_end_it(tokenizer):
    model = tiny("gpt2", vocab_size=len(tokenizer))

    class Enough(Exception):
        pass

    def watched(steps):
        for n, step in enumerate(steps):
            if n == 3:
                raise Enough
            yield step

    with pytest.raises(Enough):
        continuations(
            model, tokenizer, prompts_of([5, 6], 300), batch_size=2, max_new_tokens=9, stop_ids=(), watched=watched
        )
    assert torch.is_grad_enabled()


def test_no_prompts_and_no_tokens_are_nothing(tokenizer):
    model = tiny("gpt2", vocab_size=len(tokenizer))
    assert continuations(model, tokenizer, [], batch_size=4, max_new_tokens=9) == []
    assert continuations(model, tokenizer, [[1, 2], [3]], batch_size=4, max_new_tokens=0) == [[], []]
    with pytest.raises(ValueError, match="nothing to continue"):
        continuations(model, tokenizer, [[1, 2], []], batch_size=2, max_new_tokens=1)
    with pytest.raises(DataError, match="a prompt of 65 tokens is longer than the model's 64 positions"):
        continuations(model, tokenizer, prompts_of([3, 65], 300), batch_size=1, max_new_tokens=1)
