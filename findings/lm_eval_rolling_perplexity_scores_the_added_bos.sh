#!/usr/bin/env bash
# Title: lm-eval's rolling perplexity counts a beginning token that the tokenizer adds as text to be predicted.
# Packages: lm-eval==0.4.13 transformers==5.23.0 accelerate==1.15.0 torch==2.13.0
# Guess: a tokenizer that puts <s> in front (as Llama's does) gives a document one <s>, as context and never a target.
# Seen: loglikelihood_rolling puts a prefix token before what the tokenizer gives, which begins with <s> already: the
#   model reads <s> <s> and is asked for the second one, which no training ever taught. A small Llama trained on
#   "<s> text" has 1.29 bits per byte instead of 0.31 on short texts: 16 nats more for each. The same weights with a
#   tokenizer that adds nothing, or with add_bos_token=False, give 0.31: the switch works against its name;
#   2026-11-28, Python 3.11, Linux, CPU.
# Costs: word_perplexity, byte_perplexity and bits_per_byte of such models carry some nats more for every document,
#   so the shorter the documents the worse, and models with and without <s> cannot be compared. Multiple choice and
#   other loglikelihood tasks are right.
# Tandem: its own class for the harness gives one <s> and does not score it (docs/evals.md).
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
import math

import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

logging.disable(logging.WARNING)
transformers.logging.set_verbosity_error()
torch.manual_seed(0)
TEXTS = ["the quick brown fox jumps", "a lazy dog sleeps all day", "over the hill and far away", "who sleeps by day?"]


def build_tokenizer(adds):
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=258, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(TEXTS, trainer)
    if adds:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")


adding, plain = build_tokenizer(True), build_tokenizer(False)
config = transformers.LlamaConfig(
    vocab_size=258, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
    max_position_embeddings=128, bos_token_id=0, eos_token_id=1,
)
model = transformers.LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for _ in range(30):
    for text in TEXTS:
        ids = torch.tensor([adding(text)["input_ids"]])
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
model.eval()


def by_hand(text, more=0):
    """Return the nats of a text after one <s>, or those of (<s> times `more`) and the text after it."""
    ids = torch.tensor([[0] * more + adding(text)["input_ids"]])
    with torch.no_grad():
        log_probs = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    return -log_probs.gather(1, ids[0, 1:, None]).sum().item()


def harness(tokenizer, **settings):
    """Return the nats of all texts as the harness has them."""
    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, device="cpu", **settings)
    requests = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in TEXTS]
    return -sum(wrapped.loglikelihood_rolling(requests))


bits = 1 / math.log(2) / sum(len(text.encode()) for text in TEXTS)
right, doubled = sum(map(by_hand, TEXTS)), sum(by_hand(text, more=1) for text in TEXTS)
added, bare, off = harness(adding), harness(plain), harness(adding, add_bos_token=False)
print("bits per byte by hand, after one <s>:", round(right * bits, 4))
print("bits per byte by hand, <s> as a target after <s>:", round(doubled * bits, 4))
print("bits per byte of lm-eval, tokenizer adds <s>:", round(added * bits, 4))
print("bits per byte of lm-eval, tokenizer adds nothing:", round(bare * bits, 4))
print("bits per byte of lm-eval, tokenizer adds <s>, add_bos_token=False:", round(off * bits, 4))
print("nats a document that the second <s> costs:", round((added - right) / len(TEXTS), 2))
assert abs(bare - right) < 0.01 and abs(off - right) < 0.01, "no longer holds: the controls"
assert abs(added - doubled) < 0.01 and added > 1.2 * right + 4, "no longer holds: <s> is no target"
PROGRAM
