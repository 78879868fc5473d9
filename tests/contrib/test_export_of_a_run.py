"""What trained runs leave under model/ is stock GPT-2 and stock NanoChat where the options are theirs, and exports from there."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_export_to_llama_cpp import greedy, llama_cpp

from pipeline.model.load import load_model
from tests.runner import WarmRunner

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
READ_WITHOUT_US = """
import json, sys
import torch, transformers
folder, name = sys.argv[1:]
model = getattr(transformers, name).from_pretrained(folder).eval()
assert type(transformers.AutoModelForCausalLM.from_pretrained(folder)) is type(model)
ids = torch.tensor([transformers.AutoTokenizer.from_pretrained(folder)("The path of a file").input_ids])
new = model.generate(ids, max_new_tokens=12, do_sample=False)
print(json.dumps({"ids": ids.tolist(), "logits": model(ids).logits.tolist(), "new": new.tolist()}))
"""
# `modern` without what transformers' nanochat has not.
NANOCHAT = {
    "qk_norm_scale": 1.0,
    "value_embeddings": False,
    "residual_lambdas": False,
    "backout": False,
    "smear": False,
    "window_pattern": None,
    "vocab_multiple": 1,
}
RUNS = {
    "GPT2LMHeadModel": ("gpt2", {}),
    "NanoChatForCausalLM": (
        "modern",
        {"model": {"preset": "modern", "n_layer": 3, "n_embd": 32, "n_head": 2, "options": NANOCHAT}},
    ),
}


@pytest.fixture
def trained(tmp_path, cache, text_files, chat_files, warm, stock):
    """A function that trains a run of that stock class and gives its directory, what somebody without this package computes, and our model."""

    def train(name: str):
        base, sections = RUNS[name]
        runner = WarmRunner(tmp_path, cache, text_files, chat_files, warm)
        steps = {"max_steps": 4, "per_device_train_batch_size": 8}
        tokenizer = {"vocab_size": 512, "train_chars": 300_000, "split_pattern": "gpt2"}
        run = runner.train(runner.recipe("run", base, train=steps, tokenizer=tokenizer, **sections)).directory
        printed = json.loads(stock.run(READ_WITHOUT_US, run / "model", name, folder=tmp_path))
        found = {name: torch.tensor(value) for name, value in printed.items()}
        return run, found, load_model(run / "model").eval()

    return train


@pytest.mark.parametrize("name", [pytest.param("GPT2LMHeadModel", marks=pytest.mark.slow), "NanoChatForCausalLM"])
def test_a_finished_run_is_the_stock_class_without_remote_code(name, trained):
    run, found, ours = trained(name)
    assert not list((run / "model").glob("*.py"))
    with torch.no_grad():
        assert (found["logits"] - ours(found["ids"]).logits).abs().max() <= 1e-6
    assert torch.equal(found["new"], ours.generate(found["ids"], max_new_tokens=12, do_sample=False))


@pytest.mark.slow  # needs the package xllamacpp
def test_a_finished_run_gives_its_greedy_tokens_in_llama_cpp(trained):
    pytest.importorskip("xllamacpp")
    run, found, _ = trained("GPT2LMHeadModel")
    command = [sys.executable, "-m", "pipeline.hub", "export", str(run), "--to", "gguf", "--type", "f32"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    ids, new = found["ids"][0].tolist(), found["new"][0].tolist()
    with llama_cpp(Path(done.stdout.strip())) as ask:
        assert ids + greedy(ask, ids, tokens=len(new) - len(ids), ignore_eos=True)["tokens"] == new
