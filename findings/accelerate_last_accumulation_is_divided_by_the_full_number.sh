#!/usr/bin/env bash
# Title: accelerate divides an epoch's last, incomplete accumulation by the full number of micro-batches.
# Packages: accelerate==1.15.0 torch==2.13.0 numpy==2.4.6
# Guess: accumulate() steps at the end of the loader, so it averages over the micro-batches that the step has.
# Seen: it does step there, but backward() has divided each loss by gradient_accumulation_steps: with 10 micro-batches
#   and 4 a step, SGD moves by 1, 1 and 0.5 for a gradient that is always 1, in each epoch. A clip at 0.6 cuts the
#   first two steps to 0.6 and leaves the last. With 12 micro-batches all steps are 1;
#   with 9 the last one is 0.25; 2026-11-28, Python 3.11, Linux, CPU.
# Costs: the last rows of every epoch count for a part of the others; the logged loss hides it, as it is not what was
#   divided. With few steps in an epoch (fine-tuning: 2.25 steps) this is a visible share of the training.
# Tandem: trains through transformers' Trainer, which divides by the real number of targets of the step.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet accelerate==1.15.0 torch==2.13.0 numpy==2.4.6 \
  2>"$folder/pip" || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
HF_HUB_OFFLINE=1 venv/bin/python - <<'PROGRAM'
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader


def moves(micro_batches, clip=None, epochs=1):
    """Return how far each step moves a weight whose gradient is 1 in every micro-batch, 4 micro-batches a step."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(torch.ones(micro_batches, 1)))
    seen, before = [], 0.0
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).mean())
                if clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
            now = -model.weight.item()
            if accelerator.sync_gradients:
                seen.append(round(now - before, 3))
            before = now
    return seen


print("moves with 10 micro-batches, two epochs:", moves(10, epochs=2))
print("moves with 10 micro-batches, clipped at 0.6:", moves(10, clip=0.6))
print("moves with 9 micro-batches:", moves(9))
print("moves with 12 micro-batches:", moves(12))
assert moves(10, epochs=2) == [1.0, 1.0, 0.5] * 2, "no longer holds: the last step is averaged over its micro-batches"
assert moves(10, clip=0.6) == [0.6, 0.6, 0.5] and moves(9) == [1.0, 1.0, 0.25], "no longer holds: clipping, a quarter"
assert moves(12) == [1.0, 1.0, 1.0], "no longer holds: the control"
PROGRAM
