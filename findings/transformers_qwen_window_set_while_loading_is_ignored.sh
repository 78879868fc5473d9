#!/usr/bin/env bash
# Title: Sliding-window settings given while loading a saved Qwen2 or Qwen3 are stored and change no logit.
# Packages: transformers==5.23.0 torch==2.13.0
# Guess: from_pretrained(folder, use_sliding_window=True, sliding_window=8, max_window_layers=0) makes the attention
#   windowed, as the same three settings do in Qwen2Config(...).
# Seen: the loaded config reads back the three settings, and the logits of 100 tokens are bitwise those of full
#   attention: the saved config.json holds layer_types (full_attention in each), made from the old settings, and only
#   that is read. The other way round, use_sliding_window=False leaves a windowed model windowed. layer_types given
#   too, or the settings in a new config, work; Mistral, which has no layer_types, takes a window while loading.
#   2026-11-27, Python 3.11, Linux, CPU.
# Costs: an experiment with or without a window measures the model that was there before; the config of the run says
#   otherwise.
# Tandem: takes the sizes and windows of a started-from model from its config.json (docs/finetune.md) and offers no
#   window for it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 torch==2.13.0 \
    2>"$folder/pip" || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
HF_HUB_OFFLINE=1 HF_HOME="$folder/hf" venv/bin/python - <<'PROGRAM'
import torch
from transformers import AutoModelForCausalLM, MistralConfig, Qwen2Config, Qwen3Config

WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
row = torch.randint(0, 128, (1, 100), generator=torch.Generator().manual_seed(1))


def new_model(config_class, **settings):
    torch.manual_seed(0)
    config = config_class(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, initializer_range=0.2, **settings,
    )
    return AutoModelForCausalLM.from_config(config).eval()


@torch.no_grad()
def logits(model):
    return model(row).logits


def loaded(folder, **settings):
    return AutoModelForCausalLM.from_pretrained(folder, **settings).eval()


for config_class in (Qwen2Config, Qwen3Config):
    name = config_class.__name__
    full, windowed = new_model(config_class), new_model(config_class, **WINDOW)
    full.save_pretrained("full")
    windowed.save_pretrained("windowed")
    scale = logits(full).std()
    asked = loaded("full", **WINDOW)
    unasked = loaded("windowed", use_sliding_window=False)
    print(name, "asked for a window, config:", asked.config.use_sliding_window, asked.config.sliding_window)
    changes = {
        "settings in a new config": logits(windowed) - logits(full),
        "the same settings while loading": logits(asked) - logits(full),
        "layer_types too": logits(loaded("full", **WINDOW, layer_types=["sliding_attention"] * 2)) - logits(full),
        "use_sliding_window=False while loading": logits(unasked) - logits(windowed),
    }
    changes = {key: (value.abs().max() / scale).item() for key, value in changes.items()}
    for key, value in changes.items():
        print(f"{name}, {key}, change of the logits in standard deviations: {value:.4f}")
    assert changes["settings in a new config"] > 1 and changes["layer_types too"] > 1, "a control has no effect"
    assert changes["the same settings while loading"] == 0, "no longer holds: the window is applied while loading"
    assert changes["use_sliding_window=False while loading"] == 0, "no longer holds: the window is taken away"
    assert asked.config.use_sliding_window and asked.config.sliding_window == 8

mistral = new_model(MistralConfig, sliding_window=None)
mistral.save_pretrained("mistral")
change = ((logits(loaded("mistral", sliding_window=8)) - logits(mistral)).abs().max() / scale).item()
print(f"MistralConfig, sliding_window while loading, change of the logits: {change:.4f}")
assert change > 1, "Mistral no longer takes a window while loading"
PROGRAM
