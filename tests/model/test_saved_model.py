"""What save_model writes is a model in a process that has nothing of ours."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import GPT2, MODERN, NANOCHAT, random_ids, tiny
from transformers import AutoConfig, GPT2Config, GPT2LMHeadModel

from pipeline.model.build import build_model
from pipeline.model.load import load_model
from pipeline.model.saved import save_model
from pipeline.training.checkpoint import ModelFiles
from pipeline.training.staging_buffer import StagingBuffer

READ_WITHOUT_US = """
import json, sys
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
folder, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
ids = torch.load(out + "/ids.pt")
logits = model(ids).logits
tokens = model.generate(ids[:1, :12], attention_mask=torch.ones(1, 12, dtype=torch.long), max_new_tokens=30, do_sample=False)
base = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
torch.save({"logits": logits, "tokens": tokens, "hidden": base(ids).last_hidden_state, "class": str(type(model)),
            "ends": model.generation_config.eos_token_id, "use_cache": model.config.use_cache}, out + "/seen.pt")
"""


@pytest.mark.parametrize("name", ["gpt2", "modern", "bigrams"])
def test_a_process_without_this_package_computes_the_same_logits_and_tokens(name, tmp_path, stock):
    model = tiny(name)
    ids = random_ids(2, 40)
    model.config.use_cache = False  # as Trainer leaves it
    save_model(model, tmp_path / "model")
    assert model.config.use_cache is False
    torch.save(ids, tmp_path / "ids.pt")
    stock.run(READ_WITHOUT_US, tmp_path / "model", tmp_path, folder=tmp_path)
    seen = torch.load(tmp_path / "seen.pt")
    assert ("transformers_modules" in seen["class"]) == (name != "gpt2")
    assert (seen["logits"] - model(ids).logits).abs().max() <= 1e-4
    assert (seen["hidden"] - model.transformer(ids).last_hidden_state).abs().max() <= 1e-4
    mask = torch.ones(1, 12, dtype=torch.long)
    assert torch.equal(
        seen["tokens"], model.generate(ids[:1, :12], attention_mask=mask, max_new_tokens=30, do_sample=False)
    )
    assert seen["ends"] == [1, 0]
    assert seen["use_cache"] is True


def test_the_saved_config_names_its_classes_and_tokens(tmp_path):
    save_model(tiny("modern"), tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["architectures"] == ["TandemForCausalLM"]
    assert written["auto_map"]["AutoModelForCausalLM"] == "modeling_tandem.TandemForCausalLM"
    assert (written["bos_token_id"], written["eos_token_id"], written["pad_token_id"]) == (0, 1, 2)
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [1, 0]
    assert generation["pad_token_id"] == 2
    code = "".join(file.read_text() for file in tmp_path.glob("*.py"))
    assert "import pipeline" not in code
    assert "from pipeline" not in code


def test_a_gpt2_config_is_the_stock_one_plus_a_context_key(tmp_path):
    save_model(tiny("gpt2"), tmp_path / "ours")
    GPT2LMHeadModel(GPT2Config(**GPT2)).save_pretrained(tmp_path / "stock")
    ours, stock = (json.loads((tmp_path / at / "config.json").read_text()) for at in ("ours", "stock"))
    assert ours == stock | {"n_ctx": GPT2["n_positions"]}


def test_the_finished_model_is_written_in_bf16_and_stays_fp32_in_memory(model, tmp_path):
    save_model(model, tmp_path, dtype=torch.bfloat16)
    assert {value.dtype for value in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config.dtype == torch.float32


@pytest.mark.parametrize("change", [{}, {"tie_word_embeddings": True}])
def test_tied_heads_are_written_once(tmp_path, change):
    save_model(tiny("modern", **change), tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) is not bool(change)


# Fields of a Tandem, or None for a type that is transformers' own.
TYPES = {"gpt2": GPT2, "modern": MODERN | {"vocab_multiple": 1}, "nanochat": NANOCHAT, "llama": None, "mixtral": None}


@pytest.mark.parametrize("name", TYPES)
def test_weights_that_are_written_apart_are_those_of_save_pretrained(name, tmp_path):
    fields = TYPES[name]
    model = foreign(name) if fields is None else build_model("tandem", fields, seed=1)
    save_model(model, tmp_path / "one")
    (tmp_path / "two").mkdir()
    weights = ModelFiles(NoTokenizer()).write(model, tmp_path / "two")
    image = StagingBuffer(weights, metadata={"format": "pt"})
    image.fill(weights)
    (tmp_path / "two" / "model.safetensors").write_bytes(image.memory[:])
    one, two = ({p.name: p.read_bytes() for p in (tmp_path / at).iterdir()} for at in ("one", "two"))
    assert one == two


@pytest.mark.parametrize("change", [{}, {"tie_word_embeddings": True}, {"vocab_size": 128}])
def test_the_finished_model_drops_padding_rows_that_the_checkpoint_keeps(tmp_path, change):
    model = tiny("modern", **change)
    ids = model.config.vocab_size
    save_model(model, tmp_path / "model")
    assert model.lm_head.weight.shape[0] == 128
    (tmp_path / "checkpoint").mkdir()
    weights = ModelFiles(NoTokenizer()).write(model, tmp_path / "checkpoint")
    assert len(weights["transformer.wte.weight"]) == 128
    assert json.loads((tmp_path / "checkpoint" / "config.json").read_text())["vocab_multiple"] == 64
    finished = load_model(tmp_path / "model")
    rows = [len(w) for n, w in finished.state_dict().items() if "wte" in n or "value_embedding" in n or "lm_head" in n]
    assert rows == [ids] * 4
    assert finished.config.vocab_multiple == 1
    assert torch.equal(finished(random_ids(2, 40)).logits, model(random_ids(2, 40)).logits)


def test_the_loss_trl_computes_from_the_head_equals_the_models_own(tmp_path):
    utils = pytest.importorskip("trl.trainer.utils")
    save_model(tiny("modern"), tmp_path)
    model, batch = load_model(tmp_path), {"input_ids": random_ids(2, 40), "labels": random_ids(2, 40)}
    own = model(**batch).loss.item()
    utils.add_fused_lm_head(model)
    assert model(**batch, fused_lm_head=True).loss.item() == pytest.approx(own, rel=1e-6)


class NoTokenizer:
    def save_pretrained(self, folder):
        pass


def foreign(name):
    """A type that transformers has; mixtral's experts are written under other names than they train under."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model(name, vocab_size=99, num_key_value_heads=2, **sizes, tie_word_embeddings=True)
    return AutoModelForCausalLM.from_config(config)


SCALED = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}


@pytest.mark.parametrize(
    ("model_type", "given", "older"),
    [
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {"rope_theta": 5e5}),
        ("llama", {"rope_parameters": SCALED}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("gemma3_text", {}, {"rope_theta": 1e6, "rope_local_base_freq": 1e4}),
    ],
)
def test_rotary_bases_are_written_as_older_readers_know_them(model_type, given, older, tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = build_model(model_type, {"vocab_size": 100, "intermediate_size": 64, **sizes, **given}, seed=0)
    save_model(model, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert older.items() <= written.items()
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == model.config.rope_parameters
