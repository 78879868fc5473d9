#!/usr/bin/env bash
# Title: Trainer's optim_args: a weight decay is dropped, "False" means true, and AdamW reads none of them.
# Packages: transformers==5.23.0 accelerate==1.15.0 torch-optimi==0.3.3 torch==2.13.0
# Guess: optim_args="momentum=0.9,weight_decay=0.1" sets both; "decouple_lr=False" is false; unknown keys are refused.
# Seen: (1) for sgd, rmsprop and adagrad the momentum or eps arrives, but the weight decay is 0 in every group: each
#   group carries TrainingArguments.weight_decay, which goes first. (2) for stable_adamw decouple_lr=False and
#   kahan_sum=False both become True (any text does), so the decay is no longer multiplied by the rate: a weight with a
#   gradient of 0 keeps 0.9 of itself in one step instead of 0.99999. (3) adamw_torch takes betas=0.5, amsgrad=True or
#   a misspelt key without a word and uses none; 2026-11-28, Python 3.11, Linux, CPU.
# Costs: a run with a setting that is written in its arguments and was never used, or was used the other way round.
# Tandem: names before step 1 what transformers would not use (tests/run/test_checks.py).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 accelerate==1.15.0 torch-optimi==0.3.3 torch==2.13.0 \
  2>"$folder/pip" || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
export HF_HUB_OFFLINE=1 HF_HOME="$folder/home"
venv/bin/python 2>log - <<'PROGRAM' || { tail -20 log >&2; exit 1; }
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

transformers.logging.set_verbosity_error()


def build(optim, text, weight_decay=0.0):
    """Return the optimizer that Trainer makes of these arguments."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    arguments = TrainingArguments(
        "out", optim=optim, optim_args=text, weight_decay=weight_decay, learning_rate=1e-4, report_to="none",
        use_cpu=True,
    )
    return Trainer(LlamaForCausalLM(config), arguments).create_optimizer()


def values(optimizer, *keys):
    return [[group.get(key) for key in keys] for group in optimizer.param_groups]


sgd = values(build("sgd", "momentum=0.9,weight_decay=0.1"), "momentum", "weight_decay")
rmsprop = values(build("rmsprop", "eps=0.001,weight_decay=0.1"), "eps", "weight_decay")
adagrad = values(build("adagrad", "eps=0.001,weight_decay=0.1"), "eps", "weight_decay")
argument = values(build("sgd", "momentum=0.9", weight_decay=0.1), "momentum", "weight_decay")
print("sgd, momentum=0.9,weight_decay=0.1: momentum and decay of the groups:", sgd)
print("rmsprop and adagrad, eps=0.001,weight_decay=0.1: eps and decay:", rmsprop, adagrad)
print("sgd, weight_decay=0.1 as its own argument:", argument)
assert sgd == [[0.9, 0.0]] * 2 and rmsprop == adagrad == [[0.001, 0.0]] * 2, "no longer holds: the decay arrives"
assert argument == [[0.9, 0.1], [0.9, 0.0]], "no longer holds: the control"


def kept(text):
    """Return what one step without a gradient leaves of a weight of 1, and the two settings."""
    optimizer = build("stable_adamw", text, weight_decay=0.1)
    weight = optimizer.param_groups[0]["params"][0]
    with torch.no_grad():
        weight.fill_(1.0)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    return round(weight.detach().flatten()[0].item(), 6), values(optimizer, "decouple_lr", "kahan_sum")[0]


false, none = kept("decouple_lr=False,kahan_sum=False"), kept(None)
print("stable_adamw, decouple_lr=False,kahan_sum=False: kept of a weight, settings:", *false)
print("stable_adamw without optim_args:                 kept of a weight, settings:", *none)
assert false[1] == [True, True] and none[1][0] is False, "no longer holds: False is read as false"
assert false[0] < 0.95 and none[0] > 0.9999, "no longer holds: the decay is the same"

adamw = values(build("adamw_torch", "betas=0.5,amsgrad=True,no_such_key=1"), "betas", "amsgrad")
print("adamw_torch, betas=0.5,amsgrad=True,no_such_key=1: betas and amsgrad:", adamw)
assert adamw == [[(0.9, 0.999), False]] * 2, "no longer holds: AdamW reads optim_args"
PROGRAM
