"""Spikes: every step is looked at, whenever it is logged."""

import math

import pytest
import torch

from pipeline.metrics import ENOUGH
from pipeline.process.errors import DivergedError
from pipeline.recipe.schema import Monitor
from pipeline.run_dir.rows import read_rows
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.training.guard import StepGuard


def test_a_step_that_the_loss_scaler_skipped_is_no_spike_and_leaves_the_usual_values_as_they_are(tmp_path):
    guard = StepGuard(RunDirectory(tmp_path), Monitor(on_spike="stop"))
    for norm in [1.0] * ENOUGH + [float("inf"), float("nan")] * ENOUGH:
        guard.norms.append(norm if math.isfinite(norm) else None)
    guard.report_spikes(3 * ENOUGH, {"optim/grad_norm": guard.norms})
    with pytest.raises(
        DivergedError, match=r"optim/grad_norm is 2, usually 1.1 at most; monitor.on_spike is stop"
    ) as raised:
        guard.report_spikes(61, {"optim/grad_norm": [2.0]})
    assert raised.value.facts == {
        "step": 61,
        "name": "optim/grad_norm",
        "value": 2.0,
        "highest_usual": pytest.approx(1.1),
        "usual": 1.0,
    }


def test_only_high_norms_and_losses_are_printed(tmp_path, capsys):
    guard = StepGuard(RunDirectory(tmp_path), Monitor())
    for name, values in {"optim/grad_norm": [1.0] * ENOUGH + [1.5, 2.5], "train/loss": [2.0] * ENOUGH + [2.5]}.items():
        guard.report_spikes(len(values), {name: values})
    printed = capsys.readouterr().out
    assert [word in printed for word in ("grad_norm is 1.5", "grad_norm is 2.5", "loss is 2.5")] == [False, True, True]
    assert len(read_rows(guard.run.metrics)) == 3


def spiking_series():
    noise = torch.rand(200, generator=torch.Generator().manual_seed(0)).tolist()
    norms = [0.3 + 0.02 * n for n in noise]
    losses = [2.0 + 0.05 * n for n in noise]
    for step, height in {30: 2.3, 47: 1.9, 48: 5.0, 101: 2.0, 160: 0.9}.items():
        norms[step - 1] = height
    losses[12 - 1], losses[90 - 1] = 3.5, 4.0
    return norms, losses


@pytest.mark.parametrize("every", [1, 7, 20])
def test_the_same_steps_spike_whatever_logging_steps_is(tmp_path, every):
    guard = StepGuard(RunDirectory(tmp_path), Monitor())
    norms, losses = spiking_series()
    for end in [*range(every, 200, every), 200]:
        begin = (end - 1) // every * every
        logged = {"optim/grad_norm": norms[begin:end], "train/loss": losses[begin:end]}
        guard.report_spikes(end, logged)
    found = [(row["name"], row["step"], row["value"]) for row in read_rows(guard.run.metrics)]
    assert sorted(found) == [
        ("optim/grad_norm", 30, 2.3),
        ("optim/grad_norm", 47, 1.9),
        ("optim/grad_norm", 48, 5.0),
        ("optim/grad_norm", 101, 2.0),
        ("optim/grad_norm", 160, 0.9),
        ("train/loss", 12, 3.5),  # one of the first, far above those on both sides
        ("train/loss", 90, 4.0),
    ]


def test_the_largest_and_the_median_norm_of_an_interval_are_logged(tmp_path):
    guard = StepGuard(RunDirectory(tmp_path), Monitor())
    guard.norms = [0.3, 2.26, None, 0.2, 0.4]
    numbers = guard.read(max_norm=1.0)
    assert numbers["optim/grad_norm"] == 2.26
    assert numbers["optim/grad_norm_median"] == pytest.approx(0.35)
    assert "optim/grad_norm" not in guard.read(max_norm=1.0)
    guard.norms = [None]  # a step that the fp16 loss scaler skipped
    assert "optim/grad_norm" not in guard.read(max_norm=1.0)
