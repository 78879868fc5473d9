"""FLOPs per token, by arithmetic, against torch's own count of what the model executes and a count of visible pairs."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from pipeline.model.build import build_model
from pipeline.recipe.model_sizes import sizes_from_config
from pipeline.recipe.sizes import MODERN

ROW_TOKENS = 96
IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
GPT2 = {"n_layer": 3, "n_embd": 64, "n_head": 4, "n_positions": ROW_TOKENS, "vocab_size": 320, **IDS}
PLAIN = {**MODERN, "value_embeddings": False, "smear": False, "window_pattern": None}
SHAPES = {
    "gpt2": ("gpt2", GPT2),
    "tandem as gpt2": ("tandem", {**GPT2, "n_inner": 96}),
    "modern, all heads": ("tandem", {**PLAIN, **GPT2, "n_layer": 4}),
    "grouped queries": ("tandem", {**PLAIN, **GPT2, "n_kv_head": 1, "vocab_size": 500}),
    "value embeddings": ("tandem", {**MODERN, **GPT2, "n_layer": 5, "n_kv_head": 2, "window_pattern": None}),
    "windows": ("tandem", {**MODERN, **GPT2, "n_layer": 4, "n_embd": 96, "n_head": 3, "sliding_window": 24, "bigram_embeddings": 99}),
    "llama": (
        "llama",
        {
            "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
            "intermediate_size": 160, "vocab_size": 320, "max_position_embeddings": ROW_TOKENS, **IDS,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_flops_of_full_attention_are_those_the_model_executes(shape):
    model_type, fields = SHAPES[shape]
    model = build_model(model_type, fields, attn_implementation="eager", seed=0)
    input_ids = torch.randint(0, 320, (2, ROW_TOKENS))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=input_ids, use_cache=False).logits.float().sum().backward()
    sizes = sizes_from_config(model.config, ROW_TOKENS)
    executed = counter.get_total_flops() / input_ids.numel()
    assert sizes.flops_per_token("full") == pytest.approx(executed, rel=0.01)


@pytest.mark.parametrize("shape", ["gpt2", "windows"])
def test_the_training_step_with_its_chunked_loss_executes_no_more(shape):
    model_type, fields = SHAPES[shape]
    model = build_model(model_type, fields, attn_implementation="eager", seed=0).train()
    input_ids = torch.randint(0, 320, (2, ROW_TOKENS))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=input_ids, labels=input_ids, use_cache=False).loss.backward()
    sizes = sizes_from_config(model.config, ROW_TOKENS)
    executed = counter.get_total_flops() / input_ids.numel()
    assert sizes.flops_per_token("full") == pytest.approx(executed, rel=0.01)


@pytest.mark.parametrize("shape", SHAPES)
def test_exact_causal_flops_count_the_pairs_that_each_layer_sees(shape):
    model_type, fields = SHAPES[shape]
    model = build_model(model_type, fields, attn_implementation="eager", seed=0).eval()
    # What a query sees is read off the model: eager attention's weights above zero.
    attentions = model(input_ids=torch.randint(0, 320, (1, ROW_TOKENS)), output_attentions=True).attentions
    pairs = sum(int((weights[0, 0] > 0).sum()) for weights in attentions)
    sizes = sizes_from_config(model.config, ROW_TOKENS)
    all_pairs = sizes.n_layer * ROW_TOKENS**2
    per_pair = 12 * sizes.n_head * sizes.head_dim / ROW_TOKENS  # two products, each again twice in the backward pass
    expected = sizes.flops_per_token("full") - per_pair * (all_pairs - pairs)
    assert sizes.flops_per_token("exact_causal") == pytest.approx(expected, rel=1e-9)
    if shape == "windows":
        assert pairs < sizes.n_layer * ROW_TOKENS * (ROW_TOKENS + 1) / 2
