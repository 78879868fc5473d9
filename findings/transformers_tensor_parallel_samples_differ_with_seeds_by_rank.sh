#!/usr/bin/env bash
# Title: generate of a tensor-parallel model samples on each rank; with a seed by rank it goes on from mixed tokens.
# Packages: transformers==5.23.0 accelerate==1.15.0 torch==2.13.0 numpy==2.4.6
# Guess: ranks of one model agree on each sampled token, as one rank samples for all or the drawn token is broadcast.
# Seen: each rank draws by its own random state and feeds its own token into its own heads. With one seed the scores
#   of each step are those of one process for the same tokens, to 1e-5. With a seed by rank (as set_seed(...,
#   device_specific=True) gives) the two ranks return different texts, and from the second token on the scores are of
#   no text at all, they are off by more than 0.1 from those of one process for what was returned. Nothing is logged.
#   2026-11-27, Python 3.11, Linux, CPU, gloo.
# Costs: samples, rollouts and their log-probabilities in a loop that seeds ranks differently are noise; greedy
#   decoding and a test with one seed pass.
# Tandem: pipeline/generation/texts.py draws each token from the generator of the sample's seed, the same on all ranks.
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
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    initializer_range=0.3, bos_token_id=None, eos_token_id=None, pad_token_id=0,
)
if rank == 0:
    LlamaForCausalLM(config).save_pretrained("model")
dist.barrier()
one = LlamaForCausalLM.from_pretrained("model").eval()
two = LlamaForCausalLM.from_pretrained("model", distributed_config=DistributedConfig(tp_size=2)).eval()
prompt = torch.arange(3, 11)[None]


def sampled(seed):
    """Return the tokens of both ranks, and how far the scores are from those of one process, at each step."""
    torch.manual_seed(seed)
    out = two.generate(
        prompt, do_sample=True, top_k=0, max_new_tokens=12, output_logits=True, return_dict_in_generate=True
    )
    with torch.no_grad():
        expected = one(out.sequences).logits[0, prompt.shape[1] - 1 : -1]
    off = (torch.cat(out.logits) - expected).abs().max(dim=1).values.tolist()
    both = [None, None]
    dist.all_gather_object(both, (out.sequences[0, prompt.shape[1] :].tolist(), [round(step, 4) for step in off]))
    return [tokens for tokens, _ in both], [steps for _, steps in both]


same_tokens, same_off = sampled(11)
own_tokens, own_off = sampled(11 + rank)
if rank == 0:
    print("one seed: tokens", same_tokens, "scores off by at most", max(map(max, same_off)))
    print("a seed by rank: tokens", own_tokens)
    print("scores of rank 0 off by, step by step:", own_off[0])
    assert same_tokens[0] == same_tokens[1] and max(map(max, same_off)) < 1e-3, "the control is not right"
    assert own_tokens[0] != own_tokens[1], "no longer holds: the ranks agree"
    assert own_off[0][0] < 1e-3 and max(own_off[0]) > 0.1 and max(own_off[1]) > 0.1, "no longer holds: the scores"
dist.barrier()
os._exit(0)
PROGRAM
venv/bin/torchrun --standalone --nproc-per-node 2 program.py
