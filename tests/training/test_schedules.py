"""Rates, momentum and decay by hand, and that they need nothing but the step."""

import math
from itertools import pairwise

import pytest
import torch

from pipeline.recipe.schema import Schedule
from pipeline.training.optimizer import MuonAdamW
from pipeline.training.schedules import (
    StepSchedule,
    apply_schedule,
    learning_rate_multiplier,
    muon_momentum,
    weight_decay_multiplier,
)

NANOCHAT = Schedule()  # 40 steps up, the last 65 % down to 0.05, momentum 400 steps up, decay half a cosine


def lrm(step, max_steps=1000, **options):
    return learning_rate_multiplier(Schedule(**options), step, max_steps)


def optimizer():
    muon = {"kind": "muon", "name": "matrices", "outputs_first": True, "product_dtype": "float32"}
    muon |= {"lr": 0.02, "initial_lr": 0.02, "momentum": 0.97, "peak_momentum": 0.97}
    muon |= {"weight_decay": 0.28, "initial_weight_decay": 0.28}
    adamw = {"kind": "adamw", "name": "head", "lr": 0.008, "initial_lr": 0.008, "weight_decay": 0.01}
    adamw |= {"betas": (0.8, 0.96), "eps": 1e-10}
    weights = [torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    return MuonAdamW([{"params": [weights[0]], **muon}, {"params": [weights[1]], **adamw}])


def settings(optimizer):
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


@pytest.mark.parametrize(
    ("step", "value"), [(0, 1 / 40), (1, 2 / 40), (39, 1), (40, 1), (349, 1), (350, 1), (675, 0.525), (1000, 0.05)]
)
def test_the_rate_warms_up_holds_and_falls(step, value):
    assert lrm(step) == pytest.approx(value, abs=1e-12)


def test_the_last_depth_24_step_has_the_published_rate_multiplier():
    assert f"{learning_rate_multiplier(NANOCHAT, 5567, 5568):.2f}" == "0.05"
    assert learning_rate_multiplier(NANOCHAT, 5567, 5568) == pytest.approx(0.05 + 0.95 / 3619)


def test_the_first_update_of_a_warm_up_has_a_rate_above_zero():
    assert lrm(0, warmup_steps=10) == 0.1
    assert lrm(0, warmup_steps=0) == 1


@pytest.mark.parametrize(
    ("decay", "quarter", "half"),
    [
        ("linear", 0.75, 0.5),
        ("cosine", 0.5 + math.sqrt(0.5) / 2, 0.5),
        ("1-sqrt", 0.5, 1 - math.sqrt(0.5)),
    ],
)
def test_each_fall_has_its_shape_and_ends_at_final_fraction(decay, quarter, half):
    options = {"decay": decay, "decay_fraction": 0.4, "final_fraction": 0.0, "warmup_steps": 0}
    assert lrm(600, **options) == 1
    assert lrm(700, **options) == pytest.approx(quarter)
    assert lrm(800, **options) == pytest.approx(half)
    assert lrm(1000, **options) == pytest.approx(0, abs=1e-12)
    assert lrm(800, **options | {"final_fraction": 0.2}) == pytest.approx(0.2 + 0.8 * half)


def test_without_a_fall_the_rate_stays():
    assert lrm(999, decay_fraction=0.0) == 1
    assert lrm(1000, decay_fraction=0.0) == 1


def test_where_warm_up_and_fall_overlap_the_rate_never_jumps():
    values = [lrm(step, max_steps=50) for step in range(51)]  # 40 steps up, 32 steps down
    assert max(values) < 1
    assert max(abs(a - b) for a, b in pairwise(values)) < 1 / 30
    assert values[0] == 1 / 40
    assert values[50] == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("step", "value"), [(0, 0.85), (200, 0.91), (400, 0.97), (1000, 0.97), (1400, 0.97), (2700, 0.935), (4000, 0.90)]
)
def test_momentum_rises_to_its_peak_and_falls_with_the_rates(step, value):
    assert muon_momentum(NANOCHAT, step, 4000, peak=0.97) == pytest.approx(value)


def test_momentum_never_passes_a_peak_below_its_usual_ends():
    values = {muon_momentum(NANOCHAT, step, 1000, peak=0.8) for step in range(1001)}
    assert max(values) == pytest.approx(0.8)
    assert min(values) == pytest.approx(0.8)


def test_muon_s_decay_falls_as_half_a_cosine_or_stays():
    assert [weight_decay_multiplier(NANOCHAT, step, 100) for step in (0, 50, 100)] == pytest.approx([1, 0.5, 0])
    assert weight_decay_multiplier(NANOCHAT, 25, 100) == pytest.approx(0.5 * (1 + math.sqrt(0.5)))
    assert weight_decay_multiplier(Schedule(weight_decay="constant"), 99, 100) == 1


def test_the_schedule_reaches_every_group_and_adamw_keeps_its_decay():
    groups = optimizer()
    apply_schedule(groups, NANOCHAT, 675, 1000)
    muon, head = groups.param_groups
    assert muon["lr"] == pytest.approx(0.02 * 0.525)
    assert head["lr"] == pytest.approx(0.008 * 0.525)
    assert muon["momentum"] == pytest.approx(0.935)
    assert muon["weight_decay"] == pytest.approx(0.28 * 0.5 * (1 + math.cos(math.pi * 0.675)))
    assert head["weight_decay"] == 0.01


def test_smaller_batches_at_the_beginning_have_the_rates_of_their_root():
    small = {"batch_warmup_steps": 30, "batch_halvings": 2, "warmup_steps": 0}
    assert [lrm(step, **small) for step in (0, 14, 15, 29, 30)] == pytest.approx([0.5, 0.5, 0.5**0.5, 0.5**0.5, 1])
    assert lrm(4, **small | {"warmup_steps": 10}) == pytest.approx(0.25)
    assert lrm(700, **small) == lrm(700, warmup_steps=0)


def test_applying_a_step_gives_the_same_settings_whatever_was_applied_before():
    walked, jumped = optimizer(), optimizer()
    for step in range(701):
        apply_schedule(walked, NANOCHAT, step, 1000)
    apply_schedule(jumped, NANOCHAT, 999, 1000)
    apply_schedule(jumped, NANOCHAT, 700, 1000)
    assert settings(walked) == settings(jumped)


def test_a_step_schedule_resumed_from_its_saved_state_keeps_its_rates():
    whole, cut = optimizer(), optimizer()
    uncut = StepSchedule(whole, NANOCHAT, 100)
    assert uncut.get_last_lr() == [0.02 / 40, 0.008 / 40]
    for _ in range(37):
        uncut.step()
    resumed = StepSchedule(cut, NANOCHAT, 100)
    resumed.load_state_dict(uncut.state_dict())
    assert settings(whole) == settings(cut)
    assert resumed.get_last_lr() == uncut.get_last_lr()
    uncut.step()
    resumed.step()
    assert settings(whole) == settings(cut)
    assert uncut.multiplier(37) == learning_rate_multiplier(NANOCHAT, 37, 100)
