"""Checks of a step: skipped steps are counted and too many taken for divergence; spikes are found however a run is logged."""

import math
import types

import pytest
import torch

from pipeline.metrics import ENOUGH
from pipeline.process.errors import DivergedError
from pipeline.recipe.schema import Monitor
from pipeline.run_dir.rows import read_rows
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.training.checkpoint import unlogged_losses
from pipeline.training.guard import AMONG_STEPS, MAX_SCALER_SKIPS, StepGuard
from pipeline.training.meters import LossSum
from pipeline.training.nonfinite import RowOrigins, find_nonfinite

INFINITE = torch.tensor(torch.inf)


class Steps:
    """Steps as far as the guard checks them; whole ones under fp16 need a GPU."""

    def __init__(self, folder):
        self.run, self.step, self.scaler_is_used = RunDirectory(folder), 7, True
        self.guard, self.loss_sum = StepGuard(self.run, Monitor()), LossSum(torch.device("cpu"))
        self.loss_sum.load([2.5])  # of step 6
        self.rows = types.SimpleNamespace(origins=lambda step: [("books", 3, 0, step)], micro_rows=lambda step, n: n)

    def make(self, *, loss, norm):
        """Check a step whose micro-batch has that loss, as the Trainer does."""
        losses = [torch.tensor(loss)]
        self.loss_sum.begin()
        self.loss_sum.add(losses[0])
        origins = RowOrigins(self.rows, self.run, micro_batch=1, batch_ranks=1)

        def find_cause(value):
            parts = {"origins": origins, "gradients": iter([]), "one_gradient": False}
            return find_nonfinite({}, step=self.step, norm=value, losses=losses, **parts)

        found = self.guard.check_update(
            norm,
            step=self.step,
            losses=losses,
            scaler_is_used=self.scaler_is_used,
            find_cause=find_cause,
            find_rows=lambda: origins.of_step(self.step),
        )
        if not found.loss_is_finite:
            self.loss_sum.undo()
        return found


@pytest.fixture
def steps(tmp_path):
    return Steps(tmp_path)


def test_twenty_skipped_steps_in_a_row_end_the_run_naming_the_rows(steps):
    assert MAX_SCALER_SKIPS == 20
    for _ in range(19):
        assert math.isinf(steps.make(loss=1.0, norm=INFINITE).norm)
    with pytest.raises(
        DivergedError,
        match=r"step 7: the loss is inf on rank 0 in micro-step 0 \(rows: books file 3 row group 0 row 7\).*20 steps in a row",
    ):
        steps.make(loss=torch.inf, norm=INFINITE)
    assert steps.guard.skipped_steps == 20


def test_a_finite_step_between_starts_the_count_again(steps):
    for _ in range(3):
        for _ in range(19):
            steps.make(loss=1.0, norm=torch.tensor(torch.nan))
        steps.make(loss=1.0, norm=torch.tensor(1.0))
    assert (steps.guard.skipped_steps, steps.guard.scaler_skips_in_a_row) == (57, 0)


def test_of_skipped_steps_only_finite_losses_count_in_the_mean(steps):
    steps.make(loss=torch.inf, norm=INFINITE)
    assert (steps.loss_sum.read(), steps.loss_sum.kept) == ([2.5, None], 1)
    steps.make(loss=1.5, norm=INFINITE)
    assert (steps.loss_sum.read(), steps.loss_sum.kept) == ([2.5, None, 1.5], 2)
    assert steps.loss_sum.read(gather=torch.atleast_1d) == [2.5, None, 1.5]  # the one left out is in no mean
    steps.loss_sum.load([])
    assert (steps.loss_sum.read(), steps.loss_sum.kept) == ([], 0)


def test_without_a_scaler_the_first_one_ends_the_run(steps):
    steps.scaler_is_used = False
    with pytest.raises(DivergedError, match=r"monitor\.on_nonfinite: skip"):
        steps.make(loss=torch.nan, norm=torch.tensor(torch.nan))


def test_steps_left_out_long_ago_no_longer_count(steps):
    steps.scaler_is_used = False
    steps.guard = StepGuard(steps.run, Monitor(on_nonfinite="skip", max_skips=2))
    for steps.step in (7, 8, 7 + AMONG_STEPS, 8 + AMONG_STEPS):
        found = steps.make(loss=torch.nan, norm=INFINITE)
        assert found.skip
    steps.step += 1
    with pytest.raises(DivergedError, match="after 2 skipped steps of the last 1000"):
        steps.make(loss=torch.nan, norm=INFINITE)
    assert steps.guard.skipped_steps == 4


def test_losses_kept_unlogged_are_each_ranks_own_or_their_means():
    saved = {"losses": [[2.0, None, 1.0], [4.0, None, 2.0]]}
    assert unlogged_losses(saved, step=3, rank=1, ranks=2) == [4.0, None, 2.0]
    assert unlogged_losses(saved, step=3, rank=0, ranks=1) == [3.0, None, 1.5]
    earlier = {"losses": [6.0, 8.0], "since": 1}  # sums of two steps
    assert unlogged_losses(earlier, step=3, rank=1, ranks=2) == [4.0, 4.0]
    assert unlogged_losses(earlier, step=3, rank=0, ranks=1) == [3.5, 3.5]


def test_a_step_that_the_loss_scaler_skipped_is_not_a_spike(tmp_path):
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
