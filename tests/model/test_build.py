"""Models by name, and wrong options refused in a sentence."""

import pytest
import torch
from tiny_models import GPT2, MODERN, random_ids, tiny
from transformers import LlamaForCausalLM

from pipeline.model.build import build_model
from pipeline.model.errors import ModelOptionsError
from pipeline.model.groups import parameter_group
from pipeline.model.load import load_model
from pipeline.model.saved import load_weights, save_model

LLAMA = {
    "vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip


def test_any_causal_lm_of_transformers_is_built_saved_and_loaded(tmp_path):
    model = build_model("llama", LLAMA, seed=1).eval()
    assert type(model) is LlamaForCausalLM
    save_model(model, tmp_path)
    loaded = load_model(tmp_path)
    assert torch.equal(loaded(random_ids(2, 9)).logits, model(random_ids(2, 9)).logits)
    other = build_model("llama", LLAMA, seed=2)
    load_weights(other, tmp_path)
    assert torch.equal(other.lm_head.weight, model.lm_head.weight)


def test_a_model_of_the_users_own_is_built_from_its_class():
    model = build_model(LlamaForCausalLM, LLAMA, seed=1)
    assert type(model) is LlamaForCausalLM
    assert model.generation_config.eos_token_id == [1, 0]


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("lama", LLAMA, "model.type: lama is no causal language model of transformers. Did you mean llama"),
        ("bert_", {}, "model.type: bert_"),
        ("tandem", GPT2 | {"softcap": 15}, "no field softcap"),
        ("tandem", GPT2 | {"value_embedding": True}, "did you mean value_embeddings"),
        ("tandem", GPT2 | {"n_head": 5}, "n_embd 48 is not a multiple of n_head 5"),
        ("tandem", GPT2 | {"n_kv_head": 3}, "n_head 4 is not a multiple of n_kv_head 3"),
        ("tandem", GPT2 | {"n_layer": 0}, "n_layer is 0"),
        ("tandem", GPT2 | {"n_layer": "4"}, "n_layer"),
        ("tandem", GPT2 | {"normalization": "batch_norm"}, "normalization"),
        ("tandem", MODERN | {"window_pattern": "SXL"}, "window_pattern 'SXL' must be letters S"),
        ("tandem", MODERN | {"window_pattern": ""}, "window_pattern"),
        ("tandem", MODERN | {"sliding_window": 0}, "sliding_window 0 must be at least 1"),
        ("tandem", MODERN | {"n_embd": 12, "n_head": 4}, "smear reads 24 channels"),
        ("tandem", MODERN | {"n_embd": 36, "n_head": 12}, "rope turns pairs of channels"),
        ("tandem", GPT2 | {"final_logit_softcapping": -1.0}, "final_logit_softcapping -1.0 must be positive"),
        ("tandem", GPT2 | {"add_cross_attention": True}, "add_cross_attention is not supported"),
        ("llama", LLAMA | {"n_layer": 3}, "LlamaConfig of model.type llama has no field n_layer"),
    ],
)
def test_a_model_that_cannot_be_is_refused_with_its_reason(model_type, fields, message):
    with pytest.raises(ModelOptionsError, match="model") as error:
        build_model(model_type, fields, seed=1)
    assert message in str(error.value)


def test_two_mistakes_are_reported_at_once():
    with pytest.raises(ModelOptionsError, match=r"n_head 5.*vocab_multiple 0"):
        build_model("tandem", GPT2 | {"n_head": 5, "vocab_multiple": 0}, seed=1)


def test_every_parameter_has_the_group_of_what_it_does():
    groups = {name: parameter_group(name, p) for name, p in tiny("bigrams").named_parameters()}
    assert groups["transformer.wte.weight"] == "embeddings"
    assert groups["transformer.h.1.attn.value_embedding.weight"] == "value_embeddings"
    assert groups["transformer.h.1.attn.value_gate.weight"] == "matrices"
    assert groups["transformer.bigram_embedding.weight"] == "embeddings"
    assert groups["transformer.bigram_lambdas"] == "scalars"
    assert groups["transformer.smear_gate.weight"] == "gates"
    assert groups["transformer.resid_lambdas"] == "scalars"
    assert groups["transformer.x0_lambdas"] == "x0_lambdas"
    assert groups["lm_head.weight"] == "head"
    assert {group for name, group in groups.items() if ".c_" in name} == {"matrices"}


def test_groups_of_gpt2_and_of_other_models_follow_the_same_rule():
    groups = {name: parameter_group(name, p) for name, p in tiny("gpt2").named_parameters()}
    assert {n for n, g in groups.items() if g == "embeddings"} == {"transformer.wte.weight", "transformer.wpe.weight"}
    assert "head" not in groups.values()  # tied
    assert {g for n, g in groups.items() if n.endswith("bias") or ".ln_" in n} == {"scalars"}
    llama = {name: parameter_group(name, p) for name, p in build_model("llama", LLAMA, seed=1).named_parameters()}
    assert {n for n, g in llama.items() if g == "embeddings"} == {"model.embed_tokens.weight"}
    assert {n for n, g in llama.items() if g == "head"} == {"lm_head.weight"}
    assert {g for n, g in llama.items() if "norm" in n} == {"scalars"}
    assert {g for n, g in llama.items() if "_proj" in n} == {"matrices"}
    neox = {"gpt_neox.embed_in.weight": "embeddings", "embed_out.weight": "head"}
    neox["gpt_neox.layers.0.attention.output.weight"] = "matrices"
    assert {name: parameter_group(name, torch.empty(4, 4)) for name in neox} == neox
