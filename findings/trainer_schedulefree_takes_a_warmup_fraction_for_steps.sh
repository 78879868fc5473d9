#!/usr/bin/env bash
# Title: A fraction as Trainer's warm-up gives schedule-free AdamW a first step of 1/fraction times the rate.
# Packages: transformers==5.23.0 accelerate==1.15.0 schedulefree==1.4.1 torch==2.13.0
# Guess: warmup_steps=0.1 (a fraction of all steps since transformers 5) warms up over the first tenth of the steps.
# Seen: schedules turn the fraction into steps, but schedule_free_adamw and schedule_free_sgd get the 0.1 itself, and
#   schedulefree computes (step + 1) / warmup_steps, unlimited: of 40 steps the first has a rate of 0.1 instead of
#   0.01, the others 0.01; there is no warm-up. With warmup_steps=0.01 the first step has a rate of 1.0. One SGD step
#   moves a weight ten times too far. warmup_steps=4 is right: 0.0025, 0.005, 0.0075, 0.01; 2026-11-28, Python 3.11,
#   Linux, CPU.
# Costs: the smaller the wanted warm-up, the larger the first step: a run starts with a blow that a warm-up should have
#   prevented, at a rate that the log (learning_rate: 0.01) does not show. Nothing warns.
# Tandem: refuses schedule_free_* (pipeline/recipe/schema.py) and names a schedule to take instead.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 accelerate==1.15.0 schedulefree==1.4.1 torch==2.13.0 \
  2>"$folder/pip" || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
export HF_HUB_OFFLINE=1 HF_HOME="$folder/home"
venv/bin/python 2>log - <<'PROGRAM' || { tail -20 log >&2; exit 1; }
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

transformers.logging.set_verbosity_error()
rows = [{"input_ids": torch.arange(8) + i, "labels": torch.arange(8) + i} for i in range(40)]


class Watch(TrainerCallback):
    """Keep the rate of every step, as the optimizer used it, and as the log shows it."""

    def __init__(self):
        self.used, self.logged = [], []

    def on_optimizer_step(self, args, state, control, optimizer=None, **rest):
        self.used.append(round(float(getattr(optimizer, "optimizer", optimizer).param_groups[0]["scheduled_lr"]), 5))

    def on_log(self, args, state, control, logs=None, **rest):
        if "learning_rate" in logs:
            self.logged.append(logs["learning_rate"])


def train(optim, warmup):
    """Return the used and logged rates of 40 steps at 0.01,."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    arguments = TrainingArguments(
        "out", optim=optim, warmup_steps=warmup, learning_rate=0.01, lr_scheduler_type="constant", max_steps=40,
        per_device_train_batch_size=1, save_strategy="no", logging_steps=1, report_to="none", disable_tqdm=True,
        use_cpu=True,
    )
    watch = Watch()
    trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows, callbacks=[watch])
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return watch.used, watch.logged


for optim in ("schedule_free_adamw", "schedule_free_sgd"):
    tenth, hundredth, steps = (train(optim, warmup) for warmup in (0.1, 0.01, 4))
    print(f"{optim}, warmup_steps=0.1:  used {tenth[0][:5]}, logged {tenth[1][:2]}")
    print(f"{optim}, warmup_steps=0.01: used {hundredth[0][:5]}, logged {hundredth[1][:2]}")
    print(f"{optim}, warmup_steps=4:    used {steps[0][:5]}")
    assert steps[0][:5] == [0.0025, 0.005, 0.0075, 0.01, 0.01], "no longer holds: the control"
    assert tenth[0] == [0.1] + [0.01] * 39, "no longer holds: the fraction is turned into steps"
    assert hundredth[0] == [1.0] + [0.01] * 39, "no longer holds: the fraction is turned into steps"
    assert set(tenth[1]) == {0.01}, "no longer holds: the log shows the rate"
PROGRAM
