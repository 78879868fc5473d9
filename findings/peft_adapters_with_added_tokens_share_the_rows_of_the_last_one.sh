#!/usr/bin/env bash
# Title: Two adapters with added tokens share one embedding and head: who is loaded last changes the other's logits.
# Packages: peft==0.21.2 transformers==5.23.0 torch==2.13.0 accelerate==1.15.0
# Guess: adapters trained each on a base with four tokens added (saved with their embeddings, as save_embedding_layers
#   is "auto") can be loaded into one model; set_adapter then chooses among them.
# Seen: the saved embedding and head are no part of the adapter but overwrite the base's. Loaded alone "north" gives
#   its trained logits to the bit; once "south" is loaded too, "north" chosen by set_adapter is off by 7.2 and "south"
#   is right; in the other order it is the other one. Deleting "south" does not bring back the rows of "north". Nothing
#   is said at loading. With trainable_token_indices for the added rows both are exact in any order.
#   2026-11-28, Python 3.11, Linux, CPU.
# Costs: a server with several adapters answers by the order in which they were loaded; a comparison of adapters in
#   one process measures mixtures. Adapters without added tokens are right, so that a test of switching passes.
# Tandem: Does not load several adapters; docs/build_on.md trains LoRA without new tokens, which its vocabulary has.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet peft==0.21.2 transformers==5.23.0 torch==2.13.0 accelerate==1.15.0 \
    2>"$folder/pip" || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
HF_HUB_OFFLINE=1 HF_HOME="$folder/hf" venv/bin/python - <<'PROGRAM'
import logging
import warnings

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging as transformers_logging

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
transformers_logging.disable_progress_bar()
OLD, NEW = 128, 132
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
row = torch.tensor([[128, 5, 129, 7, 130, 9, 131, 3]])  # a text with all added tokens
torch.manual_seed(0)
config = LlamaConfig(vocab_size=OLD, initializer_range=0.1, tie_word_embeddings=False, **SIZES)
AutoModelForCausalLM.from_config(config).save_pretrained("base")


def base(seed=0):
    """Return the base with four tokens added; their rows are drawn by the seed, as each project draws its own."""
    model = AutoModelForCausalLM.from_pretrained("base")
    torch.manual_seed(seed)
    model.resize_token_embeddings(NEW, mean_resizing=False)
    return model


@torch.no_grad()
def logits(model):
    return model.eval()(row).logits


def train(name, seed, **more):
    """Train an adapter on a base of its own, save it, and return its logits."""
    lora = LoraConfig(r=4, target_modules="all-linear", exclude_modules=["lm_head"], task_type="CAUSAL_LM", **more)
    # Without saved embeddings all adapters need the same rows to start from.
    model = get_peft_model(base(0 if more else seed), lora)
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(20):
        model.train()(row, labels=row).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(name, save_embedding_layers=not more and "auto")
    return logits(model)


def off(first, second, trained):
    """Load two adapters in this order; return how far each is off its trained logits."""
    model = PeftModel.from_pretrained(base(), first, adapter_name=first)
    seen = {f"{first} alone": logits(model) - trained[first]}
    model.load_adapter(second, second)
    for name in (first, second):
        model.set_adapter(name)
        seen[f"{name} beside the other"] = logits(model) - trained[name]
    model.set_adapter(first)
    model.delete_adapter(second)
    seen[f"{first} after the other was deleted"] = logits(model) - trained[first]
    seen = {name: value.abs().max().item() for name, value in seen.items()}
    print(f"loaded {first}, then {second}:", ", ".join(f"{name} {value:.5f}" for name, value in seen.items()))
    return seen


trained = {"north": train("north", 1), "south": train("south", 2)}
print("saved beside the LoRA:", [key for key in load_file("north/adapter_model.safetensors") if "lora" not in key])
print("north and south differ by:", round((trained["north"] - trained["south"]).abs().max().item(), 3))
one, other = off("north", "south", trained), off("south", "north", trained)
tokens = {"embed_tokens": list(range(OLD, NEW)), "lm_head": list(range(OLD, NEW))}
trained = {name: train(name, seed, trainable_token_indices=tokens) for name, seed in (("east", 1), ("west", 2))}
control, control_other = off("east", "west", trained), off("west", "east", trained)

assert one["north alone"] < 1e-4 and one["south beside the other"] < 1e-4, "the control is off"
assert other["south alone"] < 1e-4 and other["north beside the other"] < 1e-4, "the control is off"
assert one["north beside the other"] > 0.3 and one["north after the other was deleted"] > 0.3, "no longer holds"
assert other["south beside the other"] > 0.3 and other["south after the other was deleted"] > 0.3, "no longer holds"
assert max([*control.values(), *control_other.values()]) < 1e-4, "trainable_token_indices is off, too"
PROGRAM
