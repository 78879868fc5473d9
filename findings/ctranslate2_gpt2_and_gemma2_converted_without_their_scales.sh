#!/usr/bin/env bash
# Title: CTranslate2 converts GPT-2 without its norm's epsilon and attention scale, Gemma 2 without scale and softcaps.
# Packages: ctranslate2==4.8.5 transformers==5.23.0 torch==2.13.0 accelerate==1.15.0 numpy==2.4.6
# Guess: the converter reads what these two configurations say, or refuses what it cannot compute, as it does for an
#   activation or a RoPE scaling that it does not know.
# Seen: the default GPT-2, and a Gemma 2 without softcaps whose query_pre_attn_scalar is its head_dim, are right to
#   1e-4. scale_attn_weights=False, scale_attn_by_inverse_layer_idx=True and layer_norm_epsilon of a GPT-2 and
#   query_pre_attn_scalar and both softcaps of a Gemma 2 are read by nobody: log probabilities part by 0.4 to 3.5
#   without a word. For a Llama its rms_norm_eps is written. 2026-11-27, Python 3.11, Linux, CPU.
# Costs: a GPT-2 trained with Mistral's (Stanford) inverse scaling, or Gemma 2 27B (144 over heads of 128) and every
#   Gemma 2 with its softcaps, answers as a slightly worse model; greedy tokens often agree, so that a look at a few
#   answers shows nothing.
# Tandem: does not use CTranslate2. Its plain GPT-2 form has the default scale and epsilon.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile ctranslate2==4.8.5 transformers==5.23.0 torch==2.13.0 \
    accelerate==1.15.0 numpy==2.4.6 2>"$folder/pip" || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python - 2>log <<'PROGRAM' || { tail -n 20 log >&2; exit 1; }
import ctranslate2
import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, LlamaConfig, PreTrainedTokenizerFast

WORDS = ["<unk>", "<s>", "</s>", *(chr(number) for number in range(33, 127))]
backend = Tokenizer(models.BPE({word: number for number, word in enumerate(WORDS)}, [], unk_token="<unk>"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
IDS = torch.randint(3, len(WORDS), (1, 40), generator=torch.Generator().manual_seed(1))

common = {"vocab_size": len(WORDS), "bos_token_id": 1, "eos_token_id": 2}
small = {"n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 64, **common}
sizes = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"num_hidden_layers": 3, "max_position_embeddings": 64, **common},
}
gemma = {**sizes, "head_dim": 16, "sliding_window": 64}
uncapped = {**gemma, "attn_logit_softcapping": None, "final_logit_softcapping": None}
CONTROLS = {
    "GPT-2": GPT2Config(**small),
    "Llama, rms_norm_eps 0.1": LlamaConfig(**sizes, rms_norm_eps=0.1),
    "Gemma 2 without softcaps": Gemma2Config(**uncapped, query_pre_attn_scalar=16),
}
CASES = {
    "GPT-2, no attention scale": GPT2Config(**small, scale_attn_weights=False),
    "GPT-2, inverse layer scale": GPT2Config(**small, scale_attn_by_inverse_layer_idx=True),
    "GPT-2, epsilon 0.1": GPT2Config(**small, layer_norm_epsilon=0.1),
    "Gemma 2, scalar 64": Gemma2Config(**uncapped, query_pre_attn_scalar=64),
    "Gemma 2, softcaps of 5": Gemma2Config(
        **{**uncapped, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0}, query_pre_attn_scalar=16
    ),
}


def error(config):
    """Return how far CTranslate2's log probabilities are from those of transformers."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained("model")
    tokenizer.save_pretrained("model")
    ctranslate2.converters.TransformersConverter("model").convert("converted", force=True)
    engine = ctranslate2.Generator("converted", device="cpu", compute_type="float32", intra_threads=1)
    found = torch.tensor(np.array(engine.forward_batch([tokenizer.convert_ids_to_tokens(IDS[0].tolist())])))[0]
    with torch.no_grad():
        right = model(IDS).logits[0]
    return (right.log_softmax(-1) - found.float().log_softmax(-1)).abs().max().item()


for name, config in CONTROLS.items():
    value = error(config)
    print(f"{name}: {value:.5f}")
    assert value < 1e-3, "the control: this one is right"
for name, config in CASES.items():
    value = error(config)
    print(f"{name}: {value:.5f}")
    assert value > 0.1, f"no longer holds: {name} is right"
PROGRAM
