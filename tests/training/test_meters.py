"""Meters of a training step: rates, losses, memory, norms of the update."""

import inspect
import math
import time
from dataclasses import replace

import psutil
import pytest
import torch

from pipeline.recipe.sizes import arithmetic_sizes
from pipeline.training import optimizer as optimizers
from pipeline.training.meters import GIB, DeviceMemory, LossSum, StepMeter, UpdateNumbers
from pipeline.training.norms import count_zeros
from pipeline.training.optimizer import MuonAdamW, in_portions


def meter_of(*, max_steps):
    return StepMeter(tokens_at=lambda step: step, max_steps=max_steps, world_size=1)


def test_the_first_row_tells_when_the_process_ended_its_first_step():
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


def test_flops_of_isolated_rows_count_pairs_only_within_a_conversation():
    rows, window = 8, 3
    options = {"n_layer": 2, "n_embd": 4, "n_head": 2, "vocab_size": 5, "n_positions": rows}
    sizes = replace(arithmetic_sizes(options, "tandem", rows), windows=[rows, window])
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


class Allocator:
    """torch.cuda's memory functions as its documentation describes them, over one device of 80 GiB."""

    def __init__(self):
        self.allocated = self.peak = self.reserved = self.retries = self.ooms = 0

    def hold(self, gib):
        self.allocated = gib * GIB
        self.peak = max(self.peak, self.allocated)
        self.reserved = max(self.reserved, self.allocated)

    def memory_stats(self, device):
        return {
            "allocated_bytes.all.current": self.allocated,
            "allocated_bytes.all.peak": self.peak,
            "reserved_bytes.all.current": self.reserved,
            "num_alloc_retries": self.retries,
            "num_ooms": self.ooms,
        }

    def mem_get_info(self, device):
        return 80 * GIB - self.reserved - GIB, 80 * GIB  # the driver also sees the context

    def max_memory_allocated(self, device):
        return self.peak

    def reset_peak_memory_stats(self, device):
        self.peak = self.allocated


def test_the_peak_of_an_interval_begins_again_unlike_that_of_the_run():
    cuda = Allocator()
    memory = DeviceMemory(torch.device("cuda"), cuda=cuda)
    for gib in (40, 64, 43):
        cuda.hold(gib)
    first = memory.read()
    cuda.hold(50)
    cuda.hold(43)
    cuda.retries = 2
    second = memory.read()
    assert (first["mem/allocated_gib"], first["mem/reserved_gib"], first["mem/device_used_gib"]) == (43, 64, 65)
    assert (first["mem/peak_allocated_gib"], first["mem/run_peak_allocated_gib"]) == (64, 64)
    assert (second["mem/peak_allocated_gib"], second["mem/run_peak_allocated_gib"]) == (50, 64)
    assert (second["mem/alloc_retries"], second["mem/ooms"]) == (2, 0)
    assert memory.peak() == 64 * GIB


def test_the_peak_of_an_earlier_attempt_counts_only_in_the_run():
    cuda = Allocator()
    memory = DeviceMemory(torch.device("cuda"), cuda=cuda)
    memory.run_peak = 70 * GIB
    cuda.hold(64)
    assert memory.read()["mem/run_peak_allocated_gib"] == 70
    assert memory.peak() == 64 * GIB


def test_the_stand_in_has_the_keys_of_this_version_of_torch():
    # Without a GPU torch gives an empty dict; the names are in its own summary, which reads the same one.
    summary = inspect.getsource(torch.cuda.memory_summary)
    for name in ("allocated_bytes", "reserved_bytes", "num_alloc_retries", "num_ooms"):
        assert name in summary


def test_without_cuda_there_is_nothing():
    assert DeviceMemory(torch.device("cpu")).read() == {}


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
def test_the_update_ratio_is_that_of_a_copy_and_measuring_changes_nothing(monkeypatch, at_once):
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
