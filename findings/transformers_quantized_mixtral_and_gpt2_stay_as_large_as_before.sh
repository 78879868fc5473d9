#!/usr/bin/env bash
# Title: A Mixtral loaded in 4 bits keeps its experts in full, and a GPT-2 by torchao in int8 all of it.
# Packages: transformers==5.23.0 torch==2.13.0 bitsandbytes==0.50.2 torchao==0.18.0 accelerate==1.15.0
# Guess: quantization_config quantizes every linear layer but the head, so that a model of two layers keeps little more
#   than its embedding; where nothing or next to nothing is quantized, a warning or an error says so.
# Seen: share of the weights that stay in float32, embeddings and head left out: Llama 0.2 % with bitsandbytes (4 and
#   8 bits) and torchao. Mixtral 89 % with each of the three: since transformers 5 the experts are 3-dimensional
#   parameters, no linear layers, and are passed over. GPT-2, whose layers are Conv1D: 1 % with bitsandbytes, 100 %
#   with TorchAoConfig, logits equal to the bit; torchao's own quantize_ takes the tied head alone, a copy of it, so
#   that the model has grown. Nothing warns of it. 2026-11-28, Python 3.11, Linux, CPU.
# Costs: a mixture of experts that should fit in 4 bits takes its full size; a score "of the int8 GPT-2" is the float
#   model's. config.json and the model's repr name the quantization all the same.
# Tandem: Does not load quantized models; its plain GPT-2 form has Conv1D layers, as transformers' class wants.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 torch==2.13.0 bitsandbytes==0.50.2 torchao==0.18.0 \
    accelerate==1.15.0 2>"$folder/pip" || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
export HF_HUB_OFFLINE=1 HF_HOME="$folder/hf"
venv/bin/python - 2>"$folder/chatter" <<'PROGRAM' || { tail -5 "$folder/chatter" >&2; exit 1; }
import torch
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    TorchAoConfig,
)
from transformers.utils import logging

logging.disable_progress_bar()
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS = {
    "llama": LlamaConfig(vocab_size=512, **SIZES),
    "mixtral": MixtralConfig(vocab_size=512, num_key_value_heads=2, num_local_experts=4, **SIZES),
    "gpt2": GPT2Config(vocab_size=512, n_embd=128, n_layer=2, n_head=4),
}
WAYS = {
    "bitsandbytes 4 bits": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "bitsandbytes 8 bits": BitsAndBytesConfig(load_in_8bit=True),
    "torchao int8": TorchAoConfig(Int8WeightOnlyConfig()),
}
row = torch.arange(3, 35)[None]


def inner(model):
    """Return the parameters that are neither embeddings nor the head, by name."""
    outer = ("embed_tokens", "wte", "wpe", "lm_head")
    return {name: weight for name, weight in model.named_parameters() if not any(part in name for part in outer)}


@torch.no_grad()
def logits(model):
    return model.eval()(row).logits.float()


left, off = {}, {}
for kind, config in CONFIGS.items():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(kind)
    before = logits(model)
    weights = sum(weight.numel() for weight in inner(model).values())
    for way, quantization in WAYS.items():
        loaded = AutoModelForCausalLM.from_pretrained(kind, quantization_config=quantization)
        plain = {name: weight for name, weight in inner(loaded).items() if type(weight) is torch.nn.Parameter}
        left[kind, way] = sum(weight.numel() for weight in plain.values()) / weights
        off[kind, way] = (logits(loaded) - before).abs().max().item()
        print(f"{kind}, {way}: {left[kind, way]:.1%} stay as they were, logits off by {off[kind, way]:.5f}", end="; ")
        print("its config names the quantization:", "quantization_config" in loaded.config.to_dict())
model = AutoModelForCausalLM.from_pretrained("gpt2")
quantize_(model, Int8WeightOnlyConfig())
taken = [name for name, weight in model.named_parameters() if type(weight) is not torch.nn.Parameter]
tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
print("gpt2, torchao's quantize_ takes:", taken, "and the head is still the embedding:", tied)

for way in WAYS:
    assert left["llama", way] < 0.01 and off["llama", way] > 1e-4, "the control is not quantized"
    assert left["mixtral", way] > 0.8, f"no longer holds: {way} quantizes experts"
    if "torchao" not in way:
        assert left["gpt2", way] < 0.05, "the control is not quantized"
assert left["gpt2", "torchao int8"] == 1 and off["gpt2", "torchao int8"] == 0, "no longer holds: torchao takes Conv1D"
assert taken == ["lm_head.weight"] and not tied, "no longer holds for quantize_"
PROGRAM
