"""optimizer.ema_nesterov: EMA-Nesterov around both update rules against its formula, its state in checkpoints, its place in a run."""

import pytest
import torch

from pipeline.recipe.schema import Schedule
from pipeline.training.checkpoint import load_optimizer_state, optimizer_tensors
from pipeline.training.schedules import apply_schedule, learning_rate_multiplier
from tests.training.test_average import Two, optimizer_of

STEPS, SCHEDULE = 10, Schedule(warmup_steps=2, momentum_warmup_steps=0)
AHEAD = {"lookahead": 0.0, "lookahead_average": 0.8, "peak_lookahead": 0.6, "lookahead_span": [0.2, 0.8]}  # fmt: skip


def ahead_of(model):
    optimizer = optimizer_of(model)
    for group in optimizer.param_groups:
        group |= {"initial_lr": group["lr"], "peak_momentum": 0.9, "initial_weight_decay": 0.0, **AHEAD}
    return optimizer


def gradient(step, weights):
    """One that depends on where it is taken."""
    return torch.randn(weights.shape, generator=torch.Generator().manual_seed(step)) + 0.3 * weights.detach()


def train(model, optimizer, steps, left_out=()):
    for step in steps:
        apply_schedule(optimizer, SCHEDULE, step, STEPS)
        for p in model.parameters():
            has_one = (p is model.matrix or step > 2) and step not in left_out
            p.grad = gradient(step, p) if has_one else None
        optimizer.step()


@pytest.mark.parametrize("left_out", [(), (1, 4, 7)])  # by the guard: around the span's begin and end, too
def test_steps_are_those_of_the_formula_around_the_rule_alone(left_out):
    model, rule = Two(), Two()
    optimizer, alone = ahead_of(model), optimizer_of(rule)
    for group in alone.param_groups:
        group |= {"initial_lr": group["lr"], "peak_momentum": 0.9, "initial_weight_decay": 0.0}
    x = {name: p.detach().clone() for name, p in rule.named_parameters()}
    m, ahead = {name: torch.zeros_like(p) for name, p in x.items()}, 0.0
    for step in range(STEPS):
        apply_schedule(alone, SCHEDULE, step, STEPS)
        for name, p in rule.named_parameters():
            p.data = x[name] + ahead * m[name]
            p.grad = gradient(step, p) if (name == "matrix" or step > 2) and step not in left_out else None
        train(model, optimizer, [step], left_out)
        alone.step()
        if step not in left_out:
            ahead = 0.6 * learning_rate_multiplier(SCHEDULE, step + 1, STEPS) if 2 <= step + 1 < 8 else 0.0
        for name, p in rule.named_parameters():
            if p.grad is not None:
                m[name] = 0.8 * m[name] + 0.2 * (p.detach() - x[name])
                x[name] = p.detach().clone()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), x[name], rtol=0, atol=1e-5)  # behind the span: x, not ahead of it
    plain = Two()
    train(plain, optimizer_with_schedule(plain), range(STEPS))
    assert (plain.matrix - model.matrix).abs().max() > 0.01


def optimizer_with_schedule(model):
    optimizer = optimizer_of(model)
    for group in optimizer.param_groups:
        group |= {"initial_lr": group["lr"], "peak_momentum": 0.9, "initial_weight_decay": 0.0}
    return optimizer


@pytest.mark.parametrize("at", [1, 5])
def test_it_goes_on_bitwise_from_a_checkpoint(at):
    uncut, cut, resumed = Two(), Two(), Two()
    train(uncut, ahead_of(uncut), range(STEPS))
    train(cut, optimizer := ahead_of(cut), range(at))
    tensors = {name: value.clone() for name, value in optimizer_tensors(optimizer, cut).items()}
    assert "matrix/drift" in tensors
    resumed.load_state_dict(cut.state_dict())
    load_optimizer_state(optimizer := ahead_of(resumed), resumed, tensors)
    train(resumed, optimizer, range(at, STEPS))
    assert torch.equal(resumed.matrix, uncut.matrix)
    assert torch.equal(resumed.late, uncut.late)


def test_a_fork_with_another_span_takes_the_drift_from_the_weights_of_the_rule():
    model = Two()
    train(model, optimizer := ahead_of(model), range(5))
    y, state = model.matrix.detach().clone(), optimizer.state[model.matrix]
    m, x = state["drift"].clone(), y - state["lookahead"] * state["drift"]
    assert (y - x).abs().max() > 0.01
    tensors = optimizer_tensors(optimizer, model)
    forked = ahead_of(model)
    for group in forked.param_groups:
        group["lookahead_span"] = [0.9, 1.0]
    load_optimizer_state(forked, model, tensors)
    train(model, forked, [5])
    drift = 0.8 * m + 0.2 * (model.matrix.detach() - x)
    torch.testing.assert_close(forked.state[model.matrix]["drift"], drift, rtol=0, atol=1e-6)


def test_where_it_looks_not_ahead_every_weight_is_bitwise_that_of_the_rule():
    model, rule = Two(), Two()
    optimizer = ahead_of(model)
    for group in optimizer.param_groups:
        group |= {"lookahead_span": [1.0, 1.0], "update_floor": 1e-9, "row_floor": 1e-9}  # floors that hold nothing
    train(model, optimizer, range(STEPS))
    train(rule, optimizer_with_schedule(rule), range(STEPS))
    assert torch.equal(model.matrix, rule.matrix)
    assert torch.equal(model.late, rule.late)


def test_without_it_no_state_is_added():
    model = Two()
    optimizer = optimizer_with_schedule(model)
    train(model, optimizer, range(4))
    assert set(optimizer.state[model.matrix]) == {"momentum", "variance"}
