"""What a token sees: causality, windows, packed documents, padding, and the cache that must not change any of it."""

import pytest
import torch
from tiny_models import random_ids, tiny
from transformers import DynamicCache

ATTENTIONS = ["eager", "sdpa", "flex_attention"]


@pytest.fixture(params=["gpt2", "modern", "bigrams"])
def name(request):
    return request.param


@pytest.fixture(params=ATTENTIONS)
def implementation(request):
    # flex_attention spelt out: compiling it for each length of these tests takes minutes on a CPU.
    with torch.compiler.set_stance("force_eager"):
        yield request.param


def logits(model, ids, **given):
    with torch.no_grad():
        return model(ids, **given).logits


def generated(model, ids, *, length=30, **given):
    mask = given.pop("attention_mask", torch.ones_like(ids))
    return model.generate(ids, attention_mask=mask, max_new_tokens=length, do_sample=False, eos_token_id=None, **given)


def visible_pairs(model, length):
    """How many (query, key) pairs each layer's attention function is allowed to use, counted on eager's weights."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(random_ids(1, length), output_attentions=True).attentions
    return [int((weights[0, 0] > 0).sum()) for weights in attentions]


def test_a_window_sees_itself_and_the_tokens_before_and_the_last_all():
    model = tiny("modern", sliding_window=9)
    full = 30 * 31 // 2
    windowed = sum(min(t + 1, 9) for t in range(30))
    assert visible_pairs(model, 30) == [windowed, windowed, windowed, full]
    assert model.config.windows == [9, 9, 9, None]


def test_the_default_window_is_a_quarter_of_the_row_plus_the_token():
    assert tiny("modern", n_positions=2048, sliding_window=None).config.sliding_window == 513
    assert tiny("modern", n_positions=256, sliding_window=None).config.sliding_window == 129


def test_attention_implementations_agree(model, implementation):
    expected = logits(model, random_ids(2, 40))
    model.set_attn_implementation(implementation)
    assert (logits(model, random_ids(2, 40)) - expected).abs().max() <= 1e-5


def test_a_later_token_changes_no_earlier_logits(model):
    ids = random_ids(2, 40)
    changed = ids.clone()
    changed[:, 25:] = random_ids(2, 15, seed=9)
    assert torch.equal(logits(model, ids)[:, :25], logits(model, changed)[:, :25])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_generation_with_a_cache_is_generation_without(model, attention):
    model.set_attn_implementation(attention)
    ids = random_ids(2, 12)  # longer than the window
    expected = generated(model, ids, use_cache=False)
    assert torch.equal(generated(model, ids), expected)
    assert torch.equal(generated(model, ids, cache_implementation="static", disable_compile=True), expected)
    assert torch.equal(generated(model, ids, past_key_values=DynamicCache()), expected)


def test_a_static_cache_keeps_the_window_of_a_smearing_first_layer():
    model = tiny("modern", window_pattern="SLLL")
    given = {"length": 3, "output_logits": True, "return_dict_in_generate": True}
    static = generated(model, random_ids(2, 24), cache_implementation="static", disable_compile=True, **given)
    dynamic = generated(model, random_ids(2, 24), **given)
    assert (torch.stack(static.logits) - torch.stack(dynamic.logits)).abs().max() <= 1e-5


def test_a_cache_filled_in_pieces_gives_the_logits_of_the_whole(model):
    ids = random_ids(2, 40)
    cache, parts, start = DynamicCache(config=model.config), [], 0
    for length in (1, 12, 1, 20, 6):
        parts.append(logits(model, ids[:, start : start + length], past_key_values=cache, use_cache=True))
        start += length
    assert (torch.cat(parts, 1) - logits(model, ids)).abs().max() <= 1e-5


def test_a_window_layers_cache_keeps_no_more_than_its_window():
    model = tiny("modern", sliding_window=9)
    cache = DynamicCache(config=model.config)
    logits(model, random_ids(1, 40), past_key_values=cache, use_cache=True)
    assert [layer.keys.shape[-2] for layer in cache.layers] == [8, 8, 8, 40]


def test_beam_search_reorders_smears_state_with_the_cache(model):
    ids = random_ids(2, 7)
    beams = {"num_beams": 3, "length": 12}
    assert torch.equal(generated(model, ids, **beams), generated(model, ids, use_cache=False, **beams))


def test_a_left_padded_batch_is_its_rows_alone(model, implementation):
    model.set_attn_implementation(implementation)
    short, long = random_ids(1, 6, seed=3), random_ids(1, 20, seed=4)
    ids = torch.cat([torch.cat([torch.full((1, 14), 2), short], 1), long])
    mask = (torch.arange(20) >= torch.tensor([[14], [0]])).long()
    together = logits(model, ids, attention_mask=mask)
    assert (together[0, 14:] - logits(model, short)[0]).abs().max() <= 1e-5
    assert (together[1] - logits(model, long)[0]).abs().max() <= 1e-5
    if implementation == "sdpa":
        tokens = generated(model, ids, attention_mask=mask)
        assert torch.equal(tokens[0, 20:], generated(model, short)[0, 6:])
        assert torch.equal(tokens[1, 20:], generated(model, long)[0, 20:])


def test_packed_documents_do_not_see_each_other(model, implementation):
    model.set_attn_implementation(implementation)
    documents = [random_ids(1, length, seed=length) for length in (5, 1, 22, 12)]
    positions = torch.cat([torch.arange(d.shape[1]) for d in documents])[None]
    packed = logits(model, torch.cat(documents, 1), position_ids=positions)
    alone = torch.cat([logits(model, document) for document in documents], 1)
    assert (packed - alone).abs().max() <= 1e-5


def test_rows_of_a_batch_are_packed_each_in_its_own_way(model):
    ids = random_ids(2, 12)
    positions = torch.stack([torch.arange(12), torch.tensor([*range(7), *range(5)])])
    packed = logits(model, ids, position_ids=positions)
    assert (packed[:1] - logits(model, ids[:1])).abs().max() <= 1e-5
    assert (packed[1:, 7:] - logits(model, ids[1:, 7:])).abs().max() <= 1e-5


def test_nothing_masked_hands_sdpa_no_mask(model, name, monkeypatch):
    masks = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def recording(*given, attn_mask=None, is_causal=False, **more):
        masks.append((attn_mask is None, is_causal))
        return attend(*given, attn_mask=attn_mask, is_causal=is_causal, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recording)
    model.train()
    model(random_ids(2, 40))
    assert masks == [(name == "gpt2", name == "gpt2")] * 3 + [(True, True)]
    masks.clear()
    model(random_ids(2, 9))  # no longer than the window: nothing to hide
    assert masks == [(True, True)] * 4


def test_hidden_states_of_every_layer_can_be_asked_for(model):
    assert len(model(random_ids(1, 9), output_hidden_states=True).hidden_states) == 5


def test_a_row_longer_than_the_learned_positions_is_refused_in_words():
    with pytest.raises(ValueError, match="70 tokens: the model has 64 learned positions"):
        tiny("gpt2")(random_ids(1, 70))
    tiny("modern")(random_ids(1, 70))  # rope has no end
