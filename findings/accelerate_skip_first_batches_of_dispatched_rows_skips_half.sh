#!/usr/bin/env bash
# Title: skip_first_batches of a loader with dispatch_batches on two ranks skips half of the rows that were trained.
# Packages: accelerate==1.15.0 torch==2.13.0 numpy==2.4.6
# Guess: skip_first_batches(loader, 3) leaves out what 3 steps read, whichever process reads: 12 rows on two ranks.
# Seen: 24 rows, batches of 2, two ranks, dispatch_batches=True (rank 0 reads and hands out): 3 batches of rank 0's
#   inner loader are left out, 6 rows, so that rows 6 to 11 come again; the loader's length is 5 instead of 3 steps.
#   With dispatch_batches=False, with split_batches=True, and on one rank the same call is exact.
#   2026-11-27, Python 3.11, Linux, CPU, gloo.
# Costs: a resume in the middle of an epoch trains half of the rows that were done twice, and the epoch has more steps
#   than its uninterrupted run.
# Tandem: resumes by its own position of rows, without skip_first_batches; dispatch_batches is False by default there.
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
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader

warnings.filterwarnings("ignore")
STEPS = 3


def rows_after(dispatch, split):
    """Return the rows of the whole run behind step 3, and those of a loader that skips 3 steps, with its length."""
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch, split_batches=split)
    )
    loader = accelerator.prepare(DataLoader(torch.arange(24), batch_size=2))
    whole = [accelerator.gather(batch).tolist() for batch in loader][STEPS:]
    rest = skip_first_batches(loader, STEPS)
    resumed = [accelerator.gather(batch).tolist() for batch in rest]
    return [row for batch in whole for row in batch], [row for batch in resumed for row in batch], len(rest)


ranks = int(os.environ["WORLD_SIZE"])
for dispatch, split in ((False, False), (False, True), (True, True), (True, False)):
    whole, resumed, length = rows_after(dispatch, split)
    if os.environ["RANK"] == "0":
        print(f"{ranks} ranks, dispatch_batches={dispatch}, split_batches={split}: uninterrupted from row {whole[0]},")
        print(f"    resumed from row {resumed[0]}, {length} steps")
    if dispatch and not split and ranks == 2:
        assert whole == list(range(12, 24)), "the uninterrupted run is another"
        assert resumed[:18] == list(range(6, 24)) and length == 5, "no longer holds"
    else:
        assert resumed == whole, "the control is not right"
torch.distributed.barrier()
os._exit(0)
PROGRAM
venv/bin/torchrun --standalone --nproc-per-node 1 program.py
venv/bin/torchrun --standalone --nproc-per-node 2 program.py
