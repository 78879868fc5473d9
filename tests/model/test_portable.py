"""model.preset portable: transformers' own Qwen3 under the dial, planned as built, saved as the stock class."""

import json
import math

import pytest
import torch

from pipeline.model.build import build_model
from pipeline.model.groups import parameter_group
from pipeline.model.saved import save_model
from pipeline.process.errors import RecipeError
from pipeline.recipe.model_sizes import model_fields, sizes_of
from pipeline.recipe.reader import read_recipe
from pipeline.tokenizer.train import train_bpe
from pipeline.training.build import build_from_recipe
from tests.conftest import docstrings

RECIPE = """
run: {stage: pretrain}
tokenizer: {vocab_size: 512}
data: {sources: [{files: a.txt}], row_tokens: 64, batch_tokens: 512}
model: {preset: PRESET, depth: 4}
optimizer: {type: muon_adamw}
train: {max_steps: 10, per_device_train_batch_size: 4}
"""


@pytest.fixture(scope="module")
def tokenizer():
    made = train_bpe(docstrings(modules=10), vocab_size=512, split_pattern="qwen2")
    assert len(made) == 512
    return made


def recipe_of(folder, *overrides: str, preset: str = "portable"):
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.replace("PRESET", preset))
    return read_recipe([str(path), *overrides])


@pytest.mark.parametrize("overrides", [(), ("model.n_kv_head=1",), ("model.options.tie_word_embeddings=true",)])
def test_the_dial_plans_the_parameters_that_are_built(tmp_path, overrides):
    recipe = recipe_of(tmp_path, *overrides)
    ids = {"bos_token_id": 502, "eos_token_id": 503, "pad_token_id": 511}
    model = build_model(recipe.model.type, model_fields(recipe.model, vocab_size=512, **ids), seed=0)
    assert sizes_of(recipe).parameters()["total"] == sum(p.numel() for p in model.parameters())


def test_a_portable_block_has_as_many_weights_as_a_modern_one(tmp_path):
    sizes = {preset: sizes_of(recipe_of(tmp_path, preset=preset)) for preset in ("portable", "modern")}
    matrices = {preset: size.parameters()["matrices"] for preset, size in sizes.items()}
    # 8/3 of the width is rounded up to a multiple of 64, and modern's value embeddings have gates.
    assert matrices["portable"] == pytest.approx(matrices["modern"], rel=0.03)


def test_it_is_saved_as_transformers_own_class_without_code(tmp_path):
    recipe = recipe_of(tmp_path)
    ids = {"bos_token_id": 502, "eos_token_id": 503, "pad_token_id": 511}
    save_model(
        build_model(recipe.model.type, model_fields(recipe.model, vocab_size=512, **ids), seed=0), tmp_path / "model"
    )
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert "auto_map" not in config
    assert not list((tmp_path / "model").glob("*.py"))


def test_blocks_begin_as_the_identity_and_the_head_near_zero(tmp_path, tokenizer):
    model = build_from_recipe(recipe_of(tmp_path), tokenizer).eval()
    ids = torch.arange(64)[None]
    with torch.no_grad():
        states = model(ids, output_hidden_states=True)
        loss = torch.nn.functional.cross_entropy(states.logits[0, :-1], ids[0, 1:])
    assert torch.equal(states.hidden_states[0], states.hidden_states[-2])
    assert loss == pytest.approx(math.log(512), abs=0.05)
    assert float(model.model.embed_tokens.weight.detach().std()) == pytest.approx(0.8, rel=0.02)


def test_muon_gets_the_matrices_and_adamw_the_rest(tmp_path, tokenizer):
    model = build_from_recipe(recipe_of(tmp_path), tokenizer)
    groups: dict[str, set] = {}
    for name, parameter in model.named_parameters():
        groups.setdefault(parameter_group(name, parameter), set()).add(name.split(".")[-2])
    assert groups == {
        "embeddings": {"embed_tokens"},
        "head": {"lm_head"},
        "matrices": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
        "scalars": {"q_norm", "k_norm", "input_layernorm", "post_attention_layernorm", "norm"},
    }


def test_the_tokenizer_cuts_as_llama_cpp_can_unless_the_recipe_says_otherwise(tmp_path):
    assert recipe_of(tmp_path).tokenizer.split_pattern == "qwen2"
    assert recipe_of(tmp_path, "tokenizer.split_pattern=gpt2").tokenizer.split_pattern == "gpt2"
    assert recipe_of(tmp_path, preset="modern").tokenizer.split_pattern == "nanochat"


def test_options_of_the_preset_of_an_earlier_layer_are_left_out(tmp_path):
    recipe = read_recipe(["quickstart_pretrain", "model.preset=portable", "model.options.initializer_range=0.03"])
    assert (recipe.model.type, recipe.model.options) == ("qwen3", {"initializer_range": 0.03})
    assert any("model.options.window_pattern" in note for note in recipe.notes)


def test_a_default_split_pattern_unknown_to_llama_cpp_is_replaced(tmp_path):
    recipe = read_recipe(["quickstart_pretrain", "model.preset=portable"])
    assert recipe.tokenizer.split_pattern == "qwen2"
    assert any("tokenizer.split_pattern" in note and "llama.cpp" in note for note in recipe.notes)
    own = read_recipe(["quickstart_pretrain", "model.preset=portable", r"tokenizer.split_pattern='\w+'"])
    assert own.tokenizer.split_pattern == r"\w+"
    assert recipe_of(tmp_path, "tokenizer.split_pattern=llama3").tokenizer.split_pattern == "llama3"


def test_bigram_embeddings_are_refused_beside_it(tmp_path):
    with pytest.raises(RecipeError, match=r"model\.type: .*Qwen3Config has no field bigram_embeddings"):
        recipe_of(tmp_path, "model.options.bigram_embeddings=5120")


def test_another_type_beside_it_is_refused(tmp_path):
    with pytest.raises(RecipeError, match=r"portable is a preset of model\.type qwen3, not of llama"):
        recipe_of(tmp_path, "model.type=llama")
