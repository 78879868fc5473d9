#!/usr/bin/env bash
# Title: A changed pre-tokenizer or normalizer of a GPT2Tokenizer is saved to tokenizer.json and ignored when loaded.
# Packages: transformers==5.23.0 torch==2.13.0 tokenizers==0.23.3
# Guess: tokenizer.json holds the whole pipeline: a GPT-2 tokenizer given a pre-tokenizer that keeps words like
#   well-known whole and NFKC as its normalizer, retrained by train_new_from_iterator and saved, gives the same ids
#   when it is loaded.
# Seen: the file holds both (tokenizers reads it and gives the ids of before), but AutoTokenizer and GPT2Tokenizer
#   build the class's own pipeline and take only vocabulary and merges from it: a sample of 6 ids becomes one of 17,
#   pieces that were never so in training. The change of either alone is lost as well, and Qwen2Tokenizer does the
#   same. With the class named PreTrainedTokenizerFast in tokenizer_config.json the ids are right. No warning.
#   2026-11-27, Python 3.11, Linux, CPU.
# Costs: the rows of the training, made in the process that built the tokenizer, and the prompts of every later one
#   are tokenized differently; the text comes back from decode, so nothing shows.
# Tandem: compares what transformers makes of a tokenizer with its tokenizer.json and says where the ids differ
#   (_other_ids in pipeline/tokenizer/load.py).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 torch==2.13.0 tokenizers==0.23.3 \
    2>"$folder/pip" || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
HF_HUB_OFFLINE=1 HF_HOME="$folder/hf" venv/bin/python - <<'PROGRAM'
import json

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, GPT2Tokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer
from transformers.utils import logging

logging.set_verbosity_error()
TEXTS = ["the well-known rule isn't the well-known law", "the \ufb01rst of them isn't the first"] * 20
SAMPLE = "the well-known \ufb01rst of them isn't"  # with the ligature fi, which NFKC takes apart
WORDS = r"\p{N}{1,3}| ?[^\s\p{N}]+|\s+"  # a word with its hyphens and apostrophes is one piece

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate([*letters, "<|endoftext|>"])}, []))
backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
backend.decoder = decoders.ByteLevel()
PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>").save_pretrained("letters")

seen = {}
for tokenizer_class in (GPT2Tokenizer, Qwen2Tokenizer):
    for changed in ("nothing", "normalizer", "pre-tokenizer", "both"):
        tokenizer = tokenizer_class.from_pretrained("letters")
        if changed in ("normalizer", "both"):
            tokenizer.backend_tokenizer.normalizer = normalizers.NFKC()
        if changed in ("pre-tokenizer", "both"):
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex(WORDS), "isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            )
        tokenizer = tokenizer.train_new_from_iterator(TEXTS, 330, show_progress=False)
        ids = tokenizer(SAMPLE).input_ids
        tokenizer.save_pretrained("saved")
        same = {
            "tokenizers": Tokenizer.from_file("saved/tokenizer.json").encode(SAMPLE).ids == ids,
            "AutoTokenizer": AutoTokenizer.from_pretrained("saved")(SAMPLE).input_ids == ids,
            "its class": tokenizer_class.from_pretrained("saved")(SAMPLE).input_ids == ids,
        }
        loaded = AutoTokenizer.from_pretrained("saved")
        print(f"{tokenizer_class.__name__}, {changed} changed, same ids when loaded by:", same)
        if changed == "both":
            print("    before:", tokenizer.convert_ids_to_tokens(ids))
            print("    loaded:", loaded.convert_ids_to_tokens(loaded(SAMPLE).input_ids))
        config = json.load(open("saved/tokenizer_config.json"))
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        json.dump(config, open("saved/tokenizer_config.json", "w"))
        same["PreTrainedTokenizerFast"] = AutoTokenizer.from_pretrained("saved")(SAMPLE).input_ids == ids
        print("    by PreTrainedTokenizerFast:", same["PreTrainedTokenizerFast"])
        assert same["tokenizers"] and same["PreTrainedTokenizerFast"], "a control is off"
        seen[tokenizer_class, changed] = same

for (tokenizer_class, changed), same in seen.items():
    if changed == "nothing":
        assert all(same.values()), "an unchanged tokenizer gives other ids too"
    else:
        assert not same["AutoTokenizer"] and not same["its class"], "no longer holds: the saved pipeline is used"
PROGRAM
