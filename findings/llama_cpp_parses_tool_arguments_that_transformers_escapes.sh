#!/usr/bin/env bash
# Title: Tool arguments sent as a JSON string, OpenAI's form, are escaped by transformers and parsed by llama.cpp.
# Packages: xllamacpp==2026.10.11549 gguf==0.19.0 transformers==5.23.0 jinja2==3.1.6 numpy==2.4.6 httpx==0.28.1
# Guess: arguments | tojson in a template prints what the message holds: of a string the escaped string, in each engine
#   alike; so what a model was tuned on is what it is asked with later.
# Seen: llama.cpp's server parses the string before the template sees it. For one and the same messages transformers
#   writes "arguments": "{\"b\": 1}" and llama.cpp "arguments": {"b": 1}. With a dictionary as arguments both write
#   the latter, and a template that asks "is string" first gets the same in both. 2026-11-27, Python 3.11, Linux, CPU.
# Costs: a model tuned by transformers or TRL on OpenAI's form learns to escape its calls, sees them unescaped in its
#   own history when served, and its escaped answer is taken for a string, not for the arguments.
# Tandem: its built-in template (pipeline/tokenizer/chat_template.jinja) takes the string as it comes, so training and
#   llama.cpp differ here for tools other than python; dictionaries are alike in both.
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

USER = {"role": "user", "content": "add"}
TOOL = {"role": "tool", "tool_call_id": "c1", "content": "3"}
LAST = {"role": "user", "content": "thanks"}
PLAIN = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content or '' }}{% for call in m.tool_calls or [] %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "{% endfor %} {% endfor %}"
)
ASKING = PLAIN.replace(
    "{{ call.function.arguments | tojson }}",
    "{% if call.function.arguments is string %}{{ call.function.arguments }}"
    "{% else %}{{ call.function.arguments | tojson }}{% endif %}",
)


def chat(arguments):
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, TOOL, LAST]


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
for name, template, arguments in (
    ("string", PLAIN, '{"b": 1, "a": "x"}'),
    ("dictionary", PLAIN, {"b": 1, "a": "x"}),
    ("string, template asks", ASKING, '{"b": 1, "a": "x"}'),
):
    messages = chat(arguments)
    found[name] = prompt_of_transformers(template, messages), prompt_of_llama_cpp(template, messages)
    print(f"{name}, transformers: {found[name][0]}")
    print(f"{name}, llama.cpp: {found[name][1]}")

right = '"arguments": {"b": 1, "a": "x"}'
escaped = '"arguments": "{\\"b\\": 1, \\"a\\": \\"x\\"}"'
assert escaped in found["string"][0], "no longer holds: transformers writes the arguments plainly"
assert right in found["string"][1], "no longer holds: llama.cpp writes the string"
for name in ("dictionary", "string, template asks"):
    assert found[name][0] == found[name][1] and right in found[name][0], f"the control: {name}"
PROGRAM
