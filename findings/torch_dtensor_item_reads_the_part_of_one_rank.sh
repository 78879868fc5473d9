#!/usr/bin/env bash
# Title: .item() and float() of a norm or sum of a sharded parameter give the part of this rank, without a word.
# Packages: torch==2.13.0 numpy==2.4.6
# Guess: a parameter's norm under FSDP2 is a DTensor of the whole, and .item() is its value, the same on every rank.
# Seen: p.grad.norm().item() and p.norm().item() are each rank's own part, without collective or warning; a norm over
#   the model made of them is 0.18 on one rank and 0.32 on the other where the true one is 0.36 (sum
#   alike). A comparison of the tensor itself gathers first: bool(norm > x) is right where float(norm) > x is not.
#   clip_grad_norm_(...).item() and full_tensor().item() are right.
#   2026-11-27, Python 3.11, Linux, CPU, gloo.
# Costs: logged norms of layers, update ratios, spike detectors and thresholds shrink with the number of ranks, and
#   ranks that decide by them (skip a step, stop) may decide differently.
# Tandem: pipeline/training/norms.py adds up norms over the ranks before it logs optim/param_norm.
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
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

warnings.filterwarnings("ignore")
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
fully_shard(model, mesh=mesh)
model(torch.randn(16, 8)).square().mean().backward()


def of_ranks(value):
    values = [None, None]
    dist.all_gather_object(values, value)
    return values


def total(norms):
    return sum(norm**2 for norm in norms) ** 0.5


gradients = [parameter.grad for parameter in model.parameters()]
weight = model[0].weight
by_item = of_ranks(total(gradient.norm().item() for gradient in gradients))
by_float = of_ranks(total(float(gradient.norm()) for gradient in gradients))
by_gathering = of_ranks(total(gradient.norm().full_tensor().item() for gradient in gradients))
by_clipping = of_ranks(nn.utils.clip_grad_norm_(model.parameters(), 1e9).item())
sums = of_ranks(weight.sum().item())
whole_sum = weight.full_tensor().sum().item()
whole = weight.full_tensor().norm().item()
threshold = 0.9 * whole  # the whole norm is above it, each rank's part is below
decided = of_ranks((bool(weight.norm() > threshold), float(weight.norm()) > threshold))
if dist.get_rank() == 0:
    print("norm of the gradient by clip_grad_norm_:", by_clipping)
    print("of the norms of the tensors by full_tensor():", by_gathering)
    print("of the norms of the tensors by item():", by_item)
    print("of the norms of the tensors by float():", by_float)
    print("sum of a weight by item():", sums, "of the whole:", whole_sum)
    print("bool(norm > threshold), float(norm) > threshold:", decided)
    true = by_clipping[0]
    assert all(abs(norm / true - 1) < 1e-4 for norm in (*by_clipping, *by_gathering)), "the control is not right"
    assert by_item == by_float and all(norm < 0.9 * true for norm in by_item), "no longer holds: item and float"
    assert abs(total(by_item) / true - 1) < 1e-4, "no longer holds: the parts do not make the whole"
    assert abs(sum(sums) - whole_sum) < 1e-4 and abs(sums[0] - whole_sum) > 0.01, "no longer holds: sum"
    assert decided == [(True, False), (True, False)], "no longer holds: the decisions"
dist.barrier()
os._exit(0)
PROGRAM
venv/bin/torchrun --standalone --nproc-per-node 2 program.py
