"""Models of somebody else stay what they are: generation settings, parts for pictures, a head of its own, names of their files."""

import copy
import json
from contextlib import nullcontext

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from pipeline.model.errors import ModelOptionsError
from pipeline.model.load import load_model
from pipeline.model.saved import load_weights, read_tensors, save_model
from pipeline.process.errors import DataError
from pipeline.recipe.schema import Recipe
from pipeline.training import build
from pipeline.training.checkpoint import ModelFiles
from pipeline.training.isolation import try_isolation

TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "vocab_size": 120,
}
CLIP = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
CLIP |= {"image_size": 28, "patch_size": 14}
QWEN = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 32}
PLACES = {"image_token_id": 100, "video_token_id": 101, "vision_start_token_id": 102, "vision_end_token_id": 103}
MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
}
LINEAR |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 16}
SEEING = {
    "gemma3": (
        tf.Gemma3ForConditionalGeneration,
        {"text_config": TEXT | {"head_dim": 16, "sliding_window": 16}, "vision_config": CLIP, "mm_tokens_per_image": 4}
        | {"image_token_index": 100, "boi_token_index": 101, "eoi_token_index": 102},
    ),
    "qwen3_5": (
        tf.Qwen3_5ForConditionalGeneration,
        {"text_config": TEXT | LINEAR, "vision_config": QWEN | {"num_position_embeddings": 16}, **PLACES},
    ),
    "qwen2_5_vl": (
        tf.Qwen2_5_VLForConditionalGeneration,
        {"text_config": TEXT | MROPE, "vision_config": QWEN, **PLACES},
    ),
    "qwen3_vl": (
        tf.Qwen3VLForConditionalGeneration,
        {
            "text_config": TEXT | MROPE | {"head_dim": 16},
            "vision_config": QWEN | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
            **PLACES,
        },
    ),
    "llava": (
        tf.LlavaForConditionalGeneration,
        {
            "text_config": TEXT | {"model_type": "llama"},
            "vision_config": CLIP | {"model_type": "clip_vision_model"},
            "image_token_index": 100,
        },
    ),
    "mistral3": (
        tf.Mistral3ForConditionalGeneration,
        {
            "text_config": TEXT | {"model_type": "mistral", "head_dim": 16},
            "vision_config": CLIP | {"model_type": "pixtral", "head_dim": 16},
            "image_token_index": 100,
        },
    ),
    "llama4": (
        tf.Llama4ForConditionalGeneration,
        {
            "text_config": TEXT | {"head_dim": 16, "intermediate_size_mlp": 64, "num_local_experts": 2},
            "vision_config": CLIP | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
        },
    ),
    "smolvlm": (
        tf.SmolVLMForConditionalGeneration,
        {"text_config": TEXT | {"model_type": "llama"}, "vision_config": CLIP, "image_token_id": 100},
    ),
    "internvl": (
        tf.InternVLForConditionalGeneration,
        {
            "text_config": TEXT | {"model_type": "qwen2"},
            "vision_config": CLIP | {"image_size": [28, 28], "patch_size": [14, 14]},
            "image_token_id": 100,
        },
    ),
}
IDS = torch.arange(3, 27).view(2, 12)


def write_seeing(name, folder):
    model_class, fields = SEEING[name]
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**copy.deepcopy(fields)))
    model.generation_config = tf.GenerationConfig(eos_token_id=1)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"size": 28}')
    return model.eval()


def write_llama(folder, **generation):
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**TEXT, bos_token_id=1, eos_token_id=2))
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **generation}))
    return model.eval()


@pytest.mark.parametrize(
    ("settings", "left_out"),
    [
        ({"temperature": 0.9, "top_p": 0.6}, "temperature 0.9, top_p 0.6"),
        ({"do_sample": False, "top_k": 20, "min_p": 0.1, "typical_p": 0.9}, "top_k 20, min_p 0.1, typical_p 0.9"),
        ({"num_beams": 1, "length_penalty": 0.8}, "length_penalty 0.8"),
        ({"early_stopping": True}, "early_stopping True"),
        ({"early_stopping": "always"}, "early_stopping always"),
        ({"cache_implementation": "elsewhere"}, "cache_implementation elsewhere"),
        ({"use_cache": False, "cache_implementation": "static"}, "cache_implementation static"),
        ({"num_return_sequences": 3}, "num_return_sequences 3"),
        ({"pad_token_id": -1}, "pad_token_id -1"),
        ({"output_scores": True}, "output_scores True"),
        ({"max_new_tokens": "many", "eos_token_id": 2}, "max_new_tokens many"),
        ({"logits_processor": [], "temperature": None}, "logits_processor []"),
    ],
)
def test_generation_settings_that_cannot_be_saved_are_left_out_and_named(settings, left_out, tmp_path):
    write_llama(tmp_path / "model", **settings)
    model = load_model(tmp_path / "model")
    (note,) = model.notes
    assert set(left_out.split(", ")) <= set(note.rpartition(": ")[2].split(", "))
    model.generation_config.eos_token_id = [2, 3]  # as SFT adds the end of a turn
    save_model(model, tmp_path / "saved")
    ModelFiles(tf.PreTrainedTokenizerFast(tokenizer_object=tokenizer())).write(model, made(tmp_path / "checkpoint"))
    for folder in ("saved", "checkpoint"):
        written = json.loads((tmp_path / folder / "generation_config.json").read_text())
        assert written["eos_token_id"] == [2, 3]
        assert not written.keys() & {part.split()[0] for part in left_out.split(", ")}


