#!/usr/bin/env bash
# Title: Without a GPU two launched processes each train alone on all rows, and --cpu --num_processes 2 starts one.
# Packages: accelerate==1.15.0 torch==2.13.0 numpy==2.4.6
# Guess: `accelerate launch --cpu --num_processes 2` starts two ranks on gloo; torchrun with two processes and a plain
#   Accelerator() gives two ranks on any machine; --use_fsdp without a GPU is refused.
# Seen: --cpu --num_processes 2 starts one process. torchrun, --use_fsdp --num_processes 2, and a configuration file
#   with use_cpu: true, distributed_type: MULTI_GPU and num_processes: 2 start two, and both say num_processes 1 and
#   is_main_process, wrap nothing (no DDP, no FSDP) and read all 8 rows; all end with status 0. Only
#   Accelerator(cpu=True) in the program joins them: 2 ranks, DDP, 4 rows each. 2026-11-27, Python 3.11, Linux, CPU.
# Costs: a test of several ranks on a build machine tests one process twice, both write into the same folder as
#   "main process", and a run on a node whose driver is missing goes on as copies.
# Tandem: accelerate_configs/cpu_2.yaml starts two processes, and the pipeline passes use_cpu on where no GPU is seen,
#   so that its ranks are joined.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet accelerate==1.15.0 torch==2.13.0 numpy==2.4.6 2>"$folder/pip" ||
    { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= HF_HOME="$folder/home"
cat >program.py <<'PROGRAM'
import json
import os
import sys
import warnings

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

warnings.filterwarnings("ignore")
accelerator = Accelerator(cpu=True) if sys.argv[1:] == ["cpu"] else Accelerator()
model, loader = accelerator.prepare(torch.nn.Linear(1, 1), DataLoader(torch.arange(8), batch_size=2))
rows = sum(len(batch) for batch in loader)
with open(f"seen.{os.getpid()}", "w") as file:
    json.dump([accelerator.num_processes, accelerator.is_main_process, type(model).__name__, rows], file)
accelerator.wait_for_everyone()
os._exit(0)
PROGRAM
cat >two_on_cpu.yaml <<'CONFIG'
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
use_cpu: true
num_machines: 1
num_processes: 2
machine_rank: 0
mixed_precision: 'no'
CONFIG
cat >check.py <<'PROGRAM'
import glob
import json
import os
import sys

seen = []
for name in glob.glob("seen.*"):
    with open(name) as file:
        seen.append(json.load(file))
    os.remove(name)
seen.sort()
print(f"{sys.argv[1]}: (num_processes, main, model, rows) of each process", *seen)
alone = [1, True, "Linear", 8]
expected = {
    "one": [alone],
    "alone": [alone, alone],
    "joined": [[2, False, "DistributedDataParallel", 4], [2, True, "DistributedDataParallel", 4]],
}
assert seen == expected[sys.argv[2]], "no longer holds"
PROGRAM
check() { venv/bin/python check.py "$1" "$2"; }
launch() { venv/bin/accelerate launch --main_process_port 0 "$@" 2>log || { cat log >&2; exit 1; }; }
launch --cpu --num_processes 2 program.py
check "--cpu --num_processes 2" one
launch --use_fsdp --fsdp_version 2 --num_processes 2 program.py
check "--use_fsdp --num_processes 2" alone
venv/bin/torchrun --standalone --nproc-per-node 2 program.py
check "torchrun, Accelerator()" alone
venv/bin/torchrun --standalone --nproc-per-node 2 program.py cpu
check "torchrun, Accelerator(cpu=True)" joined
launch --config_file two_on_cpu.yaml program.py
check "a file with use_cpu and MULTI_GPU" alone
