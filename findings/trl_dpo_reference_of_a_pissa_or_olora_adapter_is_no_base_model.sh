#!/usr/bin/env bash
# Title: DPO with PiSSA or OLoRA has a reference that is no model of yours; given as a PeftModel, the policy is none.
# Packages: trl==1.16.0 peft==0.21.2 transformers==5.23.0 accelerate==1.15.0 datasets==5.2.0 torch==2.13.0
# Guess: DPOTrainer with a new adapter starts with policy = reference = base, a loss of ln 2 = 0.6931 and rewards of 0,
#   whatever init_lora_weights is, as PiSSA and OLoRA only split the base's weights in two.
# Seen: with a peft_config the policy is the base but the reference (adapter switched off) is the base without its
#   principal part: before any update the loss is 1.30 (OLoRA) or 0.59 (PiSSA), with precompute_ref_log_probs too. With
#   the model given as a PeftModel the loss is 0.6931, since the reference is a second adapter of the same config; to
#   add it takes its part out of the base once more, so that policy and reference are both off by 7 to 8 in logits
#   from the model that was given. Default, gaussian and orthogonal are right. 2026-11-28, Python 3.11, Linux, CPU.
# Costs: the training is held close to a model that nobody has, or starts from one; the second case shows in no
#   log. The comment beside TRL's code says that disabling the adapter gives the base.
# Tandem: Does not train by DPO itself; docs/build_on.md shows TRL's DPO without an adapter, and LoRA with the default
#   initialization.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet trl==1.16.0 peft==0.21.2 transformers==5.23.0 accelerate==1.15.0 \
    datasets==5.2.0 torch==2.13.0 2>"$folder/pip" || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
HF_HUB_OFFLINE=1 HF_HOME="$folder/hf" venv/bin/python - <<'PROGRAM'
import contextlib
import io
import logging
import math
import warnings

import torch
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
disable_progress_bars()
words = ["<pad>", "<eos>", "<unk>", "the", "sky", "is", "blue", "green", "red", "what", "color", "of", "sea"]
backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
backend.pre_tokenizer = pre_tokenizers.Whitespace()
names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
pair = {"prompt": "what color is the sky", "chosen": " the sky is blue", "rejected": " the sky is green of red"}
rows = Dataset.from_list([pair] * 4)
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
row = torch.tensor([[9, 10, 5, 3, 4, 3, 4, 5]])


def base():
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=32, initializer_range=0.3, **SIZES, **IDS)
    return AutoModelForCausalLM.from_config(config)


@torch.no_grad()
def logits(model):
    return model.eval()(row).logits


def first_step(initialization, given_as, precompute=False):
    """Return the loss and reward before any update, and how far the policy is off the model that was given."""
    lora = LoraConfig(r=8, target_modules="all-linear", init_lora_weights=initialization, task_type="CAUSAL_LM")
    model, config = base(), lora
    if given_as == "PeftModel":
        model, config = get_peft_model(model, lora), None
        assert (logits(model) - logits(base())).abs().max() < 1e-2, "PEFT itself changes the model"
    arguments = DPOConfig(
        output_dir="dpo",
        per_device_train_batch_size=4,
        max_steps=1,
        logging_steps=1,
        learning_rate=1e-6,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        disable_tqdm=True,
        precompute_ref_log_probs=precompute,
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        trainer = DPOTrainer(model, args=arguments, train_dataset=rows, processing_class=tokenizer, peft_config=config)
        off = (logits(trainer.model) - logits(base())).abs().max().item()
        trainer.train()
    log = trainer.state.log_history[0]
    return log["loss"], log["rewards/chosen"], off


seen = {}
for initialization in (True, "gaussian", "orthogonal", "olora", "pissa"):
    for given_as in ("peft_config", "PeftModel"):
        loss, reward, off = seen[initialization, given_as] = first_step(initialization, given_as)
        print(f"{initialization}, {given_as}: first loss {loss:.4f}, reward {reward:+.4f}, policy off by {off:.4f}")
precomputed = first_step("pissa", "peft_config", precompute=True)
print(f"pissa, peft_config, precomputed: first loss {precomputed[0]:.4f}")

for initialization in (True, "gaussian", "orthogonal"):
    for given_as in ("peft_config", "PeftModel"):
        loss, reward, off = seen[initialization, given_as]
        assert abs(loss - math.log(2)) < 1e-3 and off < 1e-2, "the control is off"
for initialization in ("olora", "pissa"):
    loss, _, off = seen[initialization, "peft_config"]
    assert abs(loss - math.log(2)) > 0.05 and off < 1e-2, "no longer holds: the reference is the base"
    loss, _, off = seen[initialization, "PeftModel"]
    assert abs(loss - math.log(2)) < 1e-3 and off > 1, "no longer holds: the policy is what was given"
assert abs(precomputed[0] - math.log(2)) > 0.05
PROGRAM
