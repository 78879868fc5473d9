"""ONNX: onnxruntime's logits and greedy tokens are the model's, with nothing but onnxruntime and the folder."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_export import write_model

from pipeline.hub.export import export
from pipeline.process.errors import InputMissingError, RecipeError

ROOT = Path(__file__).parents[2]
NANOCHAT = {
    "kind": "tandem",
    "n_kv_head": 2,
    "normalization": "rms_norm",
    "layer_norm_epsilon": 1e-6,
    "position_embedding": "rope",
    "rope_theta": 100_000.0,
    "use_bias": False,
    "qk_norm": True,
    "embedding_norm": True,
    "activation_function": "relu2",
    "tie_word_embeddings": False,
    "final_logit_softcapping": 15.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
OWN = {"value_embeddings": True, "residual_lambdas": True, "backout": True, "smear": True, "vocab_multiple": 64}
KINDS = {
    "gpt2": {},
    "nanochat": NANOCHAT,
    "tandem": NANOCHAT | OWN | {"window_pattern": "SSL", "sliding_window": 9, "pattern": "nanochat"},
}
ASKED = """
import json, sys
import numpy as np
import onnxruntime
assert "torch" not in sys.modules and "transformers" not in sys.modules
session = onnxruntime.InferenceSession(sys.argv[1] + "/model.onnx")
rows = json.loads(sys.argv[2])
for _ in range(24):
    width = max(map(len, rows))
    ids = np.array([[0] * (width - len(row)) + row for row in rows])
    mask = np.array([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    (logits,) = session.run(["logits"], {"input_ids": ids, "attention_mask": mask})
    rows = [row + [int(one[-1].argmax())] for row, one in zip(rows, logits)]
print(json.dumps(rows))
"""


@pytest.mark.slow  # transformers takes half a minute to trace a model
@pytest.mark.parametrize("kind", KINDS)
def test_onnxruntime_alone_gives_the_same_greedy_tokens(kind, tmp_path):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)

    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = write_model(tmp_path / "model", **KINDS[kind])
    command = [sys.executable, "-m", "pipeline.hub", "export", str(folder), "--to", "onnx"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    written = Path(done.stdout.strip())
    assert written == tmp_path / "model-onnx"
    assert json.loads((written / "config.json").read_text())["model_type"] == kind
    tokenizer = AutoTokenizer.from_pretrained(written)
    rows = [
        tokenizer(text).input_ids for text in ("What is a path?", "The loss of a row, its tokens and the last of them")
    ]
    command = [sys.executable, "-P", "-c", ASKED, str(written), json.dumps(rows)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    for row, longer in zip(rows, found, strict=True):
        expected = model.generate(torch.tensor([row]), max_new_tokens=24, do_sample=False, eos_token_id=None)
        assert longer == expected[0].tolist()


BY_OPTIMUM = """
import json, sys
import torch
from optimum.onnxruntime import ORTModelForCausalLM
model = ORTModelForCausalLM.from_pretrained(sys.argv[1])
ids = torch.tensor([json.loads(sys.argv[2])])
print(json.dumps(model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None).tolist()))
"""


@pytest.mark.slow  # needs an environment with optimum-onnx, which wants transformers 4
def test_optimum_takes_a_gpt2_of_ours_as_it_is_and_generates_its_greedy_tokens(tmp_path):
    """OPTIMUM: a virtual environment with optimum-onnx[onnxruntime]."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if "OPTIMUM" not in os.environ:
        pytest.skip("OPTIMUM names no environment with optimum-onnx")
    folder, programs = write_model(tmp_path / "model"), Path(os.environ["OPTIMUM"]) / "bin"
    command = [str(programs / "optimum-cli"), "export", "onnx", "--model", str(folder)]
    command += ["--task", "text-generation-with-past", str(tmp_path / "onnx")]
    subprocess.run(command, check=True, capture_output=True)
    ids = AutoTokenizer.from_pretrained(folder)("What is a path?").input_ids
    command = [str(programs / "python"), "-P", "-c", BY_OPTIMUM, str(tmp_path / "onnx"), json.dumps(ids)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    expected = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False, eos_token_id=None)
    assert found == expected.tolist()


def test_without_its_packages_the_sentence_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(InputMissingError, match=r"pip install .tandem-llm\[onnx\]"):
        export(str(write_model(tmp_path / "model")), to="onnx", max_shard_size="5GB")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_type_that_onnx_is_not_written_in_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="onnx takes f32"):
        export(str(write_model(tmp_path / "model")), to="onnx", dtype="f16", max_shard_size="5GB")
