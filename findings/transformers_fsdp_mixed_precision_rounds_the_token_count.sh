#!/usr/bin/env bash
# Title: fsdp_mixed_precision=True casts num_items_in_batch to bfloat16 too: 1027 tokens count as 1024.
# Packages: transformers==5.23.0 accelerate==1.15.0 torch==2.13.0 numpy==2.4.6
# Guess: mixed precision concerns weights and activations; the divisor of the loss is exact, as under autocast.
# Seen: the policy casts every floating point tensor that is passed to forward, and the Trainer passes its token count
#   as one (float32, since it divides it by the ranks that share a batch). The loss function gets 1024 for 1027, 1032
#   for 1029, 32768 for 32895: up to 0.4 % of each step's gradient and logged loss, in steps that jump with the number
#   of tokens. An integer tensor, fsdp_mixed_precision=False and torch.autocast leave it exact.
#   2026-11-27, Python 3.11, Linux, CPU, gloo.
# Costs: losses of the same rows differ by a third of a percent between batch sizes and numbers of ranks, more than
#   what is compared in ablations; sums over many batches are biased where the count is constant.
# Tandem: shards with torch's default policy and autocast around the forward pass, so that the count is exact.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
packages="transformers==5.23.0 accelerate==1.15.0 torch==2.13.0 numpy==2.4.6"
"$folder/venv/bin/pip" install --quiet $packages 2>"$folder/pip" || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 HF_HUB_DISABLE_PROGRESS_BARS=1
cat >program.py <<'PROGRAM'
import os
import warnings

import torch
import torch.distributed as dist
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
arguments = TrainingArguments(
    "out", use_cpu=True, per_device_train_batch_size=13, max_steps=1, save_strategy="no", report_to=[],
    disable_tqdm=True, remove_unused_columns=False,
)
rank = dist.get_rank()
config = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
)
torch.manual_seed(0)
if rank == 0:
    LlamaForCausalLM(config).save_pretrained("model")
dist.barrier()


def model_and_counts(mixed):
    """Return a sharded model, and the list of the token counts that its loss function will get."""
    how = DistributedConfig(fsdp_size=2, fsdp_mixed_precision=mixed)
    model = LlamaForCausalLM.from_pretrained("model", distributed_config=how)
    counts, loss_function = [], model.loss_function

    def noted(*inputs, **named):
        counts.append(float(named["num_items_in_batch"]))
        return loss_function(*inputs, **named)

    model.loss_function = noted
    return model, counts


def by_trainer(mixed):
    """Return the count in a step of 26 rows with 1027 labels, which two ranks share."""
    model, counts = model_and_counts(mixed)
    rows = [{"ids": list(range(3, 43 + (row == 0) * 13))} for row in range(26)]  # 39 labels each, 52 in the first

    def collate(batch):
        longest = max(len(row["ids"]) for row in batch)
        ids = torch.tensor([row["ids"] + [0] * (longest - len(row["ids"])) for row in batch])
        return {"input_ids": ids, "labels": ids.masked_fill(ids == 0, -100)}

    trainer = Trainer(model, arguments, data_collator=collate, train_dataset=rows)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return counts[0]


def by_hand(mixed, count):
    model, counts = model_and_counts(mixed)
    ids = torch.arange(3, 11)[None]
    model(ids, labels=ids, num_items_in_batch=count)
    return counts[0]


step = {mixed: by_trainer(mixed) for mixed in (False, True)}
floats = {mixed: [by_hand(mixed, torch.tensor(float(n))) for n in (1027, 1029, 32895)] for mixed in (False, True)}
integer = by_hand(True, torch.tensor(1027))
if rank == 0:
    print("labels of the Trainer's step, exact and with mixed precision:", step[False], step[True])
    print("1027, 1029, 32895 without mixed precision:", floats[False])
    print("1027, 1029, 32895 with mixed precision:", floats[True])
    print("1027 as an integer with mixed precision:", integer)
    assert step[False] == 1027 and floats[False] == [1027, 1029, 32895] and integer == 1027, "the control is not right"
    assert step[True] == 1024 and floats[True] == [1024, 1032, 32768], "no longer holds"
dist.barrier()
os._exit(0)
PROGRAM
venv/bin/torchrun --standalone --nproc-per-node 2 program.py
