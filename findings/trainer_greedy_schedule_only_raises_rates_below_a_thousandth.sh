#!/usr/bin/env bash
# Title: Trainer's "greedy" schedule only ever raises a rate below 0.001, whatever the evaluations say.
# Packages: transformers==5.23.0 accelerate==1.15.0 torch==2.13.0
# Guess: lr_scheduler_type="greedy" lowers the rate when evaluations get worse and raises it when they get better.
# Seen: its min_lr is 0.001 by default and takes part only in the way down: from 5e-5 (Trainer's own default rate) 19
#   ever worse evaluations leave the rate at 5.26e-5 (the first evaluation counts as better), and it stays where 10
#   good ones had carried it. From 0.01 the same evaluations bring 0.004. With min_lr=0.0 in lr_scheduler_kwargs 5e-5
#   falls as well; 2026-11-28, Python 3.11, Linux, CPU.
# Costs: fine-tuning rates are below 0.001, so the schedule is a ratchet there: each good evaluation raises the rate,
#   and no bad one ever takes that back. Nothing is logged, and no check compares min_lr with the learning rate.
# Tandem: does not offer this schedule (the recipe's lr_scheduler_type has no greedy).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 accelerate==1.15.0 torch==2.13.0 \
  2>"$folder/pip" || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
export HF_HUB_OFFLINE=1 HF_HOME="$folder/home"
venv/bin/python 2>log - <<'PROGRAM' || { tail -20 log >&2; exit 1; }
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

transformers.logging.set_verbosity_error()
rows = [{"input_ids": torch.arange(8) + i, "labels": torch.arange(8) + i} for i in range(20)]


class Scripted(Trainer):
    """Reports evaluation losses from a list in place of real ones."""

    def evaluate(self, *arguments, **rest):
        metrics = super().evaluate(*arguments, **rest)
        return metrics | {"eval_loss": self.losses.pop(0)}


def train(rate, losses, **schedule):
    """Return the rate after each evaluation; one comes after each step."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    arguments = TrainingArguments(
        "out", learning_rate=rate, lr_scheduler_type="greedy", lr_scheduler_kwargs={"patience": 0, **schedule},
        metric_for_best_model="loss", greater_is_better=False, eval_strategy="steps", eval_steps=1, max_steps=20,
        per_device_train_batch_size=1, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
    )
    trainer = Scripted(LlamaForCausalLM(config), arguments, train_dataset=rows, eval_dataset=rows[:1])
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.losses, seen = list(losses), []
    step = trainer._evaluate

    def note(*arguments, **rest):
        metrics = step(*arguments, **rest)
        seen.append(trainer.optimizer.param_groups[0]["lr"])
        return metrics

    trainer._evaluate = note
    trainer.train()
    return seen


worse = [3 + 0.1 * i for i in range(20)]
better_then_worse = [3 - 0.1 * i for i in range(10)] + worse[:10]
small, large, mended = train(5e-5, worse), train(0.01, worse), train(5e-5, worse, min_lr=0.0)
ratchet = train(5e-5, better_then_worse)
for name, seen in (("5e-5", small), ("0.01", large), ("5e-5 and min_lr=0.0", mended)):
    print(f"from {name}, every evaluation worse than the one before: {seen[0]:.3g} ... {seen[-1]:.3g}")
print(f"from 5e-5, 10 better, then 10 worse: {ratchet[0]:.3g} ... {ratchet[9]:.3g} ... {ratchet[-1]:.3g}")
assert large[-1] < 0.5 * large[0] and mended[-1] < 0.5 * mended[0], "no longer holds: the controls"
assert small == [small[0]] * 20 and small[0] > 5e-5, "no longer holds: the rate falls"
assert ratchet[9] > 7e-5 and ratchet[-1] == ratchet[9], "no longer holds: the rate falls again"
PROGRAM
