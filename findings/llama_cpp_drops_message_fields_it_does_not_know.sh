#!/usr/bin/env bash
# Title: llama.cpp drops the fields of a message that it does not know before the chat template sees them.
# Packages: xllamacpp==2026.10.11549 gguf==0.19.0 transformers==5.23.0 jinja2==3.1.6 numpy==2.4.6 httpx==0.28.1
# Guess: messages reach the template as they were sent, as in transformers: a template may use a field of its own
#   ("thinking", "language", "rating"), and llama.cpp would refuse what it cannot take.
# Seen: only role, content, name, reasoning_content and the fields of tools arrive. Others are undefined in the
#   template and print nothing: "thinking" of earlier answers vanishes from the prompt, "reasoning_content" stays. The
#   role "developer" becomes "system". The request succeeds and nothing is logged; what chat_template_kwargs sends does
#   arrive. 2026-11-27, Python 3.11, Linux, CPU.
# Costs: data with a field for each turn trains and tests well in transformers, and is served without it: a model
#   steered by it answers unsteered.
# Tandem: its built-in template uses role, content and tool_calls alone. For foreign templates
#   pipeline/tokenizer/chat.py hands reasoning over by every name; llama.cpp passes on reasoning_content alone.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile xllamacpp==2026.10.11549 gguf==0.19.0 transformers==5.23.0 \
    jinja2==3.1.6 numpy==2.4.6 httpx==0.28.1 2>"$folder/pip" || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
HF_HUB_OFFLINE=1 venv/bin/python - 2>log <<'PROGRAM' || { tail -n 20 log >&2; exit 1; }
import gguf
import httpx
import numpy as np
import xllamacpp
from transformers.utils.chat_template_utils import render_jinja_template

MESSAGES = [
    {"role": "developer", "content": "be brief"},
    {"role": "user", "content": "hello", "name": "ann", "language": "en", "rating": 5},
    {"role": "assistant", "content": "hi", "thinking": "greet", "reasoning_content": "greet back"},
    {"role": "user", "content": "bye", "language": "fr"},
]
TEMPLATE = (
    "{% set fields = ['name', 'language', 'rating', 'thinking', 'reasoning_content'] %}"
    "{% for m in messages %}[{{ m.role }}{% for key in fields %}"
    "{% if m[key] is defined %} {{ key }}={{ m[key] }}{% endif %}{% endfor %}] {{ m.content }} {% endfor %}{{ style }}"
)


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


def prompt_of_llama_cpp(template, body):
    write_model("model.gguf", template)
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.warmup, params.verbosity = "model.gguf", 256, False, -1
    server = xllamacpp.Server(params)
    with httpx.Client(base_url=server.listening_address, trust_env=False, timeout=60) as client:
        return client.post("/apply-template", json=body).raise_for_status().json()["prompt"]


def prompt_of_transformers(template, messages, **more):
    texts, _ = render_jinja_template([messages], chat_template=template, add_generation_prompt=True, **more)
    return texts[0]


theirs = prompt_of_transformers(TEMPLATE, MESSAGES, style="terse")
body = {"messages": MESSAGES, "chat_template_kwargs": {"style": "terse"}}
found = prompt_of_llama_cpp(TEMPLATE, body)
print("transformers:", theirs)
print("llama.cpp:", found)

for field in ("language=en", "rating=5", "thinking=greet", "language=fr", "developer"):
    assert field in theirs, "the control: transformers hands the field over"
    assert field not in found, f"no longer holds: llama.cpp hands {field} over"
assert "[system] be brief" in found, "no longer holds: the role developer stays"
for field in ("name=ann", "reasoning_content=greet back", "terse"):
    assert field in theirs and field in found, f"the control: {field} arrives in both"
PROGRAM