def test_generation_settings_that_generate_follows_stay(tmp_path):
    write_llama(tmp_path, do_sample=True, temperature=0.7, top_k=40, max_new_tokens=9, chat_format="chatml")
    model = load_model(tmp_path)
    kept = model.generation_config
    assert (kept.temperature, kept.top_k, kept.max_new_tokens, kept.chat_format) == (0.7, 40, 9, "chatml")
    assert model.notes == []


def test_a_config_with_generation_settings_of_old_is_saved(tmp_path):
    write_llama(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").unlink()
    change_config(tmp_path / "model", temperature=0.9, max_length=50, num_beams=1, early_stopping=True)
    model = load_model(tmp_path / "model")
    model.generation_config.eos_token_id = [2, 3]
    save_model(model, tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "generation_config.json").read_text())["eos_token_id"] == [2, 3]


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation", "_experts_implementation"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_kernel_that_a_config_names_is_not_looked_for(name, key, tmp_path):
    write_llama(tmp_path) if name == "llama" else write_seeing(name, tmp_path)
    change_config(tmp_path, **{key: "somebody/kernel"})
    model = load_model(tmp_path)
    assert model.config._attn_implementation == "sdpa"
    assert load_model(tmp_path, attn_implementation="eager").config._attn_implementation == "eager"


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/etc/hostname", "a/../../elsewhere.bin"])
@pytest.mark.parametrize("index", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
def test_an_index_naming_files_outside_its_folder_is_refused_unopened(index, name, tmp_path):
    write_llama(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "model" / index).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(ModelOptionsError, match="a file outside its folder"):
        load_model(tmp_path / "model")
    if index.startswith("model"):
        with pytest.raises(ModelOptionsError, match="a file outside its folder"):
            read_tensors(tmp_path / "model")


@pytest.mark.parametrize("name", SEEING)
def test_a_model_with_a_vision_tower_trains_on_text_and_saves_whole(name, tmp_path):
    stock = write_seeing(name, tmp_path / "model")
    model = load_model(tmp_path / "model")
    assert "kept as it is: vi" in model.notes[0]
    assert (model(input_ids=IDS).logits - stock(input_ids=IDS).logits).abs().max() <= 1e-5
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.resize_token_embeddings(130)
    model(input_ids=IDS, labels=IDS).loss.backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all(p.grad is not None for p in trained)
    torch.optim.SGD(trained, lr=0.1).step()

    made(tmp_path / "checkpoint")
    weights = ModelFiles(tf.PreTrainedTokenizerFast(tokenizer_object=tokenizer())).write(
        model, tmp_path / "checkpoint"
    )
    save_file({key: value.contiguous() for key, value in weights.items()}, tmp_path / "checkpoint/model.safetensors")
    save_model(model, tmp_path / "saved")
    given = load_file(tmp_path / "model/model.safetensors")
    frozen = {key for key, p in model.named_parameters() if not p.requires_grad}
    for folder in ("checkpoint", "saved"):
        written = load_file(tmp_path / folder / "model.safetensors")
        assert written.keys() == given.keys()
        assert sum(torch.equal(written[key], given[key]) for key in given) >= len(frozen)
        again = type(stock).from_pretrained(tmp_path / folder).eval()
        assert all(torch.equal(again.state_dict()[key], before[key]) for key in frozen)
        assert (again(input_ids=IDS).logits - model(input_ids=IDS).logits).abs().max() <= 1e-5
        assert (tmp_path / folder / "preprocessor_config.json").read_text() == '{"size": 28}'
        assert json.loads((tmp_path / folder / "config.json").read_text())["model_type"] == stock.config.model_type
    other = load_model(tmp_path / "model")
    other.resize_token_embeddings(130)
    load_weights(other, tmp_path / "checkpoint")
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in other.state_dict().items())


def test_a_run_that_has_begun_with_the_text_part_keeps_it(tmp_path):
    write_seeing("qwen3_5", tmp_path)
    model = load_model(tmp_path, text_type="qwen3_5_text")
    assert type(model) is tf.Qwen3_5ForCausalLM
    assert all(p.requires_grad for p in model.parameters())


