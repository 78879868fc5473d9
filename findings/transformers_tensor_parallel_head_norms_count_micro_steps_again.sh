#!/usr/bin/env bash
# Title: Under tensor parallelism q_norm and k_norm sum their accumulated gradient anew at each micro-step.
# Packages: transformers==5.23.0 accelerate==1.15.0 torch==2.13.0 numpy==2.4.6
# Guess: gradients of a model split by tp_size=2 are those of one process, with gradient accumulation as without.
# Seen: the hook that adds up the ranks' shares acts on what has accumulated, so that earlier micro-steps are added up
#   again: each further one doubles them (on N ranks: times N). Qwen3, two ranks: the norm of q_norm's gradient is 1,
#   1.3, 3 and 30 times that of one process at 1, 2, 4 and 8 micro-steps; every other gradient is equal to 1e-5.
#   Calling zero_grad and stepping after each backward pass is exact. 2026-11-27, Python 3.11, Linux, CPU, gloo.
# Costs: head norms dominate the gradient norm, and clipping then shrinks all other updates; a test with one micro-step
#   passes.
# Tandem: pipeline/training/sharding.py takes these norms out of the plan and sums the gradient of each backward pass.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
packages="transformers==5.23.0 accelerate==1.15.0 torch==2.13.0 numpy==2.4.6"
"$folder/venv/bin/pip" install --quiet $packages 2>"$folder/pip" || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 HF_HUB_DISABLE_PROGRESS_BARS=1
cat >program.py <<'PROGRAM'
import os
import warnings

import torch
import torch.distributed as dist
import transformers
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.distributed import DistributedConfig

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
dist.init_process_group("gloo")
rank = dist.get_rank()
config = Qwen3Config(
    vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, tie_word_embeddings=False,
)
torch.manual_seed(0)
if rank == 0:
    Qwen3ForCausalLM(config).save_pretrained("model")
dist.barrier()
torch.manual_seed(7)
ids = torch.randint(3, 96, (8, 16))


def gradients(micro_steps, **how):
    """Return the whole gradients after so many backward passes of one row each."""
    model = Qwen3ForCausalLM.from_pretrained("model", **how)
    for row in ids[:micro_steps].split(1):
        model(row, labels=row).loss.backward()
    return {name: getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for name, p in model.named_parameters()}


ratios = {}
for micro_steps in (1, 2, 4, 8):
    one = gradients(micro_steps)
    two = gradients(micro_steps, distributed_config=DistributedConfig(tp_size=2))
    of_heads = [name for name in one if "q_norm" in name or "k_norm" in name]
    rest = [name for name in one if name not in of_heads]
    others = max(((two[name] - one[name]).abs().max() / one[name].abs().max()).item() for name in rest)
    name = "model.layers.0.self_attn.q_norm.weight"
    ratios[micro_steps] = (two[name].norm() / one[name].norm()).item()
    if rank == 0:
        print(f"{micro_steps} micro-steps: q_norm's gradient x {ratios[micro_steps]:.3f}, others off by {others:.0e}")
    assert others < 1e-4, "the control is not right: other gradients"
assert abs(ratios[1] - 1) < 1e-3, "the control is not right: one micro-step"
assert ratios[2] > 1.1 and ratios[4] > 2 and ratios[8] > 15, "no longer holds"
dist.barrier()
os._exit(0)
PROGRAM
venv/bin/torchrun --standalone --nproc-per-node 2 program.py
