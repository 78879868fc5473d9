"""optimizer.average_steps: the mixture of weights and moving average that a run ends with, and its state in checkpoints."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from pipeline.process.errors import RecipeError
from pipeline.training.checkpoint import load_optimizer_state, optimizer_tensors
from pipeline.training.optimizer import MuonAdamW, average_weights
from tests.runner import Runner

SETTINGS = SimpleNamespace(average_steps=4, average_weight=0.6)


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.matrix = torch.nn.Parameter(torch.randn(4, 3))
        self.late = torch.nn.Parameter(torch.randn(5))  # gets its first gradient at step 3, as an expert may


def optimizer_of(model):
    return MuonAdamW(
        [
            {"name": "m", "kind": "muon", "params": [model.matrix], "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0, "outputs_first": True, "product_dtype": "float32"},
            {"name": "a", "kind": "adamw", "params": [model.late], "lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0},
        ]
    )  # fmt: skip


def train(model, optimizer, *, steps, last, seen=None):
    for step in steps:
        torch.manual_seed(step)
        model.matrix.grad = torch.randn(4, 3)
        model.late.grad = torch.randn(5) if step > 3 else None
        optimizer.step()
        if seen is not None:
            seen.append(model.matrix.detach().clone())
        average_weights(optimizer, SETTINGS, last=step == last)


def test_the_finished_weights_are_partly_the_moving_average_of_all_steps():
    model, seen = Two(), []
    train(model, optimizer_of(model), steps=range(1, 9), last=8, seen=seen)
    average = seen[0]
    for weights in seen[1:]:
        average = average + (weights - average) / 4
    torch.testing.assert_close(model.matrix.detach(), 0.4 * seen[-1] + 0.6 * average)


def test_the_average_goes_on_bitwise_from_a_checkpoint():
    uncut = Two()
    train(uncut, optimizer_of(uncut), steps=range(1, 9), last=8)
    cut = Two()
    train(cut, optimizer := optimizer_of(cut), steps=range(1, 6), last=8)
    tensors = {name: value.clone() for name, value in optimizer_tensors(optimizer, cut).items()}
    assert {"matrix/average", "late/average"} <= tensors.keys()
    resumed = Two()
    resumed.load_state_dict(cut.state_dict())
    load_optimizer_state(optimizer := optimizer_of(resumed), resumed, tensors)
    train(resumed, optimizer, steps=range(6, 9), last=8)
    assert torch.equal(resumed.matrix, uncut.matrix)
    assert torch.equal(resumed.late, uncut.late)


def test_an_optimizer_without_state_is_refused():
    model = Two()
    with pytest.raises(RecipeError, match="keeps no state"):
        average_weights(torch.optim.SGD(model.parameters(), lr=0.1), SETTINGS, last=False)


def test_the_finished_model_is_mixed_once_and_is_the_last_checkpoint(tmp_path, text_files, chat_files):
    runner = Runner(tmp_path, tmp_path / "cache", text_files, chat_files)
    train = {"max_steps": 4, "save_steps": 4, "per_device_train_batch_size": 4}
    run = runner.train(runner.recipe("averaged", "gpt2", train=train), "optimizer.average_steps=3")
    folders = (run.directory / "checkpoints" / "checkpoint-4", run.directory / "model")
    checkpoint, finished = (load_file(folder / "model.safetensors") for folder in folders)
    assert all(checkpoint[name].equal(finished[name]) for name in checkpoint)
