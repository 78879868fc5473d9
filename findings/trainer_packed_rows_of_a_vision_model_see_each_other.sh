#!/usr/bin/env bash
# Title: Trainer turns the cache off in a vision model's outer config only, so its packed texts see each other.
# Packages: transformers==5.23.0 torch==2.13.0 accelerate==1.15.0
# Guess: a Llava trained on packed rows of text (position_ids that begin again) keeps the texts apart as its Llama
#   does when it is trained by itself.
# Seen: Trainer sets config.use_cache=False, but the text part reads text_config.use_cache, which stays True; with a
#   cache transformers makes no block mask from the positions. Inside the training step the loss of the packed Llava
#   row is that of one text that runs through (6.37 instead of 6.57), where the same Llama's loss is the mean of its
#   two texts to 1e-4. use_cache=False in text_config mends it. 2026-11-27, Python 3.11, Linux, CPU.
# Costs: text-only or mixed fine-tuning of a vision model with packing trains across conversations; nothing in the
#   log tells.
# Tandem: switches use_cache off in the text part too (pipeline/training/build.py).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 torch==2.13.0 accelerate==1.15.0 \
    2>"$folder/pip" || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
HF_HUB_OFFLINE=1 HF_HOME="$folder/hf" venv/bin/python - <<'PROGRAM'
import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlamaForCausalLM, LlavaConfig, LlavaForConditionalGeneration
from transformers import PrinterCallback, Trainer, TrainingArguments

generator = torch.Generator().manual_seed(1)
# The second text is the first one again: a model that sees both has an easy task, the isolated one has not.
text = torch.randint(6, 128, (24,), generator=generator)
labels = text.clone()
labels[0] = -100  # as packing collators do: the first token of a text is no target of the text before
one = {"input_ids": text, "labels": labels, "position_ids": torch.arange(24)}
packed = {name: value.repeat(2) for name, value in one.items()}


def new_model(vision, text_cache=True):
    torch.manual_seed(0)
    text_config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, initializer_range=0.2, use_cache=text_cache,
    )
    if not vision:
        return LlamaForCausalLM(text_config)
    vision_config = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = LlavaConfig(vision_config=vision_config, text_config=text_config, image_token_index=5)
    return LlavaForConditionalGeneration(config)


def first_loss(model, row):
    arguments = TrainingArguments(
        "out", use_cpu=True, report_to=[], max_steps=1, logging_steps=1, save_strategy="no", disable_tqdm=True,
        per_device_train_batch_size=1, log_level="error",
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=[row])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return float(trainer.state.log_history[0]["loss"])


difference = {}
for name, vision, text_cache in (("llama", False, True), ("llava", True, True), ("llava, cache off", True, False)):
    model = new_model(vision, text_cache)
    alone = first_loss(new_model(vision, text_cache), one)
    together = first_loss(model, packed)
    difference[name] = abs(together - alone)
    print(f"{name}: use_cache of the config {model.config.use_cache}, of its text part",
          model.config.get_text_config().use_cache)
    print(f"{name}: loss of the text alone {alone:.4f}, of two of it in a row {together:.4f}")

assert difference["llama"] < 1e-3 and difference["llava, cache off"] < 1e-3, "a control is not isolated"
assert difference["llava"] > 0.05, "no longer holds: the packed texts of the vision model are kept apart"
PROGRAM
