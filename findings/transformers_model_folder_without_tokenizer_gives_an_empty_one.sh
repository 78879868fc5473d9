#!/usr/bin/env bash
# Title: AutoTokenizer of a GPT-2, Qwen or Mamba folder without tokenizer files returns an empty tokenizer, no error.
# Packages: transformers==5.23.0 torch==2.13.0
# Guess: AutoTokenizer.from_pretrained(folder) on what model.save_pretrained(folder) wrote (config.json and weights)
#   raises, since there is no tokenizer in it.
# Seen: for gpt2, qwen2, qwen3, gpt_neox, mamba, opt and phi it returns a tokenizer of 1 or 2 ids, which turns any
#   text into no ids at all; for gemma2 one of 5 ids that makes one <unk> of a text. Nothing is logged. For llama,
#   mistral and smollm3 a ValueError is raised, as expected. save_pretrained then writes the empty tokenizer beside
#   the model, where from now on it is what the folder has. 2026-11-27, Python 3.11, Linux, CPU.
# Costs: a script that takes the tokenizer from a checkpoint folder that lacks it tokenizes a whole corpus to empty
#   rows; perplexity and length filters see nothing and a chat begins from an empty prompt.
# Tandem: refuses a folder without tokenizer.json (pipeline/tokenizer/load.py).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 torch==2.13.0 \
    2>"$folder/pip" || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
HF_HUB_OFFLINE=1 HF_HOME="$folder/hf" venv/bin/python - <<'PROGRAM'
import io
import logging as standard_logging
import os

from transformers import (
    AutoModel, AutoTokenizer, Gemma2Config, GPT2Config, GPTNeoXConfig, LlamaConfig, MambaConfig, MistralConfig,
    OPTConfig, PhiConfig, Qwen2Config, Qwen3Config, SmolLM3Config,
)
from transformers.utils import logging

TEXT = "Hello world, this is a text."
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "pad_token_id": 0}
SIZES |= {"bos_token_id": 1, "eos_token_id": 2, "num_key_value_heads": 2, "intermediate_size": 32, "head_dim": 16}
logging.disable_progress_bar()
logging.set_verbosity_error()

found = {}
for config_class in (
    GPT2Config, Qwen2Config, Qwen3Config, GPTNeoXConfig, MambaConfig, OPTConfig, PhiConfig, Gemma2Config, LlamaConfig,
    MistralConfig, SmolLM3Config,
):
    folder = config_class.model_type
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64} if folder == "gpt2" else SIZES
    AutoModel.from_config(config_class(**sizes)).save_pretrained(folder)
    said = io.StringIO()
    handler = standard_logging.StreamHandler(said)
    standard_logging.getLogger("transformers").addHandler(handler)
    logging.set_verbosity_warning()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        found[folder] = len(tokenizer), tokenizer(TEXT).input_ids
        print(f"{folder}: {type(tokenizer).__name__} of {len(tokenizer)} ids, the text is", tokenizer(TEXT).input_ids)
        assert not said.getvalue(), "no longer holds: something is said"
    except ValueError as error:
        found[folder] = None
        print(f"{folder}: ValueError: {str(error).split(':')[0]}")
    logging.set_verbosity_error()
    standard_logging.getLogger("transformers").removeHandler(handler)

for name in ("gpt2", "qwen2", "qwen3", "gpt_neox", "mamba", "opt", "phi"):
    assert found[name] and found[name][0] < 3 and found[name][1] == [], f"no longer holds for {name}"
assert found["gemma2"] and len(found["gemma2"][1]) == 1, "no longer holds for gemma2"
for name in ("llama", "mistral", "smollm3"):
    assert found[name] is None, f"the control {name} raises no more"
AutoTokenizer.from_pretrained("qwen3").save_pretrained("qwen3")
print("files of qwen3 after saving:", sorted(os.listdir("qwen3")))
PROGRAM
