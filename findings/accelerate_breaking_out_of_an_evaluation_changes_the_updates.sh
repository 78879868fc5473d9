#!/usr/bin/env bash
# Title: Leaving an evaluation loop by break changes when accelerator.accumulate makes updates, to the epoch's end.
# Packages: accelerate==1.15.0 torch==2.13.0 numpy==2.4.6
# Guess: an evaluation inside the training loop has no influence on its gradient accumulation, broken off or not.
# Seen: a loader that is left by break stays the "active" one, and accumulate asks that one whether data have ended.
#   10 batches, 4 a group: updates behind batches 4, 8 and 10 without break. Broken off in its middle, an evaluation
#   behind batch 9 takes away the update at the epoch's end: the gradient of batches 9 and 10 goes into the next
#   epoch. Broken off at its last batch (a limit that equals its length), every later batch is an update: with an
#   evaluation behind batch 2 there are 8 updates instead of 3. With loader.end() behind the break all is right.
#   2026-11-27, Python 3.11, Linux, CPU, one process.
# Costs: "evaluate on the first N batches" silently drops updates or makes four times as many, of a quarter of the
#   gradient each, with the scheduler running ahead as well.
# Tandem: does not use accelerator.accumulate: transformers' Trainer runs its loop, and no evaluation is broken off.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet accelerate==1.15.0 torch==2.13.0 numpy==2.4.6 2>"$folder/pip" ||
    { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
venv/bin/python - <<'PROGRAM'
import warnings

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

warnings.filterwarnings("ignore")


def updates(evaluate_behind, limit, tidy=False):
    """Return behind which batches of an epoch of 10 the optimizer made an update; the evaluation has 3 batches."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    count = []
    optimizer.register_step_post_hook(lambda *_: count.append(1))
    rows = torch.arange(10.0).view(10, 1)
    model, optimizer, training, evaluation = accelerator.prepare(
        model, optimizer, DataLoader(rows, batch_size=1), DataLoader(rows[:3], batch_size=1)
    )
    seen = []
    for number, batch in enumerate(training, start=1):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            before = len(count)
            optimizer.step()
            optimizer.zero_grad()
            if len(count) > before:
                seen.append(number)
        if number == evaluate_behind:
            for batches, _ in enumerate(evaluation, start=1):
                if batches == limit:
                    break
            if tidy:
                evaluation.end()
    accelerator.free_memory()
    accelerator.gradient_state._reset_state()
    return seen


whole = updates(9, None)
middle = updates(9, 2)
last = updates(2, 3)
tidied = updates(9, 2, tidy=True), updates(2, 3, tidy=True)
print("no break:", whole)
print("broken off in the middle, behind batch 9:", middle)
print("broken off at its last batch, behind batch 2:", last)
print("both with loader.end():", *tidied)
assert whole == [4, 8, 10] and tidied == (whole, whole), "the control is not right"
assert middle == [4, 8], "no longer holds: the last update"
assert last == list(range(3, 11)), "no longer holds: an update behind each batch"
PROGRAM
