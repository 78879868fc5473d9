"""Models for other programs: GGUF that llama.cpp runs alike, and safetensors in shards."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken

from pipeline.contrib.export import export
from pipeline.contrib.gguf import ARCHITECTURES, gguf_names, model_sizes, rotated_heads, why_not_cut
from pipeline.model.build import build_model
from pipeline.model.saved import read_tensors, save_model
from pipeline.process.errors import CannotWriteError, RecipeError
from pipeline.process.storage import read_json
from pipeline.tokenizer.train import train_bpe

DOCS = Path(__file__).parents[2] / "docs"
TEXTS = [paragraph for file in sorted(DOCS.glob("*.md")) for paragraph in file.read_text().split("\n\n")]


def write_model(folder: Path, *, kind: str = "gpt2", pattern: str = "gpt2", tokenizer=None, **fields) -> Path:
    tokenizer = tokenizer or train_bpe(TEXTS, vocab_size=800, split_pattern=pattern)
    sizes = {"n_layer": 3, "n_embd": 64, "n_head": 4, "n_positions": 256, "initializer_range": 0.2}
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    given = {"vocab_size": len(tokenizer), **sizes, **ids, **fields}
    model = build_model(kind, {name: value for name, value in given.items() if value is not None}, seed=0)
    save_model(model, folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "small")


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0"])
def test_a_gguf_holds_every_weight_and_the_tokenizer(model, tmp_path, dtype):
    gguf = pytest.importorskip("gguf")
    path = export(str(model), to="gguf", dtype=dtype, output=str(tmp_path / "m.gguf"), max_shard_size="5GB")
    reader = gguf.GGUFReader(path)
    assert sum(int(tensor.n_elements) for tensor in reader.tensors) == sum(
        w.numel() for w in read_tensors(model).values()
    )
    assert list(tmp_path.iterdir()) == [path], "no half-written file stays"
    assert reader.fields["tokenizer.ggml.pre"].contents() == "gpt-2"
    assert reader.fields["general.architecture"].contents() == "gpt2"
    (one,) = (tensor for tensor in reader.tensors if tensor.name == "blk.1.ffn_up.weight")
    mine = read_tensors(model)["transformer.h.1.mlp.c_fc.weight"].T
    theirs = torch.from_numpy(gguf.quants.dequantize(one.data, one.tensor_type).copy())
    tolerance = {"f32": 0.0, "f16": 1e-3, "bf16": 4e-3, "q8_0": 1e-2}[dtype]
    assert (theirs - mine).abs().max() <= tolerance * mine.abs().max()


def with_ends(folder: Path, *ends: str, also: tuple[str, ...] = ()) -> Path:
    """A model whose generation ends at these control tokens, which its tokenizer gets."""
    tokenizer = train_bpe(TEXTS, vocab_size=800, split_pattern="gpt2")
    tokenizer.add_tokens([AddedToken(text, special=True) for text in (*ends, *also)], special_tokens=True)
    write_model(folder, tokenizer=tokenizer)
    path = folder / "generation_config.json"
    ids = tokenizer.convert_tokens_to_ids(list(ends))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": ids}))
    return folder


def test_a_gguf_ends_at_every_id_that_generation_ends_at(tmp_path, capsys):
    gguf = pytest.importorskip("gguf")
    ends = ("<|end|>", "<|im_end|>", "<|stop|>", "<|halt|>", "<|pause|>")
    folder = with_ends(tmp_path / "model", *ends)
    path = export(str(folder), to="gguf", dtype="f32", output=str(tmp_path / "m.gguf"), max_shard_size="5GB")
    fields = gguf.GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    keys = [f"tokenizer.ggml.{key}_token_id" for key in ("eos", "eom", "eot")]
    assert [tokens[fields[key].contents()] for key in keys] == ["<|end|>", "<|stop|>", "<|halt|>"]
    assert "will not end at <|pause|>" in capsys.readouterr().err


def test_a_vocabulary_that_keeps_llama_cpp_from_ending_is_refused(tmp_path):
    pytest.importorskip("gguf")
    folder = with_ends(tmp_path / "model", "<|end|>", also=("<|return|>", "<|call|>"))
    with pytest.raises(RecipeError, match="does not end at <|end|>".replace("|", r"\|")):
        export(str(folder), to="gguf", dtype="f32", output=str(tmp_path / "m.gguf"), max_shard_size="5GB")


LLAMA = {
    **{
        "n_layer": None,
        "n_embd": None,
        "n_head": None,
        "n_positions": None,
        "num_hidden_layers": 2,
        "hidden_size": 64,
    },
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 128},
}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kind": "tandem", "normalization": "rms_norm"}, "written as tandem"),
        ({"activation_function": "relu"}, "activation_function is relu"),
        ({"pattern": "nanochat"}, "a pattern that llama.cpp has not"),
        ({"kind": "gemma3_text", "pattern": "qwen2"} | LLAMA, "written as gemma3_text"),
    ],
)
def test_what_llama_cpp_cannot_run_is_refused_with_the_reason(tmp_path, fields, said):
    pytest.importorskip("gguf")
    folder = write_model(tmp_path / "model", **fields)
    with pytest.raises(RecipeError, match=said):
        export(str(folder), to="gguf", output=str(tmp_path / "m.gguf"), max_shard_size="5GB")
    assert not list(tmp_path.glob("*.gguf"))


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("model", {"byte_fallback": True}),
        ("model", {"ignore_merges": True}),
        ("model", {"type": "Unigram"}),
        ("normalizer", {"type": "NFC"}),
    ],
)
def test_a_tokenizer_that_llama_cpp_would_run_otherwise_is_named(model, part, change):
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    assert why_not_cut(tokenizer) == []
    tokenizer[part] = (tokenizer[part] or {}) | change
    assert why_not_cut(tokenizer) == ["the tokenizer is no plain byte-level BPE"]


def test_shards_hold_the_same_weights_in_the_type_asked_for(model, tmp_path):
    folder = export(str(model), to="safetensors", dtype="bf16", output=str(tmp_path / "out"), max_shard_size="100KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    weights, mine = read_tensors(folder), read_tensors(model)
    assert weights.keys() == mine.keys()
    assert all(torch.equal(weights[name], value.bfloat16()) for name, value in mine.items())
    said = "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; import sys; M.from_pretrained(sys.argv[1]); T.from_pretrained(sys.argv[1])"
    subprocess.run([sys.executable, "-c", said, str(folder)], check=True, cwd=tmp_path)


def test_an_existing_export_is_not_overwritten_and_unknown_types_are_refused(model, tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(CannotWriteError, match="exists and is not overwritten"):
        export(str(model), to="safetensors", output=str(tmp_path / "there"), max_shard_size="5GB")
    with pytest.raises(RecipeError, match="safetensors takes f32, f16, bf16"):
        export(str(model), to="safetensors", dtype="q8_0", output=str(tmp_path / "x"), max_shard_size="5GB")


def test_the_command_writes_beside_the_run_under_its_name(model, tmp_path):
    pytest.importorskip("gguf")
    run = tmp_path / "runs" / "small"
    run.mkdir(parents=True)
    (run / "model").symlink_to(model, target_is_directory=True)
    (run / "run_manifest.json").write_text(json.dumps({"name": "small"}))
    command = [sys.executable, "-m", "pipeline.hub", "export", str(run), "--to", "gguf", "--type", "q8_0"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=DOCS.parent, check=True)
    assert Path(done.stdout.strip()) == run / "export" / "small-q8_0.gguf"
    assert (run / "export" / "small-q8_0.gguf").stat().st_size > 0


def weights_of_gguf(path: Path, model: Path) -> dict[str, Any]:
    """Return the tensors of a GGUF file, dequantized, under transformers' names."""
    from gguf import GGUFReader, quants

    config = read_json(model / "config.json")
    sizes, named, architecture = model_sizes(config), gguf_names(config), ARCHITECTURES[config["model_type"]]
    written = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    weights = {}
    for name, own in read_tensors(model).items():
        if (tensor := written.get(named(name))) is None:
            continue  # a tied head
        value = torch.from_numpy(quants.dequantize(tensor.data, tensor.tensor_type).copy())
        if architecture.rotates_neighbours and (heads := rotated_heads(name, sizes)):
            value = value.view(heads, -1, 2, value.shape[-1]).transpose(1, 2).reshape(value.shape)
        weights[name] = value.T if ".c_" in name and value.ndim == 2 else value.view(own.shape)
    return weights


