"""Norms of the update and of the parameters, and zeros in the gradient: against what a copy of everything says."""

import pytest
import torch

from pipeline.training import optimizer as optimizers
from pipeline.training.meters import UpdateNumbers
from pipeline.training.norms import count_zeros
from pipeline.training.optimizer import MuonAdamW, in_portions


def optimizer_of(parameters):
    matrices = [p for p in parameters if p.ndim == 2][1:]
    others = [p for p in parameters if not any(p is m for m in matrices)]
    muon = {"kind": "muon", "lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "outputs_first": True}
    adamw = {"kind": "adamw", "lr": 0.003, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
    groups = [
        {"name": "embeddings", "params": others, **adamw},
        {"name": "matrices", "params": matrices, "product_dtype": "float32", **muon},
    ]
    return MuonAdamW(groups)


def parameters_with_gradients(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(40, 16), (16, 16), (16, 16), (48, 16), (16,), (7,)]
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator)
    parameters[0].grad[10:30] = 0.0
    parameters[4].grad[:3] = -0.0
    return parameters


@pytest.mark.parametrize("at_once", [1, 100, 1 << 24])
def test_the_update_ratio_is_that_of_a_copy_and_measuring_changes_no_bit(monkeypatch, at_once):
    monkeypatch.setattr(optimizers, "MEASURED_AT_ONCE", at_once)
    measured, plain = parameters_with_gradients(), parameters_with_gradients()
    one, other = optimizer_of(measured), optimizer_of(plain)
    numbers = UpdateNumbers()
    for _ in range(3):
        before = [p.detach().clone() for p in measured]
        numbers.record(measured, one)
        one.step()
        other.step()
        row = numbers.read(measured)
        change = torch.cat([(p.detach() - b).flatten() for p, b in zip(measured, before, strict=True)])
        whole = torch.cat([p.detach().flatten() for p in measured])
        assert row["optim/param_norm"] == pytest.approx(whole.norm().item(), rel=1e-6)
        assert row["optim/update_ratio"] == pytest.approx((change.norm() / whole.norm()).item(), rel=1e-5)
        assert all(torch.equal(a, b) for a, b in zip(measured, plain, strict=True))
    one.step()
    assert "optim/update_ratio" not in numbers.read(measured)  # nothing was recorded


def test_only_the_step_that_was_asked_for_is_measured():
    parameters = parameters_with_gradients()
    optimizer, norms = optimizer_of(parameters), []
    optimizer.measure_next_update(norms)
    optimizer.step()
    measured = len(norms)
    optimizer.step()
    assert measured == len(norms) == 4  # three matrices, and the others at once


def test_zeros_of_the_gradient_are_counted_exactly():
    parameters = parameters_with_gradients()
    assert count_zeros([p.grad for p in parameters]).item() == 20 * 16 + 3
    # A count that float32 cannot hold.
    many = torch.zeros(1).expand(1 << 24)
    assert count_zeros([many, torch.zeros(1)]).item() == (1 << 24) + 1


def test_an_update_that_was_left_out_has_no_ratio():
    parameters = parameters_with_gradients()
    optimizer, numbers = optimizer_of(parameters), UpdateNumbers()
    numbers.record(parameters, optimizer)
    optimizer.zero_grad()  # as the guard leaves a step out
    optimizer.step()
    assert set(numbers.read(parameters)) == {"optim/param_norm", "optim/num_zeros_in_grad"}


def test_another_optimizer_has_no_ratio_and_the_other_two_numbers():
    parameters = parameters_with_gradients()
    optimizer, numbers = torch.optim.AdamW(parameters), UpdateNumbers()
    numbers.record(parameters, optimizer)
    optimizer.step()
    assert set(numbers.read(parameters)) == {"optim/param_norm", "optim/num_zeros_in_grad"}


def test_portions_hold_every_parameter_in_order_and_no_more_elements_than_asked():
    parameters = parameters_with_gradients()
    portions = list(in_portions(parameters, 300))
    assert [id(p) for some in portions for p in some] == [id(p) for p in parameters]
    assert all(len(some) == 1 or sum(p.numel() for p in some) <= 300 for some in portions)
    assert len(portions) < len(parameters)
