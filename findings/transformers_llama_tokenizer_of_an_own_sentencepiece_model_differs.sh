#!/usr/bin/env bash
# Title: A Llama folder with your own tokenizer.model gets other tokens from AutoTokenizer in every text, unsaid.
# Packages: transformers==5.23.0 sentencepiece==0.2.3 tokenizers==0.23.3 protobuf==7.36.2
# Guess: AutoTokenizer and LlamaTokenizer read tokenizer.model, whose rules are in the file, and give sentencepiece's
#   ids, or refuse a model of another type.
# Seen: (1) with config.json and a BPE trained as Llama's was, LlamaTokenizer is right in 200 of 200 held-out texts,
#   AutoTokenizer wrong in 200: it gives a plain backend that adds no space in front, so the first word is cut up.
#   (2) With sentencepiece's default normalization LlamaTokenizer leaves it out: two spaces, a tab, a newline and a
#   ligature are other ids. (3) With sentencepiece's default type, unigram, LlamaTokenizer makes a BPE of it: wrong in
#   200 of 200, and 3.4 times as many tokens; AutoTokenizer has the type right and the first word wrong.
#   Nothing is logged. 2026-11-28, Python 3.11, Linux, no GPU.
# Costs: a model whose data were tokenized by sentencepiece is evaluated and served with other tokens; ids are all
#   valid, so that only losses show it. A tokenizer_config.json with the class mends (1) alone.
# Tandem: refuses a folder without tokenizer.json (pipeline/tokenizer/load.py).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 sentencepiece==0.2.3 tokenizers==0.23.3 protobuf==7.36.2 \
    2>"$folder/pip" || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
HF_HUB_OFFLINE=1 HF_HOME="$folder/hf" venv/bin/python - <<'PROGRAM'
import json
import os
import random

import sentencepiece
from transformers import AutoTokenizer, LlamaTokenizer

words = (
    "the quick brown fox jumps over lazy dogs while rain falls on green hills and seven small boats drift along "
    "rivers toward open water singing songs of older summers"
).split()
draw = random.Random(0)


def text(endings):
    return " ".join(draw.choice(words) + draw.choice(endings) for _ in range(12))


with open("corpus.txt", "w", encoding="utf-8") as corpus:
    corpus.write("\n".join(text(["", "s", "ing", "ed"]) for _ in range(2000)))
held_out = [text(["", "s", "er", "ly"]) for _ in range(200)]
spaces = ["the  fox", "the\tfox", "the\nfox", "\ufb01ne dogs"]
AS_LLAMA = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}


def train(folder, kind, **more):
    """Train a model of sentencepiece into a folder as Llama's: tokenizer.model and config.json."""
    os.mkdir(folder)
    sentencepiece.SentencePieceTrainer.train(
        input="corpus.txt",
        model_prefix=f"{folder}/tokenizer",
        vocab_size=500,
        model_type=kind,
        byte_fallback=True,
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
        **more,
    )
    with open(f"{folder}/config.json", "w") as config:
        json.dump({"model_type": "llama"}, config)


def differing(folder):
    """Return, for each way to load it, how many texts have other ids than sentencepiece gives, and how many tokens."""
    own = sentencepiece.SentencePieceProcessor(model_file=f"{folder}/tokenizer.model")
    print(f"{folder}: 'the fox' is", own.encode("the fox", out_type=str))
    seen = {"sentencepiece": (0, 0, sum(len(own.encode(row)) for row in held_out))}
    for name, tokenizer_class in (("LlamaTokenizer", LlamaTokenizer), ("AutoTokenizer", AutoTokenizer)):
        tokenizer = tokenizer_class.from_pretrained(folder)
        ids = {row: tokenizer.encode(row, add_special_tokens=False) for row in held_out + spaces}
        other = [sum(ids[row] != own.encode(row) for row in rows) for rows in (held_out, spaces)]
        seen[name] = (*other, sum(len(ids[row]) for row in held_out))
        print(f"   {name} ({type(tokenizer.backend_tokenizer.model).__name__}):", tokenizer.tokenize("the fox"))
        times = seen[name][2] / seen["sentencepiece"][2]
        print(f"      differs in {other[0]} of {len(held_out)} texts, {times:.2f} times the tokens;", end=" ")
        print(f"differs in {other[1]} of {len(spaces)} with spaces and a ligature")
    return seen


train("bpe_as_llama", "bpe", **AS_LLAMA)
train("bpe_default_rules", "bpe")
train("unigram_as_llama", "unigram", **AS_LLAMA)
as_llama, rules, unigram = (differing(name) for name in ("bpe_as_llama", "bpe_default_rules", "unigram_as_llama"))
assert as_llama["LlamaTokenizer"][:2] == (0, 0), "the control differs"
assert as_llama["AutoTokenizer"][0] > 150, "no longer holds: AutoTokenizer is right"
assert rules["LlamaTokenizer"][:2] == (0, len(spaces)), "no longer holds: the rules of the file are applied"
assert unigram["LlamaTokenizer"][0] > 150 and unigram["AutoTokenizer"][0] > 150, "no longer holds: unigram is read"
assert unigram["LlamaTokenizer"][2] > 1.5 * unigram["sentencepiece"][2]
with open("bpe_as_llama/tokenizer_config.json", "w") as config:
    json.dump({"tokenizer_class": "LlamaTokenizer"}, config)
print("with tokenizer_class in tokenizer_config.json:")
assert differing("bpe_as_llama")["AutoTokenizer"][:2] == (0, 0), "no longer holds: the class does not mend it"
PROGRAM
