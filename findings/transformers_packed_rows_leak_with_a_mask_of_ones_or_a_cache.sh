#!/usr/bin/env bash
# Title: Restarted position_ids keep packed texts apart only without an attention mask and without a cache.
# Packages: transformers==5.23.0 torch==2.13.0
# Guess: position_ids that begin again at 0 isolate the texts of a packed row. An attention mask of ones says that
#   nothing is padding and changes nothing; use_cache only says whether keys are handed back.
# Seen: with attention_mask=None and use_cache=False the second text has the logits that it has alone (1e-5). With a
#   mask of ones, or with use_cache=True, which is what a config says by default, it sees the first text: the logits
#   move by more than a standard deviation, and nothing is said. Llama, Qwen3 and Mistral under sdpa and eager.
#   Trainer turns the cache off while it trains, so the same batch is isolated in trainer.train() and is not in
#   model(**batch) beside it. 2026-11-27, Python 3.11, Linux, CPU.
# Costs: a collator that adds the usual mask trains on texts that see each other; a packed evaluation, reference
#   model or logprob pass outside of Trainer computes other numbers than the training.
# Tandem: gives no mask with packed rows, and tries each model, with the cache off, before rows are made
#   (docs/isolation.md).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 torch==2.13.0 \
    2>"$folder/pip" || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
HF_HUB_OFFLINE=1 HF_HOME="$folder/hf" venv/bin/python - <<'PROGRAM'
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config

generator = torch.Generator().manual_seed(1)
first, second = (torch.randint(0, 128, (1, 20), generator=generator) for _ in range(2))
row = torch.cat([first, second], 1)
positions = torch.arange(20).repeat(2)[None]
ways = {
    "no mask, no cache": {"use_cache": False},
    "a mask of ones, no cache": {"use_cache": False, "attention_mask": torch.ones_like(row)},
    "no mask, use_cache as the config says": {},
}
for config_class in (LlamaConfig, Qwen3Config, MistralConfig):
    for attention in ("sdpa", "eager"):
        torch.manual_seed(0)
        config = config_class(
            vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, head_dim=16, initializer_range=0.2,
        )
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
        with torch.no_grad():
            alone = model(second).logits
            change = {}
            for name, arguments in ways.items():
                packed = model(row, position_ids=positions, **arguments).logits[:, 20:]
                change[name] = ((packed - alone).abs().max() / alone.std()).item()
                print(f"{config.model_type}, {attention}, {name}: second text moves by {change[name]:.5f} deviations")
        assert config.use_cache, "the default of use_cache is another one now"
        assert change.pop("no mask, no cache") < 1e-3, "the control is not isolated"
        assert min(change.values()) > 1, "no longer holds: the packed texts are kept apart"
PROGRAM
