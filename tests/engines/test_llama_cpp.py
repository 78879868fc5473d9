"""llama.cpp itself, from the wheel of xllamacpp in an environment of its own: what `hub export --to gguf` writes runs there alike.

Ids of texts in many scripts, greedy tokens in f32, ends of answers and conversations are those of transformers.
"""

import json
import random
from pathlib import Path

import pytest
import torch
from environments import python_with, run_there, slow_unless_installed
from forms import CHATS, TEXTS, greedy
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.contrib.export import export
from pipeline.model.build import build_model
from pipeline.model.saved import save_model
from pipeline.tokenizer.train import train_bpe

LLAMA_CPP = ("xllamacpp==2026.10.11549", "httpx")
pytestmark = [pytest.mark.full, *slow_unless_installed(*LLAMA_CPP)]
SIZES = {
    **{"num_hidden_layers": 3, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"intermediate_size": 256, "max_position_embeddings": 256, "initializer_range": 0.2, "head_dim": 32},
}
# Each architecture with another of the patterns; qwen3 with qwen2's is what model.preset portable writes.
MODELS = {
    "qwen3": ("qwen2", {}),
    "llama": ("gpt2", {}),
    "mistral": ("llama3", {"sliding_window": None}),
}
ENGINE = """
import json
import sys

import httpx
import xllamacpp

gguf, given, out = sys.argv[1:]
given = json.load(open(given))
params = xllamacpp.CommonParams()
params.model.path = gguf
params.n_ctx, params.n_parallel, params.warmup = 256, 1, False
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = xllamacpp.Server(params)
with httpx.Client(base_url=server.listening_address, trust_env=False, timeout=60) as client:

    def ask(path, body):
        return client.post(path, json=body).raise_for_status().json()

    def greedy(ids, **more):
        body = {"prompt": ids, "n_predict": 32, "temperature": 0, "return_tokens": True, **more}
        return ask("/completion", body)

    found = {"tokens": [greedy(ids, ignore_eos=True)["tokens"] for ids in given["prompts"]]}
    for special in (False, True):
        bodies = ({"content": text, "add_special": True, "parse_special": special} for text in given["texts"])
        found[f"ids_{special}"] = [ask("/tokenize", body)["tokens"] for body in bodies]
    found["ends"] = []
    for end in given["ends"]:
        said = greedy(given["prompts"][0], logit_bias=[[end, 1000]])
        found["ends"].append([said["stop_type"], said["tokens_predicted"]])
    found["chats"] = []
    for messages in given["chats"]:
        prompt = ask("/apply-template", {"messages": messages})["prompt"]
        body = {"content": prompt, "add_special": True, "parse_special": True}
        found["chats"].append(ask("/tokenize", body)["tokens"])
json.dump(found, open(out, "w"))
"""
# Latin, its accents, Greek, Cyrillic, Hebrew, Arabic, Devanagari, Thai, Kana, Han, Hangul, emoji, marks and signs.
SCRIPTS = (
    *((0x41, 0x7A), (0xC0, 0x24F), (0x370, 0x3FF), (0x400, 0x4FF), (0x590, 0x5FF), (0x600, 0x6FF), (0x900, 0x97F)),
    *((0xE00, 0xE7F), (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x1F300, 0x1F64F), (0x300, 0x36F)),
    *((0x20, 0x40), (0x2000, 0x206F), (0x1D400, 0x1D4FF)),
)
BETWEEN = (
    *" .-'\t",
    "  ",
    "\n",
    "\r\n",
    "\n\n",
    "'s",
    "'LL",
    "\u2019t",
    "12345",
    "\u0663\u0664",
    "!?",
    "\u00a0",
    "\u3000",
)
AWKWARD = ["  a\u00a0b\n\n\tc", "I'll WE'RE '\u017f", "x1y22 \u00bd", "<|bos|><|end|> <|assistant|>", "a" * 99 + " " * 99 + "\n" * 99]  # fmt: skip


def texts_of_many_scripts(count: int) -> list[str]:
    draw, texts = random.Random(0), []
    for number in range(count):
        first, last = SCRIPTS[number % len(SCRIPTS)]
        pieces = (chr(draw.randint(first, last)) if draw.random() < 0.7 else draw.choice(BETWEEN) for _ in range(60))
        texts.append("".join(pieces))
    return texts


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory) -> Path:
    pattern, fields = MODELS[request.param]
    tokenizer = train_bpe([*TEXTS, *texts_of_many_scripts(200)], vocab_size=1200, split_pattern=pattern)
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    made = build_model(
        request.param, {**SIZES, **fields, **ids, "vocab_size": len(tokenizer), "tie_word_embeddings": False}, seed=0
    )
    folder = tmp_path_factory.mktemp("models") / request.param
    save_model(made, folder)
    tokenizer.save_pretrained(folder)
    return folder


def differ_by(model, ids: list[int], tokens: list[int], **settings) -> float:
    """Return by how much the first token that is not transformers' lies below it in transformers' own logits; 0 without one."""
    own = greedy(model, ids, **settings)
    at = next((at for at, (ours, theirs) in enumerate(zip(own, tokens, strict=True)) if ours != theirs), None)
    if at is None:
        return 0.0
    with torch.no_grad():
        logits = model(torch.tensor([ids + own[:at]])).logits[0, -1]
    return (logits[own[at]] - logits[tokens[at]]).item()


def test_llama_cpp_gives_the_same_ids_greedy_tokens_ends_and_conversations(model, tmp_path):
    python = python_with(*LLAMA_CPP)
    mine, words = AutoModelForCausalLM.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)
    export(str(model), to="gguf", dtype="f32", output=str(tmp_path / "m.gguf"), max_shard_size="5GB")
    texts = [*AWKWARD, *texts_of_many_scripts(1000)]
    given = {
        "prompts": [words(text).input_ids[:24] for text in TEXTS[:20]],
        "texts": texts,
        "ends": mine.generation_config.eos_token_id,
        "chats": CHATS,
    }
    (tmp_path / "given.json").write_text(json.dumps(given))
    run_there(python, ENGINE, "m.gguf", "given.json", "found.json", cwd=tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    for special in (False, True):
        for text, ids in zip(texts, found[f"ids_{special}"], strict=True):
            assert ids == words(text, split_special_tokens=not special).input_ids, text
    settings = {"eos_token_id": None, "suppress_tokens": given["ends"]}
    for ids, tokens in zip(given["prompts"], found["tokens"], strict=True):
        assert differ_by(mine, ids, tokens, **settings) == 0.0
    assert found["ends"] == [["eos", 1]] * len(given["ends"])
    for messages, ids in zip(CHATS, found["chats"], strict=True):
        assert ids == words.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
