#!/usr/bin/env bash
# Title: FSDP2: where ranks use different branches of one group, a branch gets the gradient of the other branch.
# Packages: torch==2.13.0 numpy==2.4.6
# Guess: a parameter that one rank did not use counts as zero there, as under DDP with find_unused_parameters, or
#   the backward pass raises since the ranks do not reduce the same parameters.
# Seen: each rank reduces the list of its own used parameters, and torch matches them by place, not by name. Two
#   branches of equal shape, right gradients 1 and 100: rank 0 gets 101 for its part of "text" and None for "image",
#   rank 1 None for "text" and 101 for its part of "image". One SGD step makes half of each weight wrong and leaves
#   the other half as it was. set_reduce_scatter_unused_params(True) (default False) and DDP give 1 and 100 on both.
#   2026-11-27, Python 3.11, Linux, CPU, gloo.
# Costs: batches without an image on one rank, experts held as single layers, or layer drop train on sums of
#   gradients of different layers; no error, no NaN, and the loss may still fall.
# Tandem: docs/cluster.md runs FSDP2; every parameter of its models is used in each forward pass (transformers 5
#   keeps all experts of a layer in one parameter), so it does not meet this.
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
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2,))


class TwoBranches(nn.Module):
    def __init__(self):
        super().__init__()
        self.text = nn.Linear(4, 4, bias=False)
        self.image = nn.Linear(4, 4, bias=False)

    def forward(self, batch, kind):
        return self.text(batch) if kind == "text" else self.image(batch)


def gradients(wrap):
    """Return, for each rank, the values of each gradient that it holds: rank 0 had text only, rank 1 images only."""
    torch.manual_seed(0)
    model = wrap(TwoBranches())
    batch, kind = (torch.ones(2, 4), "text") if rank == 0 else (torch.full((2, 4), 100.0), "image")
    # The gradient of this sum is the sum of the rows; averaged over two ranks it is 1 for text and 100 for image.
    model(batch, kind).sum().backward()
    own = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is not None:
            gradient = getattr(gradient, "to_local", lambda g=gradient: g)().unique().tolist()
        own[name.removeprefix("module.").removesuffix(".weight")] = gradient
    of_rank = [None, None]
    dist.all_gather_object(of_rank, own)
    return of_rank


def sharded(model):
    return fully_shard(model, mesh=mesh)


def sharded_with_zeros(model):
    model = fully_shard(model, mesh=mesh)
    model.set_reduce_scatter_unused_params(True)
    return model


def replicated(model):
    return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)


plain, zeros, ddp = gradients(sharded), gradients(sharded_with_zeros), gradients(replicated)
if rank == 0:
    print("DDP:", ddp)
    print("FSDP2 with reduce_scatter_unused_params:", zeros)
    print("FSDP2:", plain)
    right = [{"text": [1.0], "image": [100.0]}] * 2
    assert ddp == right and zeros == right, "the controls are not right"
    assert plain == [{"text": [101.0], "image": None}, {"text": None, "image": [101.0]}], "no longer holds"
dist.barrier()
os._exit(0)
PROGRAM
venv/bin/torchrun --standalone --nproc-per-node 2 program.py
