"""train/bpb and train/assistant_bpb, against logits and bytes that are counted here, on the rows and weights of each step."""

import math

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoTokenizer

from pipeline.model.load import load_model

SEEN = """
import os
from pathlib import Path

import torch
from transformers import TrainerCallback


class Seen(TrainerCallback):
    '''Keeps what the model is given in each step, and its weights then.'''

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.batches = []
        model.register_forward_pre_hook(self.look, with_kwargs=True)

    def look(self, model, args, kwargs):
        if model.training:
            names = ("input_ids", "position_ids", "shift_labels")
            self.batches.append({name: kwargs[name].clone() for name in names if name in kwargs})

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self.weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def on_step_end(self, args, state, control, **kwargs):
        kept = {"weights": self.weights, "batches": self.batches}
        torch.save(kept, f"{os.environ['SEEN']}-{state.global_step}-{os.environ.get('RANK', 0)}.pt")
        self.batches.clear()
"""
LLAMA = {"model": {"type": "llama", "n_layer": 2, "n_embd": 32, "n_head": 2}, "optimizer": {"type": "adamw"}}


def expected(run, steps, *, ranks):
    """Bits per byte of those steps together."""
    tokenizer = AutoTokenizer.from_pretrained(run.directory / "model")
    model = load_model(run.directory / "model").eval()
    nats, num_bytes = 0.0, 0
    for step in steps:
        for rank in range(ranks):
            kept = torch.load(run.directory.parent / f"seen-{step}-{rank}.pt")
            model.load_state_dict(kept["weights"])
            for batch in kept["batches"]:
                labels = batch.pop("shift_labels").flatten()
                with torch.no_grad():
                    logits = model(**batch, use_cache=False).logits.flatten(0, 1)
                each = F.cross_entropy(logits.double(), labels, reduction="none", ignore_index=-100)
                for target, its_nats in zip(labels.tolist(), each.tolist(), strict=True):
                    if target != -100 and target not in tokenizer.all_special_ids:
                        nats += its_nats
                        num_bytes += len(tokenizer.convert_ids_to_tokens(target))  # byte-level: a character is a byte
    return nats / (math.log(2) * num_bytes)


@pytest.mark.full_except("pretrain-modern-2-more0")
@pytest.mark.parametrize(
    ("stage", "model", "ranks", "more"),
    [
        ("pretrain", "modern", 2, []),
        ("pretrain", "llama", 2, []),
        ("pretrain", "gpt2", 1, ["train.torch_compile=true", "train.torch_compile_backend=aot_eager"]),
        ("pretrain", "llama", 1, ["train.torch_compile=true", "train.torch_compile_backend=aot_eager"]),
        ("sft", "gpt2", 2, []),
        ("sft", "llama", 1, []),
    ],
)
def test_interval_bits_per_byte_use_the_weights_of_each_step(runner, stage, model, ranks, more):
    (runner.folder / "seen.py").write_text(SEEN)
    make = runner.recipe if stage == "pretrain" else runner.sft_recipe
    train = {"max_steps": 5, "per_device_train_batch_size": 2, "logging_steps": 2, "eval_steps": 5, "seed": 7}
    recipe = make(
        "text", "modern" if model == "modern" else "gpt2", train=train, **(LLAMA if model == "llama" else {})
    )
    watched = ["train.bf16=false", "run.callbacks=[seen:Seen]", *more]
    seen = str(runner.folder / "runs" / "seen")
    run = runner.train(recipe, *watched, stage=stage, ranks=ranks, SEEN=seen)
    found = run.values("train/bpb" if stage == "pretrain" else "train/assistant_bpb")
    assert set(found) == {1, 2, 4, 5}
    assert found[1] == pytest.approx(expected(run, [1], ranks=ranks), rel=1e-5)
    assert found[4] == pytest.approx(expected(run, [3, 4], ranks=ranks), rel=1e-5)
