#!/usr/bin/env bash
# Title: With dynamic RoPE a row's logits depend on the rows that the same model object saw before.
# Packages: transformers==5.23.0 torch==2.13.0
# Guess: In eval mode without a cache a forward pass has no memory: the same row has the same logits, whatever ran
#   before it and whatever lies beside it in the batch.
# Seen: a row of 100 tokens (64 trained positions, factor 4) moves by more than a standard deviation of the logits
#   after the same model has seen one of 300, and stays so until a row shorter than 64 comes by, which resets it. A
#   row of 40 moves when its batch mate has 100, under dynamic and longrope alike. With linear scaling all three are
#   the same to 1e-4. No warning. 2026-11-27, Python 3.11, Linux, CPU.
# Costs: scores of an evaluation with long rows depend on the order of the data set, on the batch size and on what
#   was run before; two runs over the same rows disagree.
# Tandem: docs/finetune.md says so; keep data.row_tokens within the length that it was trained on.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 torch==2.13.0 \
    2>"$folder/pip" || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
HF_HUB_OFFLINE=1 HF_HOME="$folder/hf" venv/bin/python - <<'PROGRAM'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

HALF = 8  # frequencies of a head of 16


def new_model(rope):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, initializer_range=0.2, use_cache=False,
        rope_parameters={"rope_theta": 10000.0, **rope},
    )
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def logits(model, rows, **kwargs):
    return model(rows, **kwargs).logits


generator = torch.Generator().manual_seed(1)
short, row, long = (torch.randint(3, 128, (1, n), generator=generator) for n in (40, 100, 300))
padded = torch.cat([torch.cat([short, torch.zeros(1, 60, dtype=torch.long)], 1), row])
mask = torch.ones_like(padded)
mask[0, 40:] = 0  # padding on the right

ropes = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "longrope": {
        "rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 64,
        "short_factor": [1.0] * HALF, "long_factor": [4.0] * HALF,
    },
    "linear": {"rope_type": "linear", "factor": 4.0},
}
seen = {}
for name, rope in ropes.items():
    model = new_model(rope)
    fresh = logits(model, row)
    scale = fresh.std().item()
    logits(model, long)
    after_long = (logits(model, row) - fresh).abs().max().item() / scale
    logits(model, short)
    after_short = (logits(model, row) - fresh).abs().max().item() / scale
    alone = logits(new_model(rope), short)
    beside = logits(new_model(rope), padded, attention_mask=mask)[:1, :40]
    mate = (alone - beside).abs().max().item() / scale
    seen[name] = after_long, after_short, mate
    print(f"{name}, change of the row of 100 after one of 300, in standard deviations: {after_long:.4f}")
    print(f"{name}, the same, once a row of 40 came between: {after_short:.4f}")
    print(f"{name}, change of the row of 40 by a batch mate of 100: {mate:.4f}")

assert seen["dynamic"][0] > 1 and seen["dynamic"][1] < 1e-3, "no longer holds: an earlier long row changes nothing"
assert seen["dynamic"][2] > 1 and seen["longrope"][2] > 1, "no longer holds: a batch mate changes nothing"
assert max(seen["linear"]) < 1e-3, "no longer holds: linear scaling depends on other rows too"
assert seen["longrope"][0] < 1e-3, "no longer holds: longrope remembers an earlier row"
PROGRAM
