#!/usr/bin/env bash
# Title: On two ranks the Trainer's eval_loss of rows of unequal length may be lower than the loss of every token.
# Packages: transformers==5.23.0 accelerate==1.15.0 torch==2.13.0 numpy==2.4.6
# Guess: eval_loss weighs rows or tokens somewhat differently with the number of ranks, but stays an average of
#   losses: for a model that gives each token ln 64 = 4.1589 it is 4.1589.
# Seen: with the default average_tokens_across_devices=True each rank's sum is divided by the tokens of all ranks, and
#   these shares are then weighed by rows, of which those that filled up the last batch are cut away. Four rows of 5
#   tokens and one of 41, batches of 4: 4.1589 in one process, 2.8378 on two ranks; the long rows first: 4.48.
#   average_tokens_across_devices=False, or rows of equal length, give 4.1589.
#   2026-11-27, Python 3.11, Linux, CPU, gloo.
# Costs: validation losses and perplexities of chats cannot be compared between numbers of ranks, or with those of an
#   evaluation by hand; the best checkpoint may be chosen by where the long rows lie.
# Tandem: does not use this number: val/loss and val/bpb are sums over all rows divided by all tokens.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
packages="transformers==5.23.0 accelerate==1.15.0 torch==2.13.0 numpy==2.4.6"
"$folder/venv/bin/pip" install --quiet $packages 2>"$folder/pip" || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 HF_HUB_DISABLE_PROGRESS_BARS=1
cat >program.py <<'PROGRAM'
import math
import os
import warnings

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
config = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
)
model = LlamaForCausalLM(config)
torch.nn.init.zeros_(model.lm_head.weight)  # all logits are zero: each token has the loss ln 64


def collate(rows):
    longest = max(len(row["ids"]) for row in rows)
    ids = [row["ids"] + [0] * (longest - len(row["ids"])) for row in rows]
    labels = [row["ids"] + [-100] * (longest - len(row["ids"])) for row in rows]
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)}


def eval_loss(lengths, **settings):
    rows = [{"ids": [(7 * row + place) % 60 + 3 for place in range(length)]} for row, length in enumerate(lengths)]
    arguments = TrainingArguments(
        "out", use_cpu=True, per_device_eval_batch_size=4, report_to=[], disable_tqdm=True,
        remove_unused_columns=False, **settings,
    )
    trainer = Trainer(model, arguments, data_collator=collate, eval_dataset=rows)
    trainer.remove_callback(PrinterCallback)
    return trainer.evaluate()["eval_loss"]


one_long, one_short, equal = [5, 5, 5, 5, 41], [41, 41, 41, 41, 5], [9] * 5
seen = {
    "one long row at the end": eval_loss(one_long),
    "one short row at the end": eval_loss(one_short),
    "rows of equal length": eval_loss(equal),
    "one long row, average_tokens_across_devices=False": eval_loss(one_long, average_tokens_across_devices=False),
}
true = math.log(64)
if rank == 0:
    for name, loss in seen.items():
        print(f"{ranks} ranks, {name}: {loss:.4f} (each token: {true:.4f})")
wrong = list(seen)[:2] if ranks == 2 else []
for name, loss in seen.items():
    if name not in wrong:
        assert abs(loss - true) < 1e-3, "the control is not right: " + name
if ranks == 2:
    assert seen["one long row at the end"] < 0.75 * true, "no longer holds: below each token's loss"
    assert seen["one short row at the end"] > 1.05 * true, "no longer holds: above each token's loss"
torch.distributed.barrier()
os._exit(0)
PROGRAM
venv/bin/torchrun --standalone --nproc-per-node 1 program.py
venv/bin/torchrun --standalone --nproc-per-node 2 program.py
