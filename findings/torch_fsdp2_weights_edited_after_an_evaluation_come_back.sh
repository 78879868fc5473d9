#!/usr/bin/env bash
# Title: FSDP2: after a forward without a backward, parameters() of the root are copies; edits of them vanish.
# Packages: torch==2.13.0 numpy==2.4.6
# Guess: model.parameters() are always the sharded parameters that the optimizer has; setting a head to zero stays.
# Seen: the root group (embedding, norm, head) is not resharded after a forward pass, so after an evaluation its
#   entries of parameters() are plain tensors. A head set to zero acts in the next forward pass (loss ln 8 = 2.0794)
#   and is back as it was behind the next backward pass (loss 2.2 again, with a rate of 0). An optimizer built there
#   never trains embedding, norm and head: 0 of these 4 tensors change in 3 steps. Without an evaluation before, or
#   with model.reshard() behind it, the edit stays and all 8 tensors train. 2026-11-27, Python 3.11, Linux, CPU, gloo.
# Costs: a head or embedding that is reset, clipped, swapped for an average or loaded by hand after a validation,
#   sanity check or sample is silently the old one; an optimizer built after a first evaluation leaves them untrained.
# Tandem: pipeline/training/sharding.py reshards after each evaluation and each sample.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 2>"$folder/pip" || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
export OMP_NUM_THREADS=1
cat >program.py <<'PROGRAM'
import math
import os
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh

warnings.filterwarnings("ignore")
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
IDS = torch.arange(8)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 8, bias=False)

    def forward(self, ids):
        hidden = self.table(ids)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return self.head(self.norm(hidden))


def built(evaluate, reshard):
    torch.manual_seed(0)
    model = Small()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if evaluate:
        with torch.no_grad():
            model(IDS)
    if reshard:
        model.reshard()
    return model


def train(model, optimizer, steps):
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(IDS), IDS)
        losses.append(round(loss.item(), 4))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def whole(model):
    return {name: p.full_tensor().detach().clone() for name, p in model.named_parameters() if isinstance(p, DTensor)}


results = {}
for case, how in {"no evaluation": (False, False), "evaluation": (True, False), "and reshard": (True, True)}.items():
    model = built(*how)
    nn.init.zeros_(model.head.weight)
    edited = train(model, torch.optim.SGD(model.parameters(), lr=0.0), 2)
    before = whole(built(False, False))
    model = built(*how)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 3)
    after = whole(model)
    trained = [name for name in before if not torch.equal(before[name], after[name])]
    results[case] = (edited, trained)
    if dist.get_rank() == 0:
        print(f"{case}: losses after the head was set to zero {edited}, tensors that train {len(trained)} of 8")

for case in ("no evaluation", "and reshard"):
    edited, trained = results[case]
    assert all(abs(loss - math.log(8)) < 1e-3 for loss in edited) and len(trained) == 8, "the control is not right"
edited, trained = results["evaluation"]
assert abs(edited[0] - math.log(8)) < 1e-3 and abs(edited[1] - math.log(8)) > 0.05, "no longer holds: the edit"
assert sorted({name.split(".")[0] for name in trained}) == ["blocks"], "no longer holds: the optimizer"
dist.barrier()
os._exit(0)
PROGRAM
venv/bin/torchrun --standalone --nproc-per-node 2 program.py
