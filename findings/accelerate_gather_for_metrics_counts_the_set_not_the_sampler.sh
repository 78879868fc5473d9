#!/usr/bin/env bash
# Title: gather_for_metrics cuts the last batch by the length of the set, also where a sampler draws other rows of it.
# Packages: accelerate==1.15.0 torch==2.13.0 numpy==2.4.6
# Guess: it drops exactly the rows that were repeated to fill the last batch: 16 rows of a sampler come back as 16.
# Seen: it keeps len(dataset) % total_batch_size rows of the last batch. Batches of 4, SubsetRandomSampler: 16 rows of
#   a set of 100 are 12 on two ranks (4 lost), 10 rows of a set of 101 are 13 on two ranks (3 twice) and 9 in one
#   process, where nothing had been repeated. With the same rows as a Subset of the set 16 and 10 come back, each once.
#   2026-11-27, Python 3.11, Linux, CPU, gloo.
# Costs: an evaluation on a sample of a large set loses rows or counts some twice, and the accuracy is of other rows;
#   whether it does depends on the set's length and the number of ranks.
# Tandem: does not use gather_for_metrics in its evaluations: each rank sums its own rows and sums are added.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet accelerate==1.15.0 torch==2.13.0 numpy==2.4.6 2>"$folder/pip" ||
    { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
export OMP_NUM_THREADS=1
cat >program.py <<'PROGRAM'
import os
import warnings

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset, Subset, SubsetRandomSampler

warnings.filterwarnings("ignore")
accelerator = Accelerator(cpu=True)
ranks = accelerator.num_processes


class Rows(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, row):
        return row


def gathered(loader):
    loader = accelerator.prepare(loader)
    rows = []
    for batch in loader:
        rows += accelerator.gather_for_metrics(batch).tolist()
    return len(rows), len(set(rows))


seen = {}
for count, drawn in ((100, list(range(50, 66))), (101, list(range(50, 60)))):
    rows = Rows(count)
    seen[count] = gathered(DataLoader(rows, batch_size=4, sampler=SubsetRandomSampler(drawn)))
    subset = gathered(DataLoader(Subset(rows, drawn), batch_size=4, shuffle=True))
    if accelerator.is_main_process:
        print(f"{ranks} ranks, {len(drawn)} rows of {count}: sampler (rows, different) {seen[count]}, Subset {subset}")
    assert subset == (len(drawn), len(drawn)), "the control is not right"
expected = {1: {100: (16, 16), 101: (9, 9)}, 2: {100: (12, 12), 101: (13, 10)}}
assert seen == expected[ranks], "no longer holds"
accelerator.wait_for_everyone()
os._exit(0)
PROGRAM
venv/bin/python program.py
venv/bin/torchrun --standalone --nproc-per-node 2 program.py
