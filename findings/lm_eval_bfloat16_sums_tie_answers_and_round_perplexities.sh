#!/usr/bin/env bash
# Title: lm-eval rounds log-likelihoods of a bfloat16 checkpoint to 8 bits: answers tie and the first one wins.
# Packages: lm-eval==0.4.13 transformers==5.23.0 accelerate==1.15.0 torch==2.13.0
# Guess: log-probabilities are added up in float32, whatever the weights are; a perplexity is exact to some digits.
# Seen: softmax_dtype is None by default, so log_softmax and the sum over the tokens are done in bfloat16, and float()
#   comes last. Every log-likelihood is a bfloat16 number: texts of 1,500 tokens give multiples of 32 or 64, up to tens
#   of nats off. Of 200 pairs of long answers 16 end in an exact tie, which argmax gives to the first (6 of these
#   wrongly; some more or fewer on another CPU). With softmax_dtype="float32" on the same weights there is no tie;
#   2026-11-28, Python 3.11, Linux, CPU.
# Costs: dtype="auto" is the default, so a checkpoint saved in bfloat16 meets this without a setting. Tasks with long
#   answers lean towards the first choice; perplexities of near checkpoints jump by steps or do not move at all.
# Tandem: opens checkpoints in float32 (pipeline/evals/subject.py), so sums are of float32.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet lm-eval==0.4.13 transformers==5.23.0 accelerate==1.15.0 torch==2.13.0 \
  2>"$folder/pip" || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
export HF_HUB_OFFLINE=1 HF_HOME="$folder/home" TQDM_DISABLE=1 TOKENIZERS_PARALLELISM=false
venv/bin/python 2>log - <<'PROGRAM' || { tail -20 log >&2; exit 1; }
import logging
import random

import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

logging.disable(logging.WARNING)
transformers.logging.set_verbosity_error()
words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "sleeps"]
bytes_only = Tokenizer(models.BPE())
bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
bytes_only.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(vocab_size=257, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False)
bytes_only.train_from_iterator(words, trainer)
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bytes_only, bos_token="<s>", eos_token="<s>")

torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    max_position_embeddings=2048, bos_token_id=0, eos_token_id=0, initializer_range=0.2, dtype="bfloat16",
)
transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained("checkpoint")

source = random.Random(0)


def text(length):
    return " ".join(source.choices(words, k=length))[:length]


texts = [text(1500) for _ in range(6)]
questions = [text(30).strip() for _ in range(200)]
answers = []
for _ in questions:  # two long answers that differ in their last word
    start, (one, other) = text(80).strip(), source.sample(words, k=2)
    answers.append([f" {start} {one}", f" {start} {other}"])


def measure(**settings):
    """Return the log-likelihoods of the texts, and of both answers of every question."""
    model = HFLM(pretrained="checkpoint", tokenizer=tokenizer, batch_size=4, device="cpu", **settings)
    whole = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in texts]
    pairs = [Instance("loglikelihood", {}, (q, a), 0) for q, both in zip(questions, answers) for a in both]
    sums = [score for score, _ in model.loglikelihood(pairs)]
    return model.loglikelihood_rolling(whole), list(zip(sums[::2], sums[1::2]))


def rounded(value):
    return torch.tensor(value).bfloat16().item()


default, exact = measure(), measure(softmax_dtype="float32")
print("log-likelihoods of texts, by default:", default[0])
print("log-likelihoods of texts, float32:   ", [round(value, 2) for value in exact[0]])
ties = [sum(one == two for one, two in kind[1]) for kind in (default, exact)]
first = sum(d > c for (a, b), (c, d) in zip(default[1], exact[1]) if a == b)
print("pairs of answers that tie, of 200, by default and with float32:", *ties)
print("ties in which the second answer is the likelier one by float32, but the first is taken:", first)
values = default[0] + [value for pair in default[1] for value in pair]
assert all(value == rounded(value) for value in values), "no longer holds: the sums are finer than bfloat16"
assert not any(value == rounded(value) for value in exact[0]), "no longer holds: the control is rounded as well"
assert all(value % 16 == 0 for value in default[0]), "no longer holds: the steps are finer"
assert ties[0] >= 5 and ties[1] == 0 and first > 0, "no longer holds: no ties"
PROGRAM
