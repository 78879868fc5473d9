"""MLX itself, its build for a CPU in an environment of its own: what mlx_lm.convert makes of `portable` gives transformers' tokens."""

import json

import pytest
from environments import python_with, run_there, slow_unless_installed
from forms import CHATS, TEXTS, greedy, load, write_forms

MLX = ("mlx-lm==0.32.2", "mlx[cpu]==0.32.4")
pytestmark = [pytest.mark.full, *slow_unless_installed(*MLX)]
ENGINE = """
import json
import sys

import mlx.core as mx
from mlx_lm import convert, load, stream_generate
from mlx_lm.sample_utils import make_logits_processors

folder, given, out = sys.argv[1:]
given = json.load(open(given))
convert(folder, "converted", dtype="float32")
model, tokenizer = load("converted")


def greedy(ids, **more):
    return list(stream_generate(model, tokenizer, ids, max_tokens=32, **more))


ends = [greedy(given["prompts"][0], logits_processors=make_logits_processors({end: 100.0})) for end in given["ends"]]
chats = [tokenizer.apply_chat_template(messages, add_generation_prompt=True) for messages in given["chats"]]
found = {
    "tokens": [[answer.token for answer in greedy(ids)] for ids in given["prompts"]],
    "chats": chats,
    "ends": [[answers[-1].finish_reason, answers[-1].generation_tokens] for answers in ends],
}
json.dump(found, open(out, "w"))
"""


def test_mlx_gives_transformers_greedy_tokens_conversations_and_ends(tmp_path):
    python = python_with(*MLX)
    write_forms(tmp_path, "portable")
    model, tokenizer = load(tmp_path / "portable")
    prompts = [tokenizer(text).input_ids[:24] for text in TEXTS[:20]]
    given = {"prompts": prompts, "chats": CHATS, "ends": model.generation_config.eos_token_id}
    (tmp_path / "given.json").write_text(json.dumps(given))
    run_there(python, ENGINE, "portable", "given.json", "found.json", cwd=tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["tokens"] == [greedy(model, ids) for ids in prompts]
    chats = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in CHATS]
    assert found["chats"] == chats
    assert found["ends"] == [["stop", 1]] * len(given["ends"])
