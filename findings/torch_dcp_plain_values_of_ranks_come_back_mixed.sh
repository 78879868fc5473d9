#!/usr/bin/env bash
# Title: torch DCP: values that differ by rank come back as a mixture, one key of rank 0, the next of rank 1.
# Packages: torch==2.13.0 numpy==2.4.6
# Guess: a key that every rank saves is kept for each rank, or rank 0's value is taken for all, or saving raises.
# Seen: a plain tensor or object under the same key counts as a copy of one value, and each is written by the rank
#   that has least to write. Of one loader's state (epoch, order, position, seed, rows) half are rank 0's and half are
#   rank 1's, on both ranks alike: a state that no rank ever had. Nothing is logged. With the rank in the key every
#   rank gets its own back, with DefaultSavePlanner(dedup_save_to_lowest_rank=True) all get rank 0's whole state.
#   2026-11-27, Python 3.11, Linux, CPU, gloo.
# Costs: loader positions, random states or scaler states saved beside a sharded model resume at a point that fits
#   neither rank; a test on one process passes.
# Tandem: does not use DCP: each rank writes its part of a checkpoint itself (docs/log.md, "torch's distributed
#   checkpoint, which would have to be consolidated").
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
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

warnings.filterwarnings("ignore")
dist.init_process_group("gloo")
rank = dist.get_rank()


def state(of_rank):
    """Return a loader's state with two objects and four tensors, each of which tells whose it is."""
    return {
        "epoch": {"of": of_rank},
        "order": torch.full((16,), float(of_rank)),
        "position": torch.full((16,), float(of_rank)),
        "rows": torch.full((16,), float(of_rank)),
        "seed": torch.full((16,), float(of_rank)),
        "source": {"of": of_rank},
    }


def whose(loaded):
    return {key: int(value["of"] if isinstance(value, dict) else value[0]) for key, value in loaded.items()}


def saved_and_loaded(name, key, **options):
    """Return whose values each rank holds after a save and a load."""
    dcp.save({key: state(rank)}, checkpoint_id=name, **options)
    loaded = {key: state(-1)}
    dcp.load(loaded, checkpoint_id=name)
    of_rank = [None, None]
    dist.all_gather_object(of_rank, whose(loaded[key]))
    return of_rank


same_key = saved_and_loaded("same", "loader")
own_key = saved_and_loaded("own", f"loader.{rank}")
lowest = saved_and_loaded("lowest", "loader", planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True))
if rank == 0:
    print("whose values rank 0 holds, one key for all:", same_key[0])
    print("whose values rank 1 holds, one key for all:", same_key[1])
    print("with the rank in the key:", [sorted(set(seen.values())) for seen in own_key])
    print("saved by the lowest rank:", [sorted(set(seen.values())) for seen in lowest])
    assert [set(seen.values()) for seen in own_key] == [{0}, {1}], "the control is not right"
    assert [set(seen.values()) for seen in lowest] == [{0}, {0}], "the second control is not right"
    assert same_key[0] == same_key[1], "no longer holds: ranks differ"
    assert sum(same_key[0].values()) == 3, "no longer holds: not half of each rank"
dist.barrier()
os._exit(0)
PROGRAM
venv/bin/torchrun --standalone --nproc-per-node 2 program.py
