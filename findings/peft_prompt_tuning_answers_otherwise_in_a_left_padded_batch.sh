#!/usr/bin/env bash
# Title: With prompt tuning a left-padded row gets other logits and another answer than the same row alone.
# Packages: peft==0.21.2 transformers==5.23.0 torch==2.13.0 accelerate==1.15.0
# Guess: generate of a left-padded batch gives the answers of the rows one by one, as it does for the base model, LoRA
#   and prefix tuning; the mask hides the padding.
# Seen: the virtual tokens are put in front of the padding, and positions are not counted by the mask: PEFT sets
#   position_ids to None, also those that generate or a caller gives, and warns of that. So the padding lies between
#   the learned prompt and the text, which stand apart by as many positions as the row was padded. With 5 and 40
#   padding tokens the logits of the first new token are off by 1 and more and 16 of 16 answers are others for prompt
#   tuning and p-tuning, with rotary positions (Llama) and learned ones (GPT-2). Without a method, with LoRA and with
#   prefix tuning none is.
#   2026-11-28, Python 3.11, Linux, CPU.
# Costs: an answer depends on the longest prompt that happens to be in the batch; scores change with the batch size,
#   and training (padded on the right) is not what is evaluated.
# Tandem: Does not use prompt tuning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet peft==0.21.2 transformers==5.23.0 torch==2.13.0 accelerate==1.15.0 \
    2>"$folder/pip" || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
HF_HUB_OFFLINE=1 HF_HOME="$folder/hf" venv/bin/python - <<'PROGRAM'
import copy
import logging
import warnings

import torch
from peft import LoraConfig, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
LLAMA = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4}
METHODS = {
    "none": None,
    "LoRA": LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"),
    "prefix tuning": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=8),
    "prompt tuning": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=8),
    "p-tuning": PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=8, encoder_hidden_size=16),
}
rows = [torch.randint(3, 128, (6,), generator=torch.Generator().manual_seed(seed)) for seed in range(8)]
PADDING = (5, 40)


def tuned(kind, method):
    """Return a model with drawn weights, also in what the method trains."""
    torch.manual_seed(0)
    config_class, sizes = (LlamaConfig, LLAMA) if kind == "llama" else (GPT2Config, GPT2)
    model = AutoModelForCausalLM.from_config(config_class(vocab_size=128, initializer_range=0.1, **sizes, **IDS))
    if METHODS[method] is not None:
        # A copy: get_peft_model writes the layers' names of this model into the config.
        model = get_peft_model(model, copy.deepcopy(METHODS[method]))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data.normal_(0, 0.1 if method == "LoRA" else 0.5)
    return model.eval()


@torch.no_grad()
def answer(model, row, padding):
    """Return the first new token's logits and twelve new tokens of a row behind so many padding tokens."""
    ids = torch.cat([torch.zeros(padding, dtype=torch.long), row])[None]
    mask = torch.cat([torch.zeros(padding, dtype=torch.long), torch.ones_like(row)])[None]
    more = {"output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0}
    out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=12, do_sample=False, **more)
    return out.logits[0][0], out.sequences[0, -12:].tolist()


for kind in ("llama", "gpt2"):
    for method in METHODS:
        model = tuned(kind, method)
        off, others = 0.0, 0
        for row in rows:
            logits, tokens = answer(model, row, 0)
            for padding in PADDING:
                padded_logits, padded_tokens = answer(model, row, padding)
                off = max(off, (logits - padded_logits).abs().max().item())
                others += tokens != padded_tokens
        print(f"{kind}, {method}: first logits off by at most {off:.5f}, other answers: {others} of {2 * len(rows)}")
        if method in ("none", "LoRA", "prefix tuning"):
            assert off < 1e-3 and others == 0, "the control depends on the padding"
        else:
            assert off > 0.2 and others > 3, "no longer holds: padding has no effect"
PROGRAM