def test_experts_that_transformers_writes_one_by_one_come_back(tmp_path):
    torch.manual_seed(0)
    model = tf.MixtralForCausalLM(tf.MixtralConfig(**TEXT, num_local_experts=2))
    save_model(model, tmp_path)
    torch.manual_seed(1)
    other = tf.MixtralForCausalLM(tf.MixtralConfig(**TEXT, num_local_experts=2))
    load_weights(other, tmp_path)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in other.state_dict().items())


HEADS = {
    "llama": tf.LlamaConfig(**TEXT, tie_word_embeddings=True),
    "qwen3": tf.Qwen3Config(**TEXT, head_dim=16, tie_word_embeddings=True),
    "gemma3_text": tf.Gemma3TextConfig(**TEXT, head_dim=16, sliding_window=16),
    "gpt2": tf.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64, vocab_size=120),
    "nanochat": tf.NanoChatConfig(**TEXT, tie_word_embeddings=True),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_of_its_own_stays_beside_a_config_that_ties_it(name, tmp_path):
    torch.manual_seed(0)
    untied = copy.deepcopy(HEADS[name])
    untied.tie_word_embeddings = False
    stock = tf.AutoModelForCausalLM.from_config(untied).eval()
    stock.save_pretrained(tmp_path / "model")
    change_config(tmp_path / "model", tie_word_embeddings=True)
    model = load_model(tmp_path / "model")
    assert model.notes == ["model: its head is not its embedding, so tie_word_embeddings is false from now on"]
    wanted = stock(input_ids=IDS).logits
    assert (model(input_ids=IDS).logits - wanted).abs().max() <= 1e-4
    model.resize_token_embeddings(128)
    model.tie_weights()
    assert (model(input_ids=IDS).logits[..., :120] - wanted).abs().max() <= 1e-4
    save_model(model, tmp_path / "saved")
    again = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert (again(input_ids=IDS).logits[..., :120] - wanted).abs().max() <= 1e-4
    assert json.loads((tmp_path / "saved/config.json").read_text())["tie_word_embeddings"] is False
    other = load_model(tmp_path / "model")
    other.resize_token_embeddings(128)
    load_weights(other, tmp_path / "saved")
    assert (other(input_ids=IDS).logits - model(input_ids=IDS).logits).abs().max() <= 1e-4


@pytest.mark.parametrize(("mode", "is_refused"), [("offline", True), ("online", False)])
def test_a_training_does_not_start_from_quantized_weights(mode, is_refused, tmp_path):
    write_llama(tmp_path)
    quantized = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": mode}
    change_config(tmp_path, quantization_config=quantized)
    tensors = load_file(tmp_path / "model.safetensors")
    if is_refused:
        tensors |= {f"{name}_scale": torch.ones(1) for name in tensors if name.endswith("_proj.weight")}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    recipe = Recipe(path="recipe.yaml")
    said = r"its weights are quantized \(bitnet\), which no step can change. Start from the same model in bf16 or fp32"
    with pytest.raises(DataError, match=said) if is_refused else nullcontext():
        build._load_start(str(tmp_path), recipe.code, recipe.where, attn_implementation="sdpa", text_type=None)


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def tokenizer():
    from tokenizers import Tokenizer, models

    return Tokenizer(models.BPE({"a": 0}, []))


def made(folder):
    folder.mkdir()
    return folder


def test_a_model_that_sees_what_comes_is_found_out():
    torch.manual_seed(0)
    text = TEXT | {"model_type": "gemma", "head_dim": 16}
    config = tf.PaliGemmaConfig(text_config=text, vision_config=CLIP | {"projection_dim": 32}, image_token_index=100)
    assert try_isolation(tf.PaliGemmaForConditionalGeneration(config)) == "looks_ahead"
    assert try_isolation(tf.LlamaForCausalLM(tf.LlamaConfig(**TEXT))) == "isolates"


@pytest.mark.parametrize(
    "rope", [{"rope_theta": 7e3}, {"rope_parameters": {"rope_type": "default", "rope_theta": 7e3}}]
)
def test_a_rotary_base_is_read_where_either_transformers_version_writes_it(rope, tmp_path):
    torch.manual_seed(0)
    own = {"rope_parameters": {"rope_type": "default", "rope_theta": 7e3}}
    stock = tf.LlamaForCausalLM(tf.LlamaConfig(**TEXT, **own, initializer_range=0.5)).eval()
    stock.save_pretrained(tmp_path / "model")
    path = tmp_path / "model/config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in config.items() if not k.startswith("rope_")} | rope))
    model = load_model(tmp_path / "model").eval()
    assert model.config.rope_parameters["rope_theta"] == 7e3
    assert (model(input_ids=IDS).logits - stock(input_ids=IDS).logits).abs().max() <= 1e-4
    save_model(model, tmp_path / "saved")
    written = json.loads((tmp_path / "saved/config.json").read_text())
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 7e3
