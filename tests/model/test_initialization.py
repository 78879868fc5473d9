"""Initial weights: none forgotten, each with the statistics its option promises, the same from the same seed."""

import math

import pytest
import torch
from tiny_models import FIELDS, GPT2, MODERN

from pipeline.model.build import build_model
from pipeline.model.configuration_tandem import TandemConfig
from pipeline.model.modeling_tandem import TandemForCausalLM

WIDE = {"n_embd": 256, "vocab_size": 1000, "n_layer": 6}


def spread(weight):
    return weight.std().item()


@pytest.mark.parametrize("initialization", ["gpt2", "nanochat"])
@pytest.mark.parametrize("fields", [GPT2, MODERN], ids=["gpt2", "modern"])
def test_initialization_leaves_no_parameter_as_it_was(fields, initialization):
    config = TandemConfig(**fields | {"initialization": initialization})
    with torch.device("meta"):
        model = TandemForCausalLM(config)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    for module in model.modules():
        module._is_hf_initialized = False
    model.init_weights()
    poisoned = [name for name, parameter in model.named_parameters() if parameter.isnan().any()]
    assert poisoned == []


def test_gpt2s_weights_are_normal_and_its_outputs_are_scaled_by_depth():
    model = build_model("tandem", GPT2 | WIDE, seed=1)
    block = model.transformer.h[0]
    for weight in (model.transformer.wte.weight, block.attn.c_attn.weight, block.mlp.c_fc.weight):
        assert spread(weight) == pytest.approx(0.02, rel=0.02)
    for weight in (block.attn.c_proj.weight, block.mlp.c_proj.weight):
        assert spread(weight) == pytest.approx(0.02 / math.sqrt(12), rel=0.02)
    assert torch.equal(block.attn.c_attn.bias, torch.zeros(768))
    assert torch.equal(block.ln_1.weight, torch.ones(256))
    assert model.lm_head.weight is model.transformer.wte.weight


def test_moderns_weights_are_nanochats():
    model = build_model("tandem", MODERN | WIDE, seed=1)
    trunk, bound = model.transformer, math.sqrt(3 / 256)
    assert spread(trunk.wte.weight) == pytest.approx(0.8, rel=0.02)
    assert spread(model.lm_head.weight) == pytest.approx(0.001, rel=0.02)
    for block in trunk.h:
        uniform = [
            (block.attn.c_q, bound),
            (block.attn.c_k, bound),
            (block.attn.c_v, bound),
            (block.mlp.c_fc, 0.4 * bound),
        ]
        for module, limit in uniform:
            assert spread(module.weight) == pytest.approx(limit / math.sqrt(3), rel=0.02)
            assert module.weight.abs().max() <= limit
        assert not block.attn.c_proj.weight.any()
        assert not block.mlp.c_proj.weight.any()
    assert [hasattr(block.attn, "value_embedding") for block in trunk.h] == [False, True] * 3
    assert spread(trunk.h[5].attn.value_embedding.weight) == pytest.approx(1 / 16, rel=0.02)
    for gate in (trunk.h[5].attn.value_gate, trunk.smear_gate):
        assert 0 <= gate.weight.min() <= gate.weight.max() <= 0.02
        assert spread(gate.weight) == pytest.approx(0.02 / math.sqrt(12), rel=0.4)
    torch.testing.assert_close(trunk.resid_lambdas.data, torch.tensor([1.15, 1.13, 1.11, 1.09, 1.07, 1.05]))
    torch.testing.assert_close(trunk.x0_lambdas.data, torch.tensor([0.20, 0.17, 0.14, 0.11, 0.08, 0.05]))
    assert trunk.smear_lambda.item() == 0
    assert trunk.backout_lambda.item() == pytest.approx(0.2)


def test_bigram_embeddings_begin_at_zero_and_leave_the_other_weights_alone():
    plain, bigrams = (build_model("tandem", FIELDS[name], seed=1).state_dict() for name in ("modern", "bigrams"))
    assert not bigrams.pop("transformer.bigram_embedding.weight").any()
    assert torch.equal(bigrams.pop("transformer.bigram_lambdas"), torch.full((4,), 0.1))
    assert plain.keys() == bigrams.keys()
    assert all(torch.equal(plain[key], bigrams[key]) for key in plain)


@pytest.mark.parametrize("name", ["gpt2", "modern"])
def test_weights_are_a_function_of_the_seed_and_move_no_generator(name):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first = build_model("tandem", FIELDS[name], seed=1).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(8)
    again = build_model("tandem", FIELDS[name], seed=1).state_dict()
    other = build_model("tandem", FIELDS[name], seed=2).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["transformer.wte.weight"], other["transformer.wte.weight"])
