#!/usr/bin/env bash
# Title: The Trainer adds a mixture of experts' balancing loss once per micro-batch, undivided by their number.
# Packages: transformers==5.23.0 torch==2.13.0 accelerate==1.15.0
# Guess: gradient_accumulation_steps=4 with a quarter of the batch trains as one batch does: losses are divided by
#   the tokens of the whole step since num_items_in_batch.
# Seen: so it is for the cross-entropy, but the router's auxiliary loss is a mean over the micro-batch that is added
#   as it is: over 4 micro-batches it counts 4 times (8: 8 times). With rows that are all alike, so that nothing else
#   can differ, the reported loss of Mixtral and Qwen3-MoE is higher by 3 (7) times coefficient x auxiliary loss, and
#   the routers' gradients change with it. With the coefficient 0 the losses are equal to 1e-5. 2026-11-27, Python
#   3.11, Linux, CPU.
# Costs: the strength of the balancing depends on how a batch is cut: a run moved to smaller cards with more
#   accumulation balances its experts more strongly, and its loss curve is higher, with no word.
# Tandem: takes that loss off and adds its mean over the step's micro-batches and ranks (pipeline/training/trainer.py,
#   tests/contracts/test_experts.py).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 torch==2.13.0 accelerate==1.15.0 \
    2>"$folder/pip" || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
HF_HUB_OFFLINE=1 HF_HOME="$folder/hf" venv/bin/python - <<'PROGRAM'
import torch
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers import PrinterCallback, Trainer, TrainingArguments
from transformers.utils import logging

logging.set_verbosity_error()
# 16 times the same row: however the batch is cut, the auxiliary loss of each part is the same.
row = torch.randint(0, 128, (32,), generator=torch.Generator().manual_seed(1))
rows = [{"input_ids": row, "labels": row}] * 16


def one_step(model_class, config_class, coefficient, micro_batches):
    torch.manual_seed(0)
    model = model_class(
        config_class(
            vocab_size=128, hidden_size=64, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, num_local_experts=4, num_experts=4, num_experts_per_tok=2,
            initializer_range=0.2, output_router_logits=True, router_aux_loss_coef=coefficient,
        )
    )
    arguments = TrainingArguments(
        "out", use_cpu=True, report_to=[], max_steps=1, logging_steps=1, save_strategy="no", disable_tqdm=True,
        per_device_train_batch_size=16 // micro_batches, gradient_accumulation_steps=micro_batches,
        max_grad_norm=1e9, log_level="error",
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    first = trainer.state.log_history[0]
    return float(first["loss"]), float(first["grad_norm"])


for model_class, config_class in ((MixtralForCausalLM, MixtralConfig), (Qwen3MoeForCausalLM, Qwen3MoeConfig)):
    name = model_class.__name__
    plain = [one_step(model_class, config_class, 0.0, n) for n in (1, 4)]
    balanced = [one_step(model_class, config_class, 0.1, n) for n in (1, 4, 8)]
    added = [loss - plain[0][0] for loss, _ in balanced]
    print(f"{name}, coefficient 0, losses with 1 and 4 micro-batches: {plain[0][0]:.5f} {plain[1][0]:.5f}")
    print(f"{name}, coefficient 0.1, losses with 1, 4, 8:", *(f"{loss:.5f}" for loss, _ in balanced))
    print(f"{name}, norm of the gradient, coefficient 0:", *(f"{norm:.5f}" for _, norm in plain))
    print(f"{name}, norm of the gradient, coefficient 0.1:", *(f"{norm:.5f}" for _, norm in balanced))
    print(f"{name}, balancing adds, in shares of one batch: {added[1] / added[0]:.3f} {added[2] / added[0]:.3f}")
    assert abs(plain[0][0] - plain[1][0]) < 1e-3 and abs(plain[0][1] / plain[1][1] - 1) < 1e-3, "the control differs"
    assert abs(added[1] / added[0] - 4) < 0.1 and abs(added[2] / added[0] - 8) < 0.2, "no longer holds: it is divided"
PROGRAM
