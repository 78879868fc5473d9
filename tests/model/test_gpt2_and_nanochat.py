"""Weights of transformers' own architectures go in and out, with their logits."""

import json

import pytest
import torch
from tiny_models import GPT2, MODERN, NANOCHAT, SIZES, TOKENS, random_ids, stirred, tiny
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, NanoChatConfig, NanoChatForCausalLM

from pipeline.model.build import build_model
from pipeline.model.configuration_tandem import TandemConfig
from pipeline.model.load import load_model
from pipeline.model.modeling_tandem import TandemForCausalLM
from pipeline.model.saved import load_weights, save_model

IDS = random_ids(3, 40)


def gpt2(**changes):
    torch.manual_seed(0)
    return stirred(GPT2LMHeadModel(GPT2Config(**SIZES, **TOKENS, **changes))).eval()


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}, {"scale_attn_by_inverse_layer_idx": True}])
def test_a_config_without_extras_is_gpt2_and_takes_its_state_dict(changes):
    stock = gpt2(**changes)
    ours = TandemForCausalLM(TandemConfig(**SIZES, **TOKENS, **changes)).eval()
    ours.load_state_dict(stock.state_dict(), strict=True)
    assert torch.equal(ours(IDS).logits, stock(IDS).logits)


def test_a_saved_gpt2_loads_as_tandem_and_saves_back_as_gpt2(tmp_path):
    stock = gpt2()
    stock.save_pretrained(tmp_path / "stock")
    ours = load_model(tmp_path / "stock")
    assert isinstance(ours, TandemForCausalLM)
    save_model(ours, tmp_path / "back")
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert written["model_type"] == "gpt2"
    assert written["architectures"] == ["GPT2LMHeadModel"]
    assert not list((tmp_path / "back").glob("*.py"))
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert type(back) is GPT2LMHeadModel
    assert torch.equal(back(IDS).logits, stock(IDS).logits)
    assert torch.equal(ours(IDS).logits, stock(IDS).logits)


def test_modern_restricted_to_nanochats_options_is_nanochat(tmp_path):
    ours = stirred(build_model("tandem", NANOCHAT, seed=1)).eval()
    save_model(ours, tmp_path)
    assert not list(tmp_path.glob("*.py"))
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(stock) is NanoChatForCausalLM
    assert (stock(IDS).logits - ours(IDS).logits).abs().max() <= 1e-6
    mask = torch.ones_like(IDS)
    answers = [
        m.generate(IDS[:1, :8], attention_mask=mask[:1, :8], max_new_tokens=12, do_sample=False) for m in (stock, ours)
    ]
    assert torch.equal(*answers)


def test_a_nanochat_of_transformers_loads_as_tandem_with_its_logits(tmp_path):
    torch.manual_seed(0)
    config = NanoChatConfig(
        vocab_size=101, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=1, max_position_embeddings=64, final_logit_softcapping=None,
    )  # fmt: skip
    stock = stirred(NanoChatForCausalLM(config)).eval()
    stock.save_pretrained(tmp_path)
    ours = load_model(tmp_path)
    assert isinstance(ours, TandemForCausalLM)
    assert (stock(IDS).logits - ours(IDS).logits).abs().max() <= 1e-6


# How weights began is not what they compute, a window without a pattern is none, and padding rows are not written.
BEYOND = [
    name
    for name in MODERN
    if MODERN[name] != NANOCHAT.get(name) and name not in ("initialization", "sliding_window", "vocab_multiple")
]


@pytest.mark.parametrize("option", BEYOND)
def test_a_single_option_beyond_nanochats_is_saved_with_code(tmp_path, option):
    save_model(build_model("tandem", NANOCHAT | {option: MODERN[option]}, seed=1), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "tandem"


@pytest.mark.parametrize(
    "fields", [GPT2, NANOCHAT, MODERN | {"vocab_multiple": 1}], ids=["gpt2", "nanochat", "modern"]
)
def test_saved_weights_come_back_bit_for_bit(tmp_path, fields):
    model = stirred(build_model("tandem", fields, seed=1))
    save_model(model, tmp_path)
    other = build_model("tandem", fields, seed=2)
    load_weights(other, tmp_path)
    for (name, one), (_, two) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(one, two), name


def test_weights_of_another_shape_are_refused_with_the_folders_name(tmp_path):
    save_model(tiny("modern"), tmp_path)
    with pytest.raises(ValueError, match=rf"{tmp_path}.*not \(64, 48\)|{tmp_path}.*(101|128)"):
        load_weights(tiny("modern", vocab_size=33), tmp_path)
    with pytest.raises(ValueError, match="is missing"):
        load_weights(tiny("modern", n_layer=6), tmp_path)


def test_a_folder_whose_weights_are_not_its_configs_does_not_load(tmp_path):
    save_model(tiny("modern"), tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(written | {"n_layer": 5}))
    with pytest.raises(ValueError, match="missing keys"):
        load_model(tmp_path)
