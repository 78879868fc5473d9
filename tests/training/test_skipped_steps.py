"""Steps that the fp16 loss scaler skips: counted, and after 20 in a row taken for divergence."""

import types

import pytest
import torch

from pipeline.artifacts.errors import DivergedError
from pipeline.training.trainer import MAX_SKIPPED_STEPS, TandemTrainer


@pytest.fixture
def trainer():
    """A trainer at step 7 as far as its gradient norm goes; a whole one under fp16 needs a GPU."""
    trainer = TandemTrainer.__new__(TandemTrainer)
    trainer.skipped_in_a_row = trainer.skipped_steps = 0
    trainer.model = torch.nn.Linear(2, 1, bias=False)
    trainer.model.weight.grad = torch.full((1, 2), torch.inf)
    trainer.state = types.SimpleNamespace(global_step=7)
    trainer.rows = types.SimpleNamespace(origins=lambda step: [("books", "a.jsonl", 0, step)])
    trainer.accelerator = types.SimpleNamespace(scaler=torch.amp.GradScaler("cpu"), distributed_type="NO")
    return trainer


def test_twenty_skipped_steps_in_a_row_end_the_run_and_name_tensor_and_rows(trainer):
    assert MAX_SKIPPED_STEPS == 20
    infinite = torch.tensor(torch.inf)
    for _ in range(19):
        assert trainer._get_grad_norm(trainer.model, infinite).isinf()
    with pytest.raises(DivergedError, match=r"step 7: .*\(first in weight; rows: books file a.jsonl row group 0 row 7"):
        trainer._get_grad_norm(trainer.model, infinite)
    assert trainer.skipped_steps == 20


def test_a_finite_step_between_starts_the_count_again(trainer):
    for _ in range(3):
        for _ in range(19):
            trainer._get_grad_norm(trainer.model, torch.tensor(torch.nan))
        trainer._get_grad_norm(trainer.model, torch.tensor(1.0))
    assert (trainer.skipped_steps, trainer.skipped_in_a_row) == (57, 0)


def test_without_a_scaler_the_first_one_ends_the_run(trainer):
    trainer.accelerator.scaler = None
    with pytest.raises(DivergedError):
        trainer._get_grad_norm(trainer.model, torch.tensor(torch.nan))
