#!/usr/bin/env bash
# Title: With a tensor lr, groups that take the default share one tensor: all get the last group's rate.
# Packages: torch==2.13.0 numpy==2.4.6
# Guess: lr=torch.tensor(0.1) behaves as lr=0.1, each group keeps a rate of its own (tensors are advised for compile).
# Seen: a group without an lr of its own holds the very tensor that was passed, and schedulers write into it in place.
#   LambdaLR with a factor per group (1, 0.1) gives both groups 0.01 instead of 0.1 and 0.01; OneCycleLR with a peak
#   per group (0.1, 0.01) follows the second peak in both; group["lr"].fill_() in a loop has the same effect.
#   One step of SGD then moves the first group by a tenth of what it should. A copy of the tensor in each group is
#   right, as is a float. Saving and loading keeps the sharing; 2026-11-28, Python 3.11, Linux, CPU.
# Costs: layer-wise rates, muP factors and "ten times the rate for the head" vanish without a word; get_last_lr() and
#   the logs show what is used, but only if one compares the groups.
# Tandem: every group is built with a float rate of its own (pipeline/training/optimizer.py).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 \
  2>"$folder/pip" || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
venv/bin/python - <<'PROGRAM'
import io

import torch
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR


def build(lr, copies=False):
    """Return two parameters of ones and an optimizer with a group for each."""
    body, head = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    groups = [{"params": [body]}, {"params": [head]}]
    if copies:
        for group in groups:
            group["lr"] = lr.clone()
    return [body, head], torch.optim.SGD(groups, lr=lr)


def rates(optimizer):
    return [round(float(group["lr"]), 4) for group in optimizer.param_groups]


def lambdas(lr, copies=False):
    """Return the rates and the moves of both parameters in one step with a gradient of 1."""
    parameters, optimizer = build(lr, copies)
    LambdaLR(optimizer, [lambda step: 1.0, lambda step: 0.1])
    for parameter in parameters:
        parameter.grad = torch.ones(1)
    optimizer.step()
    return rates(optimizer), [round(1 - parameter.item(), 4) for parameter in parameters]


def peaks(lr):
    """Return the rates at the peak of a OneCycleLR with max_lr 0.1 and 0.01."""
    optimizer = build(lr)[1]
    scheduler = OneCycleLR(optimizer, max_lr=[0.1, 0.01], total_steps=10, pct_start=0.5, cycle_momentum=False)
    seen = []
    for _ in range(9):
        seen.append(rates(optimizer))
        optimizer.step()
        scheduler.step()
    return [max(column) for column in zip(*seen)]


def loaded():
    """Return the rates that a loaded optimizer has after its first group's tensor is set."""
    buffer = io.BytesIO()
    torch.save(build(torch.tensor(0.1))[1].state_dict(), buffer)
    buffer.seek(0)
    optimizer = build(torch.tensor(0.3))[1]
    optimizer.load_state_dict(torch.load(buffer))
    optimizer.param_groups[0]["lr"].fill_(0.5)
    return rates(optimizer)


shared, as_float, copied = lambdas(torch.tensor(0.1)), lambdas(0.1), lambdas(torch.tensor(0.1), copies=True)
print("LambdaLR, tensor lr:           rates, moves:", *shared)
print("LambdaLR, float lr:            rates, moves:", *as_float)
print("LambdaLR, a tensor per group:  rates, moves:", *copied)
print("OneCycleLR, highest rates with a tensor, with a float:", peaks(torch.tensor(0.1)), peaks(0.1))
print("after loading, the first group set to 0.5:", loaded())
assert as_float == copied == ([0.1, 0.01], [0.1, 0.01]), "no longer holds: the controls are wrong"
assert shared == ([0.01, 0.01], [0.01, 0.01]), "no longer holds: the groups have rates of their own"
assert peaks(torch.tensor(0.1)) == [0.01, 0.01] and peaks(0.1) == [0.1, 0.01], "no longer holds: OneCycleLR"
assert loaded() == [0.5, 0.5], "no longer holds: loading separates the tensors"
PROGRAM
