#!/usr/bin/env bash
# Title: TRL's packing keeps texts apart for Llama and GPT-2; for OPT, Bloom, Falcon and MPT they see each other.
# Packages: transformers==5.23.0 torch==2.13.0 accelerate==1.15.0 datasets==5.2.0 trl==1.16.0
# Guess: SFTConfig(packing=True) keeps sequence boundaries (bfd) for each model it accepts, and refuses the others:
#   it does refuse LFM2, whose convolutions cannot.
# Seen: of two texts in a packed row, made by SFTTrainer itself, the second has the logits that it has alone for
#   Llama, GPT-2 and GPT-NeoX (1e-5); for OPT, Bloom, Falcon and MPT, whose masks are not made from positions, they
#   are off by 2.7 standard deviations and more, and a training step runs through. Nothing is said of it. LFM2 raises
#   ValueError. 2026-11-27, Python 3.11, Linux, CPU.
# Costs: these models train on texts that continue one another, with positions that run on; the loss looks better
#   than it is, and a chat model learns to answer from the conversation before.
# Tandem: tries each model on two texts before rows are made, and gives those four one text a row, padded
#   (docs/isolation.md).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 torch==2.13.0 \
    accelerate==1.15.0 datasets==5.2.0 trl==1.16.0 \
    2>"$folder/pip" || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
HF_HUB_OFFLINE=1 HF_HOME="$folder/hf" venv/bin/python - <<'PROGRAM'
import inspect
import warnings

import torch
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, PrinterCallback
from transformers import (
    BloomConfig, FalconConfig, GPT2Config, GPTNeoXConfig, Lfm2Config, LlamaConfig, MptConfig, OPTConfig,
)
from transformers.utils import logging
from trl import SFTConfig, SFTTrainer

logging.set_verbosity_error()
warnings.simplefilter("ignore")
disable_progress_bars()
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<end>")
texts = Dataset.from_list([{"text": "the first text of the row"}, {"text": "another text, unlike"}])

WIDTH = {"vocab_size": 260, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDTH |= {"initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {
    LlamaConfig: {"intermediate_size": 128}, GPT2Config: {}, GPTNeoXConfig: {"intermediate_size": 128},
    OPTConfig: {"ffn_dim": 128, "word_embed_proj_dim": 64}, BloomConfig: {"n_head": 4, "n_layer": 2}, FalconConfig: {},
    MptConfig: {"d_model": 64, "n_heads": 4, "n_layers": 2},
    Lfm2Config: {"layer_types": ["conv", "full_attention"], "num_key_value_heads": 2, "intermediate_size": 128},
}
off = {}
for config_class, sizes in SIZES.items():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_class(**WIDTH | sizes))
    arguments = SFTConfig(
        "out", packing=True, max_length=64, per_device_train_batch_size=1, max_steps=1, use_cpu=True, bf16=False,
        report_to=[], gradient_checkpointing=False, disable_tqdm=True, save_strategy="no", log_level="error",
    )
    trainer = SFTTrainer(model=model, args=arguments, train_dataset=texts, processing_class=tokenizer)
    trainer.remove_callback(PrinterCallback)
    batch = next(iter(trainer.get_train_dataloader()))
    length = int(batch["cu_seq_lens_q"][1])  # of the first text
    taken = inspect.signature(model.forward).parameters
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    if "kwargs" not in taken:
        inputs = {name: value for name, value in inputs.items() if name in taken}
    name = config_class.model_type
    try:
        with torch.no_grad():
            model.eval()
            second = model(**inputs, use_cache=False).logits[:, length:]
            alone = model(batch["input_ids"][:, length:], use_cache=False).logits
        trainer.train()
    except ValueError as error:
        off[name] = None
        print(f"{name}: refused: {str(error).split('.')[0]}")
        continue
    off[name] = ((second - alone).abs().max() / alone.std()).item()
    print(f"{name}: second text of the row off by {off[name]:.5f} deviations, one step trained")

for name in ("llama", "gpt2", "gpt_neox"):
    assert off[name] < 1e-3, f"the control {name} does not keep texts apart"
for name in ("opt", "bloom", "falcon", "mpt"):
    assert off[name] is not None and off[name] > 0.5, f"no longer holds: {name} keeps texts apart or is refused"
PROGRAM
