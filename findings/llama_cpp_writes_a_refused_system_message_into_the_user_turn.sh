#!/usr/bin/env bash
# Title: llama.cpp puts a system message into the first user turn where the chat template leaves it out or refuses it.
# Packages: xllamacpp==2026.10.11549 gguf==0.19.0 transformers==5.23.0 jinja2==3.1.6 numpy==2.4.6 httpx==0.28.1
# Guess: a template that passes over system messages drops them in every engine, and one that calls raise_exception on
#   them refuses the request.
# Seen: transformers does so. llama.cpp finds out whether the template prints a system message; where it does not,
#   also because it raised, the server writes system text, newline, user text as the user's turn and reports nothing.
#   A template that prints it is left alone, and a raise for another reason (two user turns in a row) is
#   an error there too. 2026-11-27, Python 3.11, Linux, CPU.
# Costs: the model is asked in a form it was never tuned on, although its template was written to prevent just that; a
#   test that a system message is refused passes in transformers alone.
# Tandem: its built-in template prints system messages, so it is left alone. A foreign tokenizer's template is exported
#   as it is (docs/export.md does not speak of it).
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
import jinja2
import numpy as np
import xllamacpp
from transformers.utils.chat_template_utils import render_jinja_template

SYSTEM = {"role": "system", "content": "be brief"}
USER = {"role": "user", "content": "hello"}
TURN = "[{{ m.role }}]{{ m.content }}"
REFUSAL = "{% if messages[0].role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}"
TEMPLATES = {
    "leaves out": "{% for m in messages %}{% if m.role != 'system' %}" + TURN + "{% endif %}{% endfor %}",
    "refuses": REFUSAL + "{% for m in messages %}" + TURN + "{% endfor %}",
    "prints": "{% for m in messages %}" + TURN + "{% endfor %}",
    "alternates": "{% for m in messages %}{% if m.role == 'user' and loop.index0 % 2 %}"
    "{{ raise_exception('two user turns') }}{% endif %}" + TURN + "{% endfor %}",
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
        return client.post("/apply-template", json={"messages": messages}).json().get("prompt", "an error")


def prompt_of_transformers(template, messages):
    try:
        texts, _ = render_jinja_template([messages], chat_template=template, add_generation_prompt=True)
    except jinja2.TemplateError:
        return "an error"
    return texts[0]


found = {}
for name, template in TEMPLATES.items():
    messages = [USER, USER] if name == "alternates" else [SYSTEM, USER]
    found[name] = prompt_of_transformers(template, messages), prompt_of_llama_cpp(template, messages)
    print(f"{name}: transformers {found[name][0]!r}, llama.cpp {found[name][1]!r}")

assert found["leaves out"] == ("[user]hello", "[user]be brief\nhello"), "no longer holds: it is left out"
assert found["refuses"] == ("an error", "[user]be brief\nhello"), "no longer holds: the template's refusal counts"
assert found["prints"] == ("[system]be brief[user]hello",) * 2, "the control: a template that prints system messages"
assert found["alternates"] == ("an error",) * 2, "the control: another refusal of a template is an error in both"
PROGRAM
