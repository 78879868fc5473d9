#!/usr/bin/env bash
# Title: PEFT's hotswap_adapter scales layers of a rank_pattern or alpha_pattern as if there were none.
# Packages: peft==0.21.2 transformers==5.23.0 torch==2.13.0 accelerate==1.15.0
# Guess: after hotswap_adapter the model gives the logits of the adapter that was swapped in, as after load_adapter, or
#   an error says that the two do not fit.
# Seen: an adapter with r 8, alpha 8 and rank_pattern {"q_proj": 2} is applied with 8/8 = 1 to q_proj in place of
#   8/2 = 4, one with {"q_proj": 32} with 1 in place of 0.25: the logits are off by 0.7 to 1.0. It is so also where the
#   adapter that was there has the same pattern, even where an adapter is swapped for itself, with
#   prepare_model_for_compiled_hotswap, and with an alpha_pattern that both have (1 in place of 8, off by 2.3). Other
#   ranks and alphas without a pattern are exact, and so is load_adapter. Nothing is logged.
#   2026-11-28, Python 3.11, Linux, CPU.
# Costs: a server that swaps adapters answers by others than were trained once one has a pattern (as those of a
#   rank search, AdaLoRA-like allocations or EVA have); going back to the first adapter does not give it back.
# Tandem: Does not swap adapters; docs/build_on.md merges one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet peft==0.21.2 transformers==5.23.0 torch==2.13.0 accelerate==1.15.0 \
    2>"$folder/pip" || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
HF_HUB_OFFLINE=1 HF_HOME="$folder/hf" venv/bin/python - <<'PROGRAM'
import warnings

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.hotswap import hotswap_adapter, prepare_model_for_compiled_hotswap
from transformers import AutoModelForCausalLM, LlamaConfig

warnings.simplefilter("ignore")
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
row = torch.randint(3, 128, (1, 8), generator=torch.Generator().manual_seed(1))


def base():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=128, initializer_range=0.1, **SIZES))


@torch.no_grad()
def logits(model):
    return model.eval()(row).logits


def save(name, seed, r=8, alpha=8, **patterns):
    """Save an adapter of q_proj and v_proj with drawn weights."""
    lora = LoraConfig(r=r, lora_alpha=alpha, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **patterns)
    model = get_peft_model(base(), lora)
    draw = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.copy_(torch.randn(parameter.shape, generator=draw) * 0.1)
    model.save_pretrained(name)


def off(first, second, prepare=False):
    """Return how far a model is off the logits of the second adapter once it was swapped in for the first."""
    wanted = logits(PeftModel.from_pretrained(base(), second))
    model = PeftModel.from_pretrained(base(), first)
    if prepare:
        prepare_model_for_compiled_hotswap(model, target_rank=32)
    hotswap_adapter(model, second, adapter_name="default")
    value = (logits(model) - wanted).abs().max().item()
    scale = float(model.base_model.model.model.layers[0].self_attn.q_proj.scaling["default"])
    print(f"{first} -> {second}{' (prepared)' if prepare else ''}: off by {value:.4f}, q_proj scaled by {scale}")
    return value


save("plain", 1)
save("other", 2)
save("small", 3, r=2, alpha=16)
save("rank_2", 4, rank_pattern={"q_proj": 2})
save("rank_2_other", 5, rank_pattern={"q_proj": 2})
save("rank_32", 6, rank_pattern={"q_proj": 32})
save("alpha_64", 7, alpha_pattern={"q_proj": 64})
save("alpha_64_other", 8, alpha_pattern={"q_proj": 64})

loaded = PeftModel.from_pretrained(base(), "plain")
loaded.load_adapter("rank_2", "second")
loaded.set_adapter("second")
scale = loaded.base_model.model.model.layers[0].self_attn.q_proj.scaling["second"]
control = (logits(loaded) - logits(PeftModel.from_pretrained(base(), "rank_2"))).abs().max().item()
print(f"plain, then rank_2 by load_adapter: off by {control:.4f}, q_proj scaled by {scale}")
assert control < 1e-4 and scale == 4, "load_adapter is off, too"
assert off("plain", "other") < 1e-4 and off("plain", "small") < 1e-4, "an adapter without a pattern is off"
assert off("rank_2", "plain") < 1e-4
for first, second in (("plain", "rank_2"), ("rank_2", "rank_2_other"), ("rank_2", "rank_2"), ("plain", "rank_32")):
    assert off(first, second) > 0.1, "no longer holds: the rank_pattern is read"
assert off("plain", "rank_2", prepare=True) > 0.1, "no longer holds for a prepared model"
assert off("alpha_64", "alpha_64_other") > 0.1, "no longer holds: the alpha_pattern is read"
PROGRAM
