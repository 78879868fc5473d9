#!/usr/bin/env bash
# Title: PEFT's add_weighted_adapter gives another update than the weighted sum of the two LoRAs, by default too.
# Packages: transformers==5.23.0 torch==2.13.0 peft==0.21.2 accelerate==1.15.0
# Guess: add_weighted_adapter([a, b], [0.5, 0.5], ..., combination_type='linear') is 0.5 times the update of a plus
#   0.5 times that of b; the default, svd, is at least close to it.
# Seen: linear adds the factors, sqrt(0.5) A_a + sqrt(0.5) A_b and the same for B, so half of the result are cross
#   terms B_a A_b and B_b A_a which belong to neither: for two unlike LoRAs it is off by as much as the sum is long
#   (relative error 0.99). The default cuts the sum of rank 16 to rank 8 (0.45). cat, whose rank is 16, is exact
#   (1e-7). With weights (1, 0) linear is exact, while an adapter mixed with itself by 0.5 and 0.5 becomes twice as
#   strong. No warning. 2026-11-27, Python 3.11, Linux, CPU.
# Costs: an averaged or mixed adapter is another model than the mean of the weights that a merge of full checkpoints
#   would give; the interpolation between two adapters is not a line.
# Tandem: does not mix adapters; docs/build_on.md loads one and merges it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 torch==2.13.0 peft==0.21.2 accelerate==1.15.0 \
    2>"$folder/pip" || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
HF_HUB_OFFLINE=1 HF_HOME="$folder/hf" venv/bin/python - <<'PROGRAM'
import warnings

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

warnings.simplefilter("ignore")
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4,
)
lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)  # as if trained
model = get_peft_model(LlamaForCausalLM(config), lora, adapter_name="first")
model.add_adapter("second", lora)
blocks = model.base_model.model.model.layers
layers = [blocks[0].self_attn.q_proj, blocks[1].self_attn.v_proj]


def update(name):
    with torch.no_grad():
        return torch.cat([layer.get_delta_weight(name).flatten() for layer in layers])


def error(name, wanted):
    return ((update(name) - wanted).norm() / wanted.norm()).item()


mean = (update("first") + update("second")) / 2
model.add_weighted_adapter(["first", "second"], [0.5, 0.5], "mixed by default")
for kind in ("linear", "svd", "cat"):
    model.add_weighted_adapter(["first", "second"], [0.5, 0.5], kind, combination_type=kind)
model.add_weighted_adapter(["first", "second"], [1.0, 0.0], "only the first", combination_type="linear")
model.add_weighted_adapter(["first", "first"], [0.5, 0.5], "the first with itself", combination_type="linear")

errors = {name: error(name, mean) for name in ("linear", "svd", "mixed by default", "cat")}
for name, value in errors.items():
    print(f"{name}: relative error of the update against the mean of both: {value:.6f}")
only = error("only the first", update("first"))
twice = (update("the first with itself").norm() / update("first").norm()).item()
print(f"linear, weights 1 and 0, relative error against the first: {only:.6f}")
print(f"linear, the first with itself by 0.5 and 0.5, length in its own: {twice:.4f}")

assert errors["linear"] > 0.7, "no longer holds: linear is the mean of the updates"
assert errors["mixed by default"] > 0.2 and errors["svd"] > 0.2, "no longer holds: the default is the mean"
assert errors["cat"] < 1e-5 and only < 1e-5, "a control is off"
assert abs(twice - 2) < 1e-3
PROGRAM
