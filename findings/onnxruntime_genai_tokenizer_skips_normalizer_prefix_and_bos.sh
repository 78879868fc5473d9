#!/usr/bin/env bash
# Title: onnxruntime-genai's tokenizer leaves out the normalizer, the prefix space and the BOS of tokenizer.json.
# Packages: onnxruntime-genai==0.18.0 onnxruntime==1.32.0 onnx==1.23.2 tokenizers==0.23.3 numpy==2.4.6
# Guess: og.Tokenizer reads the checkpoint's tokenizer.json, so it gives its ids, or refuses what it does not know.
# Seen: a plain byte-level BPE, also with another split pattern, gives the same ids. NFC and lower-casing normalizers,
#   add_prefix_space and the BOS of a TemplateProcessing post-processor are passed over without a word, also when
#   tokenizer_config.json says add_bos_token. 2026-11-27, Python 3.11, Linux, CPU.
# Costs: a model whose rows began with BOS answers prompts without it; with a lower-casing tokenizer every capital
#   letter becomes pieces that the model hardly saw. An English test text in lower case passes.
# Tandem: its own tokenizers have none of the four (pipeline/tokenizer/train.py) and write BOS by the chat template;
#   onnxruntime-genai is not used: `hub export --to onnx` is for onnxruntime, the ids come from transformers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile onnxruntime-genai==0.18.0 onnxruntime==1.32.0 onnx==1.23.2 \
    tokenizers==0.23.3 numpy==2.4.6 2>"$folder/pip" || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
venv/bin/python - <<'PROGRAM'
import json
import unicodedata
from pathlib import Path

import numpy as np
import onnx
import onnxruntime_genai as og
from onnx import TensorProto, helper
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = ["the quick brown fox", "a 2024 fox, it's gone", "The Quick FOX", unicodedata.normalize("NFD", "caf\u00e9")]
WORDS = ["the quick brown fox a 2024 it's gone caf\u00e9 The Quick FOX", " a the fox caf\u00e9"] * 3
IDS = 400


def write_model():
    """Write a folder that og.Model opens: a table of logits in place of a network."""
    inputs = [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["rows", "length"])]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["rows", "length", IDS])]
    logits = np.eye(IDS, dtype=np.float32).tobytes()
    table = helper.make_tensor("table", TensorProto.FLOAT, [IDS, IDS], logits, raw=True)
    node = helper.make_node("Gather", ["table", "input_ids"], ["logits"])
    graph = helper.make_graph([node], "model", inputs, outputs, [table])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), "model.onnx")
    decoder = {
        **{"filename": "model.onnx", "head_size": 16, "hidden_size": 64, "num_attention_heads": 4},
        **{"num_hidden_layers": 1, "num_key_value_heads": 2, "session_options": {"provider_options": []}},
        **{"inputs": {"input_ids": "input_ids"}, "outputs": {"logits": "logits"}},
    }
    model = {"type": "llama", "vocab_size": IDS, "context_length": 64, "decoder": decoder}
    model |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    Path("genai_config.json").write_text(json.dumps({"model": model, "search": {"max_length": 64}}))


def make_tokenizer(normalizer=None, prefix=False, split=None, bos=False):
    tokenizer = Tokenizer(models.BPE())
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=split is None)
    steps = [] if split is None else [pre_tokenizers.Split(Regex(split), behavior="isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, bytes_of]) if steps else bytes_of
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    settings = {"vocab_size": IDS, "special_tokens": ["<s>", "</s>"], "show_progress": False}
    trainer = trainers.BpeTrainer(initial_alphabet=alphabet, **settings)
    tokenizer.train_from_iterator(WORDS, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def ids_of_both(tokenizer):
    tokenizer.save("tokenizer.json")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    config["add_bos_token"] = True
    Path("tokenizer_config.json").write_text(json.dumps(config))
    engine = og.Tokenizer(og.Model("."))
    return [(tokenizer.encode(text).ids, [int(token) for token in engine.encode(text)]) for text in TEXTS]


write_model()
llama3 = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
cases = {
    "plain": make_tokenizer(),
    "other split pattern": make_tokenizer(split=llama3),
    "NFC": make_tokenizer(normalizers.NFC()),
    "lower case": make_tokenizer(normalizers.Lowercase()),
    "prefix space": make_tokenizer(prefix=True),
    "BOS": make_tokenizer(bos=True),
}
differ = {}
for name, tokenizer in cases.items():
    pairs = ids_of_both(tokenizer)
    differ[name] = [text for text, (right, found) in zip(TEXTS, pairs, strict=True) if right != found]
    print(f"{name}: {len(differ[name])} of {len(TEXTS)} texts have other ids, first text {pairs[0]}")

assert not differ["plain"] and not differ["other split pattern"], "the controls: these two are right"
assert differ["NFC"] == TEXTS[3:], "no longer holds: NFC is applied"
assert differ["lower case"] == TEXTS[2:3], "no longer holds: text is lower-cased"
assert differ["prefix space"] == TEXTS, "no longer holds: the prefix space is written"
assert differ["BOS"] == TEXTS, "no longer holds: BOS is written"
PROGRAM
