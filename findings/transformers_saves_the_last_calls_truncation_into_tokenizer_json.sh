#!/usr/bin/env bash
# Title: A call with truncation=True is saved into tokenizer.json: programs that read it cut every text to that length.
# Packages: transformers==5.23.0 tokenizers==0.23.3
# Guess: truncation, max_length and padding are arguments of one call; what save_pretrained writes does not depend on
#   the texts or arguments that the tokenizer was called with before.
# Seen: the file holds what the last call asked for. After one call with truncation=True, max_length=8 and
#   padding="max_length" (what a tokenizing map of a data set does), a text of 52 tokens has 8 in every program that
#   reads the file by tokenizers (also through backend_tokenizer of transformers itself), a text of one token has 8 as
#   well, and a tokenizer trained from it by train_new_from_iterator inherits both. AutoTokenizer gives 52 and 1, so
#   transformers does not show it. A plain call before saving gives a clean file.
#   2026-11-28, Python 3.11, Linux, no GPU.
# Costs: prompts and documents are cut without a word in one program and whole in the other; which of two checkpoints
#   of one run has it depends on whether somebody tokenized a text between.
# Tandem: reads a foreign file with truncation and padding taken off (pipeline/tokenizer/encode.py) and makes no call
#   with them; a run that began with such a file saved one without.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 tokenizers==0.23.3 \
    2>"$folder/pip" || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
HF_HUB_OFFLINE=1 HF_HOME="$folder/hf" venv/bin/python - <<'PROGRAM'
import json
import logging

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

logging.disable(logging.WARNING)
sentence = "the quick brown fox jumps over the lazy dog and more "
long, short = sentence * 3, "the"
backend = Tokenizer(models.BPE())
backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
backend.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
special = ["<|endoftext|>"]
trainer = trainers.BpeTrainer(
    vocab_size=290, special_tokens=special, initial_alphabet=alphabet, show_progress=False
)
backend.train_from_iterator([sentence] * 20, trainer)
names = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "model_max_length": 512}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def lengths(folder):
    """Return the tokens of a long and a short text: by the file alone, and by transformers."""
    with open(f"{folder}/tokenizer.json") as file:
        stored = json.load(file)["truncation"]
    direct = Tokenizer.from_file(f"{folder}/tokenizer.json")
    loaded = AutoTokenizer.from_pretrained(folder)
    by_backend = [len(loaded.backend_tokenizer.encode(text).ids) for text in (long, short)]
    seen = {
        "tokenizers": [len(direct.encode(text).ids) for text in (long, short)],
        "backend_tokenizer": by_backend,
        "AutoTokenizer": [len(loaded(text).input_ids) for text in (long, short)],
    }
    limit = stored["max_length"] if stored else None
    print(f"{folder}: max_length in the file {limit}, tokens of a long and a short text", seen)
    return seen


tokenizer.save_pretrained("never_called")
tokenizer([long, short], truncation=True, max_length=8, padding="max_length")
tokenizer.save_pretrained("after_a_call_that_truncates")
heir = AutoTokenizer.from_pretrained("after_a_call_that_truncates")
heir.train_new_from_iterator([sentence] * 20, 290, show_progress=False).save_pretrained("trained_from_it")
tokenizer(long)
tokenizer.save_pretrained("after_one_more_plain_call")

clean = lengths("never_called")
cut = lengths("after_a_call_that_truncates")
trained = lengths("trained_from_it")
plain = lengths("after_one_more_plain_call")
assert clean["tokenizers"] == clean["AutoTokenizer"] and clean["tokenizers"][0] > 20, "the control is cut"
assert clean["tokenizers"][1] == 1, "the control is padded"
assert cut["tokenizers"] == cut["backend_tokenizer"] == [8, 8], "no longer holds: the file has no truncation"
assert cut["AutoTokenizer"] == clean["AutoTokenizer"], "no longer holds: transformers cuts, too"
assert trained["tokenizers"] == [8, 8], "no longer holds: a tokenizer trained from it is clean"
assert plain == clean, "no longer holds: a plain call does not clean the file"
PROGRAM
