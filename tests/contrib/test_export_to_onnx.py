"""ONNX by optimum, and what is refused; onnxruntime itself is in tests/engines/test_onnxruntime.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_export import write_model

from pipeline.contrib.export import export
from pipeline.process.errors import InputMissingError, RecipeError

BY_OPTIMUM = """
import json, sys
import torch
from optimum.onnxruntime import ORTModelForCausalLM
model = ORTModelForCausalLM.from_pretrained(sys.argv[1])
ids = torch.tensor([json.loads(sys.argv[2])])
print(json.dumps(model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None).tolist()))
"""


@pytest.mark.slow  # needs an environment with optimum-onnx, which wants transformers 4
def test_optimum_takes_our_gpt2_and_generates_its_greedy_tokens(tmp_path):
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