@pytest.mark.parametrize(("kind", "pattern"), [("gpt2", "gpt2"), ("llama", "llama3"), ("qwen3", "qwen2")])
def test_the_weights_of_a_gguf_are_read_back_as_they_were(tmp_path, kind, pattern):
    pytest.importorskip("gguf")
    fields = {"gpt2": {}}.get(kind, LLAMA)
    folder = write_model(tmp_path / "m", **fields | {"kind": kind, "pattern": pattern})
    path = export(str(folder), to="gguf", dtype="f32", output=str(tmp_path / "m.gguf"), max_shard_size="5GB")
    back, mine = weights_of_gguf(path, folder), read_tensors(folder)
    assert back.keys() == mine.keys() - ({"lm_head.weight"} if kind == "gpt2" else set())
    assert all(torch.equal(value, mine[name]) for name, value in back.items())


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_head_of_its_own_is_exported_though_the_config_ties_it(tmp_path, kind):
    pytest.importorskip("gguf")
    fields = {"gpt2": {}, "llama": LLAMA}[kind]
    folder = write_model(tmp_path / "m", **fields | {"kind": kind, "pattern": "gpt2", "tie_word_embeddings": False})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    mine = read_tensors(folder)
    path = export(str(folder), to="gguf", dtype="f32", output=str(tmp_path / "m.gguf"), max_shard_size="5GB")
    assert torch.equal(weights_of_gguf(path, folder)["lm_head.weight"], mine["lm_head.weight"])
    export(str(folder), to="safetensors", output=str(tmp_path / "again"), max_shard_size="5GB")
    assert torch.equal(read_tensors(tmp_path / "again")["lm_head.weight"], mine["lm_head.weight"])
    assert json.loads((tmp_path / "again/config.json").read_text())["tie_word_embeddings"] is False


def test_ollama_gets_a_modelfile_with_template_stops_and_positions(tmp_path):
    pytest.importorskip("gguf")
    folder = write_model(tmp_path / "m", kind="qwen3", pattern="qwen2", **LLAMA)
    written = export(str(folder), to="ollama", dtype="q8_0", output=str(tmp_path / "out"), max_shard_size="5GB")
    assert sorted(file.name for file in written.iterdir()) == ["Modelfile", "m-q8_0.gguf"]
    text = (written / "Modelfile").read_text()
    assert text.startswith('FROM ./m-q8_0.gguf\nTEMPLATE """{{- range')
    assert text.endswith('PARAMETER stop "<|end|>"\nPARAMETER stop "<|bos|>"\nPARAMETER num_ctx 128\n')


def test_a_chat_template_of_another_is_not_translated_for_ollama(tmp_path):
    folder = write_model(tmp_path / "m", kind="qwen3", pattern="qwen2", **LLAMA)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(RecipeError, match="its chat template is not the built-in one"):
        export(str(folder), to="ollama", output=str(tmp_path / "out"), max_shard_size="5GB")
    assert not (tmp_path / "out").exists()
