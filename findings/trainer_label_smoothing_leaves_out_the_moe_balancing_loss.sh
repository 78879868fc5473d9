#!/usr/bin/env bash
# Title: With a label_smoothing_factor the Trainer trains a mixture of experts without its balancing loss.
# Packages: transformers==5.23.0 accelerate==1.15.0 torch==2.13.0
# Guess: label smoothing changes the cross entropy; the router's balancing loss, asked for by output_router_logits and
#   router_aux_loss_coef, is added to it as before.
# Seen: the labels are taken out of the batch before the model sees them, and the loss is made from the logits alone:
#   with a factor of 0.1, and of 1e-6, too, the loss and the routers' update are bit for bit the same for a coefficient
#   of 0, 1 and 100, while without smoothing they differ and the loss rises by 2 per unit. The router logits are
#   computed all the same. Nothing is logged. 2026-11-28, Python 3.11, Linux, CPU.
# Costs: experts may collapse in a run whose config says that they are balanced; two runs that differ in the
#   coefficient are one. The logged loss is lower than without smoothing, as it lacks a part.
# Tandem: refuses label_smoothing_factor in a recipe's trainer settings (docs/recipes.md).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 accelerate==1.15.0 torch==2.13.0 \
    2>"$folder/pip" || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
HF_HUB_OFFLINE=1 HF_HOME="$folder/hf" venv/bin/python - <<'PROGRAM'
import contextlib
import io
import logging
import warnings

import torch
from transformers import AutoModelForCausalLM, MixtralConfig, Trainer, TrainingArguments

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
EXPERTS = {"num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True}
ids = torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(1))
rows = [{"input_ids": row, "labels": row} for row in ids]


def one_step(coefficient, smoothing):
    """Return the logged loss of one SGD step and the routers' weights after it."""
    torch.manual_seed(0)
    weights = {"initializer_range": 0.2, "router_aux_loss_coef": coefficient}
    model = AutoModelForCausalLM.from_config(MixtralConfig(vocab_size=64, **SIZES, **EXPERTS, **weights))
    arguments = TrainingArguments(
        "out",
        per_device_train_batch_size=8,
        max_steps=1,
        logging_steps=1,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0,
        label_smoothing_factor=smoothing,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = Trainer(model, arguments, train_dataset=rows)
        trainer.train()
    routers = [weight.detach().flatten() for name, weight in model.named_parameters() if "gate.weight" in name]
    assert routers, "no router was found"
    return trainer.state.log_history[0]["loss"], torch.cat(routers)


seen = {}
for smoothing in (0.0, 1e-6, 0.1):
    for coefficient in (0.0, 1.0, 100.0):
        loss, routers = one_step(coefficient, smoothing)
        off = (routers - seen.setdefault(smoothing, (loss, routers))[1]).abs().max().item()
        print(f"smoothing {smoothing}, coefficient {coefficient}: loss {loss:.4f}, routers off from 0's by {off:.6f}")
        if smoothing:
            assert loss == seen[smoothing][0] and off == 0, "no longer holds: the balancing loss is added"
        elif coefficient:
            assert loss > seen[smoothing][0] + coefficient and off > 1e-4, "the control has no balancing loss"
assert abs(seen[1e-6][0] - seen[0.0][0]) < 1e-3
PROGRAM
