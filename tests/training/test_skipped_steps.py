"""Steps that the fp16 loss scaler or the recipe leaves out: counted, and too many taken for divergence."""

import math
import types

import pytest
import torch

from pipeline.process.errors import DivergedError
from pipeline.recipe.schema import Monitor
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.training.checkpoint import TrainedText, unlogged_losses
from pipeline.training.guard import AMONG_STEPS, MAX_SCALER_SKIPS, StepGuard
from pipeline.training.metrics import LossSum

INFINITE = torch.tensor(torch.inf)


@pytest.fixture
def trainer(tmp_path):
    """A trainer at step 7 as far as its gradient norm goes; a whole one under fp16 needs a GPU."""
    trainer = types.SimpleNamespace()
    trainer.run = RunDirectory(tmp_path)
    trainer.model = torch.nn.Linear(2, 1, bias=False)
    trainer.model.weight.grad = torch.full((1, 2), torch.inf)
    trainer.state = types.SimpleNamespace(global_step=7, is_world_process_zero=True)
    trainer.is_world_process_zero = lambda: True
    trainer.args = types.SimpleNamespace(world_size=1, per_device_train_batch_size=1)
    trainer.batch_rank, trainer.batch_ranks = 0, 1
    trainer.rows = types.SimpleNamespace(origins=lambda step: [("books", 3, 0, step)], micro_rows=lambda step, n: n)
    trainer.accelerator = types.SimpleNamespace(scaler=torch.amp.GradScaler("cpu"), distributed_type="NO")
    trainer.loss_sum = LossSum(torch.device("cpu"))
    trainer.loss_sum.load([2.5])  # of step 6
    trainer.guard, trainer.text = StepGuard(trainer.run, Monitor()), TrainedText(None, torch.device("cpu"))
    return trainer


def step(trainer, *, loss, norm):
    """A step whose micro-batch has that loss."""
    trainer.guard.begin()
    trainer.loss_sum.begin()
    trainer.guard.losses.append(torch.tensor(loss))
    trainer.loss_sum.add(torch.tensor(loss))
    return trainer.guard.check_update(trainer, trainer.model, norm)


def test_twenty_steps_in_a_row_that_the_scaler_skips_end_the_run_and_name_the_loss_and_its_rows(trainer):
    assert MAX_SCALER_SKIPS == 20
    for _ in range(19):
        assert math.isinf(step(trainer, loss=1.0, norm=INFINITE))
    with pytest.raises(
        DivergedError,
        match=r"step 7: the loss is inf on rank 0 in micro-step 0 \(rows: books file 3 row group 0 row 7\).*20 steps in a row",
    ):
        step(trainer, loss=torch.inf, norm=INFINITE)
    assert trainer.guard.skipped_steps == 20


def test_a_finite_step_between_starts_the_count_again(trainer):
    for _ in range(3):
        for _ in range(19):
            step(trainer, loss=1.0, norm=torch.tensor(torch.nan))
        step(trainer, loss=1.0, norm=torch.tensor(1.0))
    assert (trainer.guard.skipped_steps, trainer.guard.scaler_skips_in_a_row) == (57, 0)


def test_an_infinite_loss_of_a_step_that_the_scaler_skips_is_in_no_mean_and_a_finite_one_is(trainer):
    step(trainer, loss=torch.inf, norm=INFINITE)
    assert (trainer.loss_sum.read(), trainer.loss_sum.kept) == ([2.5, None], 1)
    step(trainer, loss=1.5, norm=INFINITE)
    assert (trainer.loss_sum.read(), trainer.loss_sum.kept) == ([2.5, None, 1.5], 2)
    assert trainer.loss_sum.read(gather=torch.atleast_1d) == [2.5, None, 1.5]  # the one left out is in no mean
    trainer.loss_sum.load([])
    assert (trainer.loss_sum.read(), trainer.loss_sum.kept) == ([], 0)


def test_without_a_scaler_the_first_one_ends_the_run(trainer):
    trainer.accelerator.scaler = None
    with pytest.raises(DivergedError, match=r"monitor\.on_nonfinite: skip"):
        step(trainer, loss=torch.nan, norm=torch.tensor(torch.nan))


def test_steps_left_out_long_ago_no_longer_count(trainer):
    trainer.accelerator.scaler = None
    trainer.guard = StepGuard(trainer.run, Monitor(on_nonfinite="skip", max_skips=2))
    for trainer.state.global_step in (7, 8, 7 + AMONG_STEPS, 8 + AMONG_STEPS):
        step(trainer, loss=torch.nan, norm=INFINITE)
    assert trainer.model.weight.grad is None
    trainer.state.global_step += 1
    with pytest.raises(DivergedError, match="after 2 steps left out of the last 1000"):
        step(trainer, loss=torch.nan, norm=INFINITE)
    assert trainer.guard.skipped_steps == 4


def test_losses_that_a_checkpoint_kept_unlogged_go_on_also_of_an_earlier_version():
    saved = {"losses": [[2.0, None, 1.0], [4.0, None, 2.0]]}
    assert unlogged_losses(saved, step=9, rank=1, ranks=2) == [4.0, None, 2.0]
    assert unlogged_losses(saved, step=9, rank=0, ranks=1) == [3.0, None, 1.5]
    earlier = {"since": 6, "losses": [9.0, 12.0]}  # sums of the steps 7 to 9
    assert unlogged_losses(earlier, step=9, rank=1, ranks=2) == [4.0, 4.0, 4.0]
    assert unlogged_losses(earlier, step=9, rank=2, ranks=3) == [3.5, 3.5, 3.5]
    assert unlogged_losses({"since": 9, "losses": [0.0]}, step=9, rank=0, ranks=1) == []
