#!/usr/bin/env bash
# Title: transformers cuts a GGUF's control tokens to pieces if their names hold a space or DeepSeek's wide bars.
# Packages: transformers==5.23.0 gguf==0.19.0 xllamacpp==2026.10.11549 tokenizers==0.23.3 torch==2.13.0 httpx==0.28.1
#   numpy==2.4.6
# Guess: AutoTokenizer.from_pretrained(gguf_file=...) gives the ids of the tokenizer that the file was written from, as
#   llama.cpp does; a control token is one id, whatever its name.
# Seen: in a byte-level vocabulary, names made of other characters than the printable ones of the byte alphabet, as
#   DeepSeek writes them (U+FF5C, U+2581) or with a space, are taken for mislabelled: two control tokens become 28 or
#   26 ids. With wide bars BOS and EOS also get new ids behind the vocabulary, which no row of the embedding has.
#   llama.cpp gives the ids of the origin; <|user|> is right in both. 2026-11-27, Python 3.11, Linux, CPU.
# Costs: chats are tokenized in a way that the model has never seen, and tokenizer.eos_token_id is an id that it never
#   says, nor can read.
# Tandem: its control tokens are named like <|user|>. GGUF files are written, not read.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile transformers==5.23.0 gguf==0.19.0 xllamacpp==2026.10.11549 \
    tokenizers==0.23.3 torch==2.13.0 httpx==0.28.1 numpy==2.4.6 2>"$folder/pip" || \
    { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python - 2>log <<'PROGRAM' || { tail -n 20 log >&2; exit 1; }
import json

import gguf
import httpx
import numpy as np
import xllamacpp
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

NAMES = {  # BOS, EOS, user, assistant
    "plain": ["<|bos|>", "<|end|>", "<|user|>", "<|assistant|>"],
    "wide bars": ["<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"]
    + ["<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"],
    "spaces": ["<bos>", "<eos>", "<user turn>", "<assistant turn>"],
}


def train(control):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    settings = {"vocab_size": 300, "special_tokens": control, "show_progress": False}
    trainer = trainers.BpeTrainer(initial_alphabet=alphabet, **settings)
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 3, trainer)
    return tokenizer


def write(tokenizer):
    """Write a one-layer Llama of random weights with this tokenizer, as llama.cpp's converter writes it."""
    words = sorted(tokenizer.get_vocab(), key=tokenizer.token_to_id)
    control = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    file, draw = gguf.GGUFWriter("model.gguf", "llama"), np.random.default_rng(0)
    file.add_block_count(1)
    file.add_context_length(256)
    file.add_embedding_length(32)
    file.add_feed_forward_length(32)
    file.add_head_count(2)
    file.add_head_count_kv(2)
    file.add_layer_norm_rms_eps(1e-6)
    file.add_vocab_size(len(words))
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("gpt-2")
    file.add_token_list(words)
    file.add_token_types([gguf.TokenType.CONTROL if word in control else gguf.TokenType.NORMAL for word in words])
    file.add_token_merges([" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]])
    file.add_bos_token_id(0)
    file.add_eos_token_id(1)
    file.add_add_bos_token(False)
    shapes = {"token_embd": (len(words), 32), "output": (len(words), 32), "output_norm": (32,)}
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        shapes[f"blk.0.{name}"] = (32, 32)
    shapes |= {"blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
    for name, shape in shapes.items():
        file.add_tensor(f"{name}.weight", draw.normal(size=shape).astype(np.float32))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def ids_of_llama_cpp(text):
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.warmup, params.verbosity = "model.gguf", 256, False, -1
    server = xllamacpp.Server(params)
    with httpx.Client(base_url=server.listening_address, trust_env=False, timeout=60) as client:
        body = {"content": text, "add_special": False, "parse_special": True}
        return client.post("/tokenize", json=body).raise_for_status().json()["tokens"]


found = {}
for name, control in NAMES.items():
    origin = train(control)
    write(origin)
    read = AutoTokenizer.from_pretrained(".", gguf_file="model.gguf")
    text = f"{control[2]}the quick fox{control[3]}"
    right, ids = origin.encode(text, add_special_tokens=False).ids, read(text, add_special_tokens=False).input_ids
    ends = [read.bos_token_id, read.eos_token_id]
    found[name] = len(right), len(ids), ends, origin.get_vocab_size()
    print(f"{name}: {len(right)} ids, {len(ids)} in transformers; BOS and EOS {ends}, vocabulary {found[name][3]}")
    assert ids_of_llama_cpp(text) == right, "the control: llama.cpp gives the ids of the origin"
    plain = "the quick brown fox"
    assert read(plain).input_ids == origin.encode(plain).ids, "the control: plain text is right"
    assert (ids == right) == (name == "plain"), f"no longer holds: {name}"

assert found["plain"][2] == found["spaces"][2] == [0, 1], "the control: plain names keep their ids"
assert min(found["wide bars"][2]) >= found["wide bars"][3], "no longer holds: BOS and EOS have ids of the vocabulary"
PROGRAM
