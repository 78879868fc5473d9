#!/usr/bin/env bash
# Title: A rope_theta set on, or given to, a config that transformers 5 saved changes no logit.
# Packages: transformers==5.23.0 torch==2.13.0
# Guess: config.rope_theta = 10000.0 before the model is built, or AutoConfig.from_pretrained(folder,
#   rope_theta=10000.0), changes the base as it did in transformers 4 (or raises).
# Seen: both leave the logits bitwise what they were with 500000: the attribute is taken without a word and reads
#   10000.0 from then on, the keyword is dropped without a word; rope_parameters keeps 500000.0, which alone counts.
#   Setting rope_parameters['rope_theta'] moves the logits by more than a standard deviation; rope_theta given to
#   LlamaConfig() itself is used as well. Saved again, the config with the attribute holds both numbers in its
#   config.json. 2026-11-27, Python 3.11, Linux, CPU.
# Costs: an ablation over the base, or a longer context by a larger base, trains and scores the old model; and other
#   programs that read the top-level key of the saved config.json compute the other one.
# Tandem: writes one number to both places of the config.json that it saves (_add_older_rope_keys in
#   pipeline/model/saved.py).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 torch==2.13.0 \
    2>"$folder/pip" || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
HF_HUB_OFFLINE=1 HF_HOME="$folder/hf" venv/bin/python - <<'PROGRAM'
import json
import tempfile

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=512, initializer_range=0.2, rope_theta=500000.0,
)
LlamaForCausalLM(config).save_pretrained("model")
row = torch.randint(0, 128, (1, 200), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(config):
    return AutoModelForCausalLM.from_pretrained("model", config=config).eval()(row).logits


before = logits(AutoConfig.from_pretrained("model"))
scale = before.std()

attribute = AutoConfig.from_pretrained("model")
attribute.rope_theta = 10000.0
keyword = AutoConfig.from_pretrained("model", rope_theta=10000.0)
inside = AutoConfig.from_pretrained("model")
inside.rope_parameters["rope_theta"] = 10000.0

change = {}
for name, changed in (("attribute", attribute), ("keyword", keyword), ("rope_parameters", inside)):
    change[name] = ((logits(changed) - before).abs().max() / scale).item()
    print(f"{name}: config.rope_theta is", getattr(changed, "rope_theta", None), "and", changed.rope_parameters)
    print(f"{name}: change of the logits in standard deviations: {change[name]:.4f}")

with tempfile.TemporaryDirectory(dir=".") as folder:
    attribute.save_pretrained(folder)
    saved = json.load(open(f"{folder}/config.json"))
print("saved again, top-level rope_theta:", saved.get("rope_theta"), "and", saved["rope_parameters"])

assert attribute.rope_theta == 10000.0 and not hasattr(keyword, "rope_theta")
assert change["attribute"] == change["keyword"] == 0, "no longer holds: rope_theta of a loaded config is used"
assert change["rope_parameters"] > 1, "the control has no effect"
assert saved["rope_theta"] == 10000.0 and saved["rope_parameters"]["rope_theta"] == 500000.0
PROGRAM
