#!/usr/bin/env bash
# Title: In llama.cpp's chat templates a variable set inside a loop lives on in the next iterations, unlike in Jinja2.
# Packages: xllamacpp==2026.10.11549 gguf==0.19.0 transformers==5.23.0 jinja2==3.1.6 numpy==2.4.6 httpx==0.28.1
# Guess: llama.cpp runs the template that the file carries, so the prompt is that of transformers, letter by letter;
#   a construct that its engine does not know would be an error.
# Seen: Jinja2 forgets a plain {% set %} at the end of each iteration (hence namespace()). llama.cpp keeps one scope
#   for the whole loop: a note set at the system message stays for every later turn, a line set at the first turn is
#   repeated at each, and a counter counts. A macro sees the loop's variables of its caller. Nothing is logged;
#   namespace() is alike in both. 2026-11-27, Python 3.11, Linux, CPU.
# Costs: a model is tuned with one prompt and served with another one. The first turn is often alike in both, so that a
#   short test passes.
# Tandem: its built-in template (pipeline/tokenizer/chat_template.jinja) keeps such values in namespace(), and
#   tests/engines/test_llama_cpp.py compares conversations in both. A foreign tokenizer's
#   template is not looked through.
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
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hi"},
    {"role": "user", "content": "bye"},
]
TEMPLATES = {
    # A note for the turn that has it.
    "note": "{% set note = '' %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set note = ' (rules)' %}{% endif %}"
    "[{{ m.role }}{{ note }}] {{ m.content }} {% endfor %}",
    # A line set at the first turn.
    "header": "{% for m in messages %}{% if loop.first %}{% set header = 'CHAT ' %}{% endif %}"
    "{% if header is defined %}{{ header }}{% endif %}[{{ m.role }}] {{ m.content }} {% endfor %}",
    "counter": "{% set n = 0 %}{% for m in messages %}{% set n = n + 1 %}{{ n }} {{ m.content }} {% endfor %}",
    "macro": "{% set style = 'plain' %}{% macro tag(role) %}[{{ role }} {{ style }}]{% endmacro %}"
    "{% for m in messages %}{% set style = m.content %}{{ tag(m.role) }} {% endfor %}",
    # The control: what template authors use for a value that shall live on.
    "namespace": "{% set s = namespace(n=0) %}{% for m in messages %}{% set s.n = s.n + 1 %}"
    "{{ s.n }} {{ m.content }} {% endfor %}",
}


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


def prompt_of_llama_cpp(template, messages):
    write_model("model.gguf", template)
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.warmup, params.verbosity = "model.gguf", 256, False, -1
    server = xllamacpp.Server(params)
    with httpx.Client(base_url=server.listening_address, trust_env=False, timeout=60) as client:
        return client.post("/apply-template", json={"messages": messages}).raise_for_status().json()["prompt"]


def prompt_of_transformers(template, messages):
    texts, _ = render_jinja_template([messages], chat_template=template, add_generation_prompt=True)
    return texts[0]


found = {}
for name, template in TEMPLATES.items():
    found[name] = prompt_of_transformers(template, MESSAGES), prompt_of_llama_cpp(template, MESSAGES)
    print(f"{name} in transformers:", found[name][0])
    print(f"{name} in llama.cpp:", found[name][1])

for name in ("note", "header", "counter", "macro"):
    assert found[name][0] != found[name][1], f"no longer holds: {name} is alike in both"
assert found["counter"][0].split()[-2:] == ["1", "bye"] and found["counter"][1].split()[-2:] == ["4", "bye"]
assert found["note"][1].count("(rules)") == 4 and found["note"][0].count("(rules)") == 1
assert found["namespace"][0] == found["namespace"][1] == "1 be brief 2 hello 3 hi 4 bye "
PROGRAM
