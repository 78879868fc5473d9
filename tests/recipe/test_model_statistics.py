"""What is planned of a model type of transformers is what training builds, and its FLOPs are those that torch executes."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pipeline.model.build import build_model
from pipeline.model.errors import ModelOptionsError
from pipeline.process.errors import RecipeError
from pipeline.recipe import read_recipe
from pipeline.recipe.model_sizes import model_fields, sizes_of
from pipeline.recipe.sizes import SizesUnknownError
from pipeline.run.checks import named_code_problems
from pipeline.training import build

DENSE = ("apertus", "bert", "bloom", "cohere", "falcon", "gemma2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "llama", "mistral", "mpt", "nanochat", "olmo3", "opt", "phi", "phi3", "qwen3", "smollm3", "starcoder2")  # fmt: skip
MIXTURES = ("gpt_oss", "granitemoe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
OTHERS = ("deepseek_v3", "mamba", "qwen3_next", "recurrent_gemma", "rwkv")
ROW_TOKENS = 32
# Options that a small model of the type needs: where the class's own say something else, or far too much.
OPTIONS = {
    "dots1": "{n_routed_experts: 8, num_experts_per_tok: 2, n_shared_experts: 1}",
    "gpt_oss": "{num_local_experts: 4}",
    "olmoe": "{num_experts: 8}",
    "qwen2_moe": "{num_experts: 8}",
    "qwen3_next": "{num_experts: 8}",
    "deepseek_v3": "{n_routed_experts: 16}",
    "qwen3_moe": "{num_experts: 16}",
    "gpt_neo": "{attention_types: [[[global, local], 2]], window_size: 8}",
}


def recipe_of(folder, model_type: str, *overrides: str):
    path = folder / "recipe.yaml"
    path.write_text(
        "run: {stage: pretrain}\ntokenizer: {vocab_size: 320}\ntrain: {max_steps: 10}\n"
        f"data: {{sources: [{{files: a.txt}}], row_tokens: {ROW_TOKENS}, batch_tokens: {ROW_TOKENS}}}\n"
        f"model: {{type: {model_type}, n_layer: 4, n_embd: 64, n_head: 4, options: {OPTIONS.get(model_type, '{}')}}}\n"
    )
    return read_recipe([str(path), *overrides])


def fields_of(recipe):
    return model_fields(recipe.model, vocab_size=320, bos_token_id=0, eos_token_id=1, pad_token_id=2)


def built_parameters(recipe) -> int:
    with torch.device("meta"):
        model = build_model(recipe.model.type, fields_of(recipe), seed=0)
    return sum(p.numel() for p in model.parameters())


@pytest.mark.full_except("qwen3")
@pytest.mark.parametrize("model_type", [*DENSE, *MIXTURES, *OTHERS])
def test_parameters_that_are_planned_are_those_that_are_built(model_type, tmp_path):
    recipe = recipe_of(tmp_path, model_type)
    counts = sizes_of(recipe).parameters()
    assert counts["total"] == built_parameters(recipe)
    assert counts["total"] == sum(counts[role] for role in ("embeddings", "value_embeddings", "head", "matrices", "scalars"))  # fmt: skip
    # A small recipe is a small model: nothing keeps the size of the class's largest.
    if model_type in DENSE:
        assert counts["total"] < 350_000


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_every_causal_lm_is_planned_as_built_or_refused_with_reason(model_type, tmp_path):
    recipe = recipe_of(tmp_path, model_type)
    try:
        sizes = sizes_of(recipe)
    except SizesUnknownError:
        refused = named_code_problems(recipe)
        assert len(refused) == 1
        assert len(str(refused[0])) > 60
        return
    assert sizes.parameters()["total"] == built_parameters(recipe)
    assert sizes.flops_per_token() or sizes.unknown


@pytest.mark.full
@pytest.mark.parametrize("model_type", [*DENSE[::2], *MIXTURES])
def test_flops_are_those_that_torch_counts_in_forward_and_backward(model_type, tmp_path):
    recipe = recipe_of(tmp_path, model_type)
    model = build_model(model_type, fields_of(recipe), attn_implementation="eager", seed=0).train()
    if model_type in MIXTURES:
        model.config._experts_implementation = "eager"  # the grouped kernel is one that torch does not count
    ids = torch.randint(3, 320, (2, ROW_TOKENS), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    sizes = sizes_of(recipe)
    assert sizes.flops_per_token("full") * ids.numel() == pytest.approx(counter.get_total_flops(), rel=0.01)
    assert sizes.parameters()["scaling"] < sizes.flops_per_token("full") / 6 <= sizes.flops_per_token("full")


@pytest.mark.full
@pytest.mark.parametrize("model_type", ["gemma2", "gpt_neo", "mistral", "olmo3", "phi3", "qwen3"])
def test_pairs_that_are_counted_are_those_that_each_layer_sees(model_type, tmp_path):
    window = [] if model_type in ("qwen3", "gpt_neo") else ["model.options.sliding_window=8"]
    recipe = recipe_of(tmp_path, model_type, *window)
    model = build_model(model_type, fields_of(recipe), attn_implementation="eager", seed=0).eval()
    ids = torch.randint(3, 320, (1, ROW_TOKENS), generator=torch.Generator().manual_seed(0))
    attentions = model(input_ids=ids, output_attentions=True, use_cache=False).attentions
    pairs = [int((weights[0, 0] > 0).sum()) for weights in attentions]
    sizes = sizes_of(recipe)
    per_pair = 12 * sizes.n_head * sizes.head_dim / ROW_TOKENS
    hidden = per_pair * sum(ROW_TOKENS**2 - count for count in pairs)
    assert sizes.flops_per_token("full") - sizes.flops_per_token("exact_causal") == pytest.approx(hidden, rel=1e-9)
    if model_type != "qwen3":
        assert min(pairs) < ROW_TOKENS * (ROW_TOKENS + 1) / 2


def test_a_mixture_scales_by_the_experts_that_a_token_is_sent_to(tmp_path):
    two, four = (recipe_of(tmp_path, "mixtral", f"model.options.num_experts_per_tok={n}") for n in (2, 4))
    dense = sizes_of(recipe_of(tmp_path, "llama")).parameters()
    counts, more = sizes_of(two).parameters(), sizes_of(four).parameters()
    expert = 4 * 3 * 64 * 176  # layers x matrices x width x the MLP's
    assert counts["total"] == more["total"]
    assert more["scaling"] - counts["scaling"] == 2 * expert
    assert counts["scaling"] - dense["scaling"] == expert + 4 * 8 * 64  # a second expert, and the routers


@pytest.mark.full
@pytest.mark.parametrize("model_type", ["mamba", "qwen3_next", "rwkv"])
def test_flops_of_a_recurrence_are_left_out_with_the_reason(model_type, tmp_path):
    sizes = sizes_of(recipe_of(tmp_path, model_type))
    assert sizes.flops_per_token() is None
    assert "state" in sizes.unknown


@pytest.mark.full
def test_open_sizes_are_filled_and_given_ones_are_kept(tmp_path):
    fields = fields_of(recipe_of(tmp_path, "qwen3"))
    assert (fields["intermediate_size"], fields["head_dim"], fields["num_key_value_heads"]) == (176, 16, 4)
    recipe = recipe_of(tmp_path, "qwen3", "model.n_inner=100", "model.options={head_dim: 32, num_key_value_heads: 2}")
    fields = fields_of(recipe)
    assert (fields["intermediate_size"], fields["head_dim"], fields["num_key_value_heads"]) == (100, 32, 2)
    assert recipe.model.n_kv_head == 2
    assert fields_of(recipe_of(tmp_path, "gpt_neox"))["intermediate_size"] == 256
    with pytest.raises(ModelOptionsError, match="has no field nonsense"):
        build_model("qwen3", {**fields, "nonsense": 1}, seed=0)


@pytest.mark.full
def test_a_horizon_per_parameter_is_refused_where_expert_use_is_unknown(tmp_path):
    with pytest.raises(RecipeError, match=r"run\.tokens_per_param: the parameters that a token passes are not known: a qwen3_next carries a state"):  # fmt: skip
        recipe_of(tmp_path, "qwen3_next", "run.tokens_per_param=2")
    with pytest.raises(RecipeError, match=r"run\.flops: the FLOPs of a token are not known: a mamba carries a state"):
        recipe_of(tmp_path, "mamba", "run.flops=1e12")


@pytest.mark.full
def test_a_model_that_cannot_be_built_is_refused_before_step_1(tmp_path):
    recipe = recipe_of(tmp_path, "llama4")
    with pytest.raises(SizesUnknownError, match="Llama4Config has no field hidden_size"):
        sizes_of(recipe)
    assert "Llama4Config of model.type llama4 has no field" in str(named_code_problems(recipe)[0])
    with pytest.raises(RecipeError, match="and horizon or rates follow from them"):
        recipe_of(tmp_path, "llama4", "run.tokens_per_param=2")


@pytest.mark.full
def test_a_model_of_another_size_than_planned_is_refused(tmp_path, monkeypatch):
    recipe = recipe_of(tmp_path, "llama")
    tokenizer = type("Tokenizer", (list,), {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2})([0] * 320)
    larger = {**fields_of(recipe), "intermediate_size": 1024}
    monkeypatch.setattr(build, "model_fields", lambda *_, **__: larger)
    with pytest.raises(RecipeError, match=r"llama is planned with 242,240 parameters and was built with 893,504, so"):
        build.build_from_recipe(recipe, tokenizer)


@pytest.mark.full
@pytest.mark.parametrize("model_type", ["qwen3", "mixtral"])
def test_a_horizon_in_tokens_per_parameter_takes_the_counted_parameters(model_type, tmp_path):
    recipe = recipe_of(tmp_path, model_type, "run.tokens_per_param=2")
    assert recipe.train["max_steps"] == 2 * sizes_of(recipe).parameters()["scaling"] // ROW_TOKENS
