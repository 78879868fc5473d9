"""Saved models load and answer alike in the lowest and in a newer transformers of pyproject's range, without this package."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from environments import folder_with, run_there, slow_unless_installed

from pipeline.model.build import build_model
from pipeline.model.saved import save_model
from tests.model.tiny_models import GPT2, MODERN, random_ids, stirred

PROJECT = (Path(__file__).parents[2] / "pyproject.toml").read_text()
LOWEST = re.search(r'"transformers>=([\d.]+),<6"', PROJECT)[1]  # type: ignore[index]
NEWEST = "5.24.0"  # of the index on 2026-11-25; this environment has that of constraints.txt
VERSIONS = [f"{LOWEST}.0", NEWEST]
pytestmark = [
    pytest.mark.full,
    *[mark for version in VERSIONS for mark in slow_unless_installed(f"transformers=={version}")],
]
QWEN3 = {
    **{"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"intermediate_size": 96, "max_position_embeddings": 64, "vocab_size": 101, "initializer_range": 0.3},
}
FORMS = {"portable": ("qwen3", QWEN3), "modern": ("tandem", MODERN), "gpt2": ("tandem", GPT2)}
LOAD = """
import json, sys, warnings

sys.modules["pipeline"] = None  # importing it is an error
import torch, transformers
from transformers import AutoModelForCausalLM

given, out = sys.argv[1:]
found = {"version": transformers.__version__}
warnings.filterwarnings("error", ".*past_key_values. is deprecated.*")  # the cache's name before 5.24
for folder, prompts in json.load(open(given)).items():
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    settings = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False, "eos_token_id": None}
    found[folder] = [model.generate(torch.tensor([ids]), **settings)[0].tolist() for ids in prompts]
    static = {"cache_implementation": "static", "disable_compile": True}
    found[f"{folder}, static cache"] = [model.generate(torch.tensor([ids]), **settings, **static)[0].tolist() for ids in prompts]
json.dump(found, open(out, "w"))
"""


@pytest.mark.parametrize("version", VERSIONS)
def test_saved_models_load_and_give_the_same_greedy_tokens(version, tmp_path):
    folder = folder_with(f"transformers=={version}")
    prompts = [random_ids(1, 4 + n, seed=n)[0].tolist() for n in range(5)]
    expected = {}
    for name, (kind, fields) in FORMS.items():
        model = stirred(build_model(kind, fields, seed=1)).eval()
        save_model(model, tmp_path / name)
        settings = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False, "eos_token_id": None}
        with torch.no_grad():
            expected[name] = [model.generate(torch.tensor([ids]), **settings)[0].tolist() for ids in prompts]
        expected[f"{name}, static cache"] = expected[name]
    (tmp_path / "given.json").write_text(json.dumps(dict.fromkeys(FORMS, prompts)))
    run_there(sys.executable, LOAD, "given.json", "found.json", cwd=tmp_path, PYTHONPATH=folder)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found.pop("version") == version
    assert found == expected
