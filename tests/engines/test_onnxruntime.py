"""onnxruntime alone, without torch and transformers, gives the greedy tokens of what `hub export --to onnx` writes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from environments import folder_with
from forms import FORMS, TEXTS, greedy, load, write_forms

pytestmark = pytest.mark.slow  # transformers takes half a minute to trace a model
ONNX = (
    *("onnx==1.23.2", "onnxscript==0.7.2", "onnxruntime==1.32.0"),
    *("onnx_ir==1.1.0", "ml_dtypes==0.6.0", "protobuf==7.36.2", "flatbuffers==25.12.19"),
)
ASKED = """
import json, sys
import numpy as np
import onnxruntime
assert "torch" not in sys.modules and "transformers" not in sys.modules
session = onnxruntime.InferenceSession(sys.argv[1] + "/model.onnx")
rows = json.loads(sys.argv[2])
for _ in range(32):
    width = max(map(len, rows))
    ids = np.array([[0] * (width - len(row)) + row for row in rows])
    mask = np.array([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    (logits,) = session.run(["logits"], {"input_ids": ids, "attention_mask": mask})
    rows = [row + [int(one[-1].argmax())] for row, one in zip(rows, logits)]
print(json.dumps(rows))
"""


@pytest.mark.parametrize("form", FORMS)
def test_onnxruntime_alone_gives_the_same_greedy_tokens(form, tmp_path):
    path = os.pathsep.join([str(Path(__file__).parents[2]), folder_with(*ONNX)])
    write_forms(tmp_path, form)
    model, tokenizer = load(tmp_path / form)
    prompts = [tokenizer(text).input_ids[:24] for text in TEXTS[:20]]
    given = {"capture_output": True, "text": True, "cwd": tmp_path, "env": os.environ | {"PYTHONPATH": path}}
    command = [sys.executable, "-m", "pipeline.hub", "export", form, "--to", "onnx", "--output", "written"]
    done = subprocess.run(command, **given)
    assert done.returncode == 0, done.stderr[-2000:]
    command = [sys.executable, "-P", "-c", ASKED, "written", json.dumps(prompts)]
    found = json.loads(subprocess.run(command, **given, check=True).stdout)
    assert found == [ids + greedy(model, ids, eos_token_id=None) for ids in prompts]
