#!/usr/bin/env bash
# Title: train_new_from_iterator of a Llama-like tokenizer has no byte tokens left and learns whole rows as tokens.
# Packages: transformers==5.23.0 tokenizers==0.23.3
# Guess: the new tokenizer has the old one's pipeline and guarantees: with byte_fallback any text comes back, and
#   tokens are words and parts of words.
# Seen: the trainer gets the special tokens alone, so the 256 tokens <0x00>..<0xFF> are not in the new vocabulary:
#   byte_fallback stays True and does nothing, and each character that the corpus did not have becomes <unk> and is
#   lost (here a newline, a capital, an accent, a percent sign). As these tokenizers do not cut at spaces, merges run
#   across them: of 1,000 tokens 770 hold a space inside, some a whole row of the corpus. A GPT-2-like tokenizer,
#   retrained by the same call, gives every text back and has no such token. 2026-11-28, Python 3.11, Linux, no GPU.
# Costs: a vocabulary for another language or domain, made from Llama 2's, Mistral's or Gemma's tokenizer, drops
#   characters for good and spends itself on phrases of its corpus. Nothing is logged; coverage on the corpus is 100 %.
# Tandem: trains its tokenizers anew, byte-level and cut by a pattern (pipeline/tokenizer), not from a foreign one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 tokenizers==0.23.3 \
    2>"$folder/pip" || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
HF_HUB_OFFLINE=1 HF_HOME="$folder/hf" RAYON_NUM_THREADS=2 venv/bin/python - <<'PROGRAM'
import logging
import random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

logging.disable(logging.WARNING)
SIZE = 1000
NAMES = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
words = "the a quick brown fox jumps over lazy dogs while rain falls on green hills and small boats drift off".split()
draw = random.Random(0)
sentences = [" ".join(draw.choices(words, k=8)) for _ in range(100)]
corpus = [draw.choice(sentences) + f" {draw.randrange(100)}" for _ in range(2000)]


def llama_like():
    """Return a tokenizer as those of Llama 2 and Mistral: byte fallback, spaces as a character, no cut at words."""
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "t", "h", "e"]
    ids = {token: i for i, token in enumerate(vocabulary)}
    backend = Tokenizer(models.BPE(ids, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **NAMES)


def gpt2_like():
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **NAMES)


def seen(old):
    new = old.train_new_from_iterator(corpus, SIZE, show_progress=False)
    back = {}
    for name, tokenizer in (("old", old), ("new", new)):
        back[name] = [tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    plain = [token.replace("\u2581", " ").replace("\u0120", " ") for token in new.get_vocab()]
    across = [token for token in plain if " " in token.strip()]
    return new, back, across


texts = ["the quick fox", "The fox\njumps", "caf\u00e9", "50% of it"]
old = llama_like()
new, back, across = seen(old)
bytes_left = sum(token.startswith("<0x") for token in new.get_vocab())
fallback = new.backend_tokenizer.model.byte_fallback
print("tokens <0x..> before and after:", sum(token.startswith("<0x") for token in old.get_vocab()), bytes_left)
print("byte_fallback of the new one:", fallback)
print("texts given back by the old one:", back["old"])
print("texts given back by the new one:", back["new"])
print("tokens of the new one with a space inside:", len(across), "of", len(new), "such as", max(across, key=len))
_, level_back, level_across = seen(gpt2_like())
print("texts given back by a retrained GPT-2-like one:", level_back["new"], "tokens across words:", len(level_across))

assert back["old"] == texts and level_back["old"] == texts and level_back["new"] == texts, "the control loses text"
assert fallback and bytes_left == 0, "no longer holds: the byte tokens are kept"
assert back["new"][0] == texts[0] and all("<unk>" in text for text in back["new"][1:]), "no longer holds"
assert len(across) > 400 and len(level_across) == 0, "no longer holds: tokens do not run across words"
assert any(token.strip() in corpus for token in across), "no longer holds: no row is a token"
PROGRAM
