#!/usr/bin/env bash
# Title: F.mse_loss of sharded DTensors has the right value and a gradient as many times too large as there are ranks.
# Packages: torch==2.13.0 numpy==2.4.6
# Guess: a loss of DTensors is that of the whole tensors, value and gradient, or the operator is refused.
# Seen: mse_loss, huber_loss and smooth_l1_loss of 4 rows on two ranks: the value is right and the
#   gradient is twice that of one process. With 5 rows (3 and 2) the value is wrong too, as a mean of the two means
#   (0.680 for 0.582), and rows count 5/3 and 5/2 times. l1_loss and (a - b).square().mean() are right in both cases.
#   2026-11-27, Python 3.11, Linux, CPU, gloo.
# Costs: a value head or a distillation loss behind sequence or tensor parallelism trains with a rate that grows with
#   the number of ranks, while the logged loss looks right; swapping mse_loss for l1_loss changes the scale again.
# Tandem: does not use: its losses are computed on whole local tensors.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 2>"$folder/pip" || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
export OMP_NUM_THREADS=1
cat >program.py <<'PROGRAM'
import os
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

warnings.filterwarnings("ignore")
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))


def by_hand(a, b):
    return (a - b).square().mean()


def compared(loss, rows):
    """Return value and gradient on two ranks, each divided by that of the whole tensors."""
    values = torch.arange(1.0, 2 * rows + 1).view(rows, 2) / 7
    target = torch.zeros(rows, 2)
    whole = values.clone().requires_grad_()
    expected = loss(whole, target)
    expected.backward()
    split = distribute_tensor(values.clone(), mesh, [Shard(0)]).requires_grad_()
    seen = loss(split, distribute_tensor(target, mesh, [Shard(0)]))
    value = seen.full_tensor().item() / expected.item()
    seen.backward()
    gradient = split.grad.full_tensor() / whole.grad
    return round(value, 3), [round(row, 3) for row in gradient[:, 0].tolist()]


seen = {}
for loss in (F.mse_loss, F.huber_loss, F.smooth_l1_loss, F.l1_loss, by_hand):
    for rows in (4, 5):
        seen[loss.__name__, rows] = value, gradient = compared(loss, rows)
        if dist.get_rank() == 0:
            print(f"{loss.__name__}, {rows} rows: value x {value}, gradient of each row x {gradient}")
for right in ("l1_loss", "by_hand"):
    for rows in (4, 5):
        assert seen[right, rows] == (1.0, [1.0] * rows), "the control is not right"
for wrong in ("mse_loss", "huber_loss", "smooth_l1_loss"):
    assert seen[wrong, 4] == (1.0, [2.0] * 4), "no longer holds: even shards"
    assert abs(seen[wrong, 5][0] - 1) > 0.05, "no longer holds: the value of uneven shards"
    assert seen[wrong, 5][1] == [1.667] * 3 + [2.5] * 2, "no longer holds: the gradient of uneven shards"
dist.barrier()
os._exit(0)
PROGRAM
venv/bin/torchrun --standalone --nproc-per-node 2 program.py
