#!/usr/bin/env bash
# Title: mlx-lm and llama.cpp turn thinking off in a template that asks for enable_thinking, though nobody said so.
# Packages: mlx-lm==0.32.2 mlx[cpu]==0.32.4 xllamacpp==2026.10.11549 gguf==0.19.0 transformers==5.23.0 httpx==0.28.1
#   tokenizers==0.23.3 numpy==2.4.6
# Guess: a template in Qwen 3's manner, which writes an empty think block only where enable_thinking is given as false,
#   renders the same prompt everywhere as long as the caller gives nothing.
# Seen: transformers leaves the name undefined: no block. mlx-lm passes enable_thinking by itself, False unless the
#   vocabulary has tokens <think> and </think>. llama.cpp passes it too, False where its look at the template finds no
#   way of thinking, as with the newlines of Qwen's block and no reasoning_content. In both the prompt then ends in an
#   empty think block. With the two tokens, or in llama.cpp with a template that prints earlier reasoning_content, all
#   agree. 2026-11-27, Python 3.11, Linux, CPU.
# Costs: a model tuned on this template, rendered by transformers or TRL, is asked with a beginning of the answer that
#   no row had, in two of three engines; a template that tests "is defined" takes the wrong branch.
# Tandem: its built-in template (pipeline/tokenizer/chat_template.jinja) does not ask for it. A foreign tokenizer's
#   template is kept as it is.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile mlx-lm==0.32.2 "mlx[cpu]==0.32.4" xllamacpp==2026.10.11549 \
    gguf==0.19.0 transformers==5.23.0 httpx==0.28.1 tokenizers==0.23.3 numpy==2.4.6 2>"$folder/pip" || \
    { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
HF_HUB_OFFLINE=1 venv/bin/python - 2>log <<'PROGRAM' || { tail -n 20 log >&2; exit 1; }
from pathlib import Path

import gguf
import httpx
import numpy as np
import xllamacpp
from mlx_lm.tokenizer_utils import load
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

MESSAGES = [{"role": "user", "content": "hello"}]
REASONING = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
TURNS = "{% for m in messages %}[{{ m.role }}] MIDDLE{{ m.content }} {% endfor %}"
START = (
    "{% if add_generation_prompt %}[assistant] "
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
SHORT, LONG = TURNS.replace("MIDDLE", "") + START, TURNS.replace("MIDDLE", REASONING) + START


def tokenizer_with(template, special, folder):
    """Return a tokenizer of single characters with these special tokens, saved in folder."""
    words = ["</s>", *(chr(number) for number in range(33, 127))]
    backend = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    made.add_special_tokens({"additional_special_tokens": special})
    made.chat_template = template
    made.save_pretrained(folder)
    return made


def write_model(path, template):
    """Write a one-layer model of random weights with a byte-level vocabulary and this template."""
    draw = np.random.default_rng(0)
    tokens = ["<s>", "</s>", *(chr(number) for number in range(33, 127)), "th"]
    file = gguf.GGUFWriter(path, "llama")
    file.add_block_count(1)
    file.add_context_length(512)
    file.add_embedding_length(32)
    file.add_feed_forward_length(32)
    file.add_head_count(2)
    file.add_head_count_kv(2)
    file.add_layer_norm_rms_eps(1e-6)
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("gpt-2")
    file.add_token_list(tokens)
    file.add_token_types([3, 3, *[1] * (len(tokens) - 2)])
    file.add_token_merges(["t h"])
    file.add_bos_token_id(0)
    file.add_eos_token_id(1)
    file.add_chat_template(template)
    shapes = {"token_embd": (len(tokens), 32), "output": (len(tokens), 32), "output_norm": (32,)}
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        shapes[f"blk.0.{name}"] = (32, 32)
    shapes |= {"blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
    for name, shape in shapes.items():
        file.add_tensor(f"{name}.weight", draw.normal(size=shape).astype(np.float32))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def prompt_of_llama_cpp(template, **more):
    write_model("model.gguf", template)
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.warmup, params.verbosity = "model.gguf", 256, False, -1
    server = xllamacpp.Server(params)
    with httpx.Client(base_url=server.listening_address, trust_env=False, timeout=60) as client:
        body = {"messages": MESSAGES, **more}
        return client.post("/apply-template", json=body).raise_for_status().json()["prompt"]


plain, block = "[user] hello [assistant] ", "[user] hello [assistant] <think>\n\n</think>\n\n"
settings = {"tokenize": False, "add_generation_prompt": True}
found = {}
for name, template in (("short", SHORT), ("long", LONG)):
    own = tokenizer_with(template, [], "bare")
    tokenizer_with(template, ["<think>", "</think>"], "thinking")
    found[name, "transformers"] = own.apply_chat_template(MESSAGES, **settings)
    found[name, "mlx-lm"] = load(Path("bare")).apply_chat_template(MESSAGES, **settings)
    found[name, "mlx-lm with think tokens"] = load(Path("thinking")).apply_chat_template(MESSAGES, **settings)
    found[name, "llama.cpp"] = prompt_of_llama_cpp(template)
    found[name, "llama.cpp told true"] = prompt_of_llama_cpp(template, chat_template_kwargs={"enable_thinking": True})
for (name, engine), prompt in found.items():
    print(f"{name} template, {engine}: {prompt!r}")

assert found["short", "mlx-lm"] == found["long", "mlx-lm"] == block, "no longer holds: mlx-lm adds nothing"
assert found["short", "llama.cpp"] == block, "no longer holds: llama.cpp adds nothing"
assert found["long", "llama.cpp"] == plain, "the control: a template that prints reasoning_content"
for name in ("short", "long"):
    for engine in ("transformers", "mlx-lm with think tokens", "llama.cpp told true"):
        assert found[name, engine] == plain, f"the control: {engine} writes no block"
PROGRAM
