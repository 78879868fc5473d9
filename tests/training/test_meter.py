"""Times of steps, and of the start."""

import math
import time

import psutil
import pytest
import torch

from pipeline.recipe.sizes import Sizes
from pipeline.training.meters import LossSum, StepMeter


def meter_of(*, max_steps):
    return StepMeter(tokens_at=lambda step: step, max_steps=max_steps, world_size=1)


def test_the_first_row_of_a_start_tells_how_long_the_process_took_to_the_end_of_its_first_step():
    meter = meter_of(max_steps=10)
    meter.begin()
    meter.step(1)
    meter.begin()  # of the second step: the first one has ended
    ended = time.time() - psutil.Process().create_time()
    time.sleep(0.05)
    meter.step(1)
    first = meter.read(step=2, losses=[1.0], wait_s=0.0)
    assert first["perf/first_step_s"] == pytest.approx(ended, abs=0.03)
    meter.begin()
    meter.step(1)
    assert "perf/first_step_s" not in meter.read(step=3, losses=[1.0], wait_s=0.0)


def test_the_forecast_begins_after_the_first_interval_and_leaves_it_out():
    meter = meter_of(max_steps=12)
    meter.begin()
    meter.step(1)
    time.sleep(0.5)  # compilation
    assert "perf/eta_s" not in meter.read(step=1, losses=[1.0], wait_s=0.0)
    meter.begin()
    meter.step(1)
    time.sleep(0.01)
    row = meter.read(step=2, losses=[1.0], wait_s=0.0)
    assert row["perf/eta_s"] == pytest.approx(10 * row["perf/step_s"])
    assert row["perf/total_s"] > 0.5  # which is honest


def test_flops_of_isolated_rows_count_each_pair_of_one_conversation_and_none_across():
    rows, window = 8, 3
    sizes = Sizes(
        n_layer=2, n_embd=4, n_head=2, n_kv_head=2, head_dim=2, n_inner=8, vocab_size=5, vocab_rows=5, row_tokens=rows, windows=[rows, window]
    )  # fmt: skip
    meter = StepMeter(tokens_at=lambda step: 16 * step, max_steps=9, world_size=1, sizes=sizes)
    lengths = [[3, 5], [8]]
    positions_BT = torch.tensor([[at for length in row for at in range(length)] for row in lengths])
    for number, (batch, conversations) in enumerate(
        [({"position_ids": positions_BT}, lengths), ({"position_ids": positions_BT[1:]}, lengths[1:]), ({}, [[8]])], 1
    ):
        meter.begin()
        meter.count(batch)
        meter.step(1)
        numbers = meter.read(step=number, losses=[1.0], wait_s=0.0)
        # Each query sees itself and what is before it in its conversation, as far as the layer's window goes.
        pairs = [
            sum(min(at + 1, seen) for row in conversations for length in row for at in range(length))
            for seen in (rows, window)
        ]
        wanted = 6 * sizes.scaling + 12 * 2 * 2 * sum(pairs) / (rows * len(conversations))
        assert numbers["perf/tflops_per_gpu"] * 1e12 / numbers["perf/tok_per_s"] == pytest.approx(wanted)
    assert wanted == sizes.flops_per_token("exact_causal")


def test_the_smoothed_loss_is_the_same_whatever_logging_steps_is():
    losses = [3 / (step + 1) + 0.1 * math.sin(step) for step in range(280)]
    figures = []
    for every in (1, 7, 20):
        loss_sum, meter = LossSum(torch.device("cpu")), meter_of(max_steps=280)
        by_step = {}
        for step, loss in enumerate(losses, 1):
            loss_sum.begin()
            loss_sum.add(torch.tensor(loss))
            if step % every == 0:
                row = meter.read(step=step, losses=loss_sum.read(), wait_s=0.0)
                loss_sum.load([])
                by_step[step] = row["train/loss_ema"]
        figures.append((by_step[140], by_step[280]))
    assert figures[0] == figures[1] == figures[2]
    weights = [0.9**ago for ago in range(280)]
    exact = sum(w * loss for w, loss in zip(weights, reversed(losses), strict=True)) / sum(weights)
    assert figures[0][1] == pytest.approx(exact, rel=1e-6)
