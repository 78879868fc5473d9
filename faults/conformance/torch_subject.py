"""What the adapters over torch share: a tiny GPT-2, and journals that hang on a model or on transformers' Trainer."""

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback

from faults.conformance.subject import Journal


def tiny_model(*, vocab_size: int = 128) -> GPT2LMHeadModel:
    """Return a model of 66,000 parameters with GPT-2's dropout, the same in every process."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=vocab_size, n_positions=64, n_embd=64, n_layer=1, n_head=2)
    return GPT2LMHeadModel(config)


class Batches:
    """The rows and losses of a model's training steps, as it is given them."""

    def __init__(self, model: torch.nn.Module, *, of_batch: Any = None):
        self.rows: list = []
        self.losses: list[float] = []
        self.of_batch = of_batch or first_ids
        model.register_forward_hook(self._note, with_kwargs=True)

    def _note(self, model, positional, named, output) -> None:
        if model.training:
            self.rows += self.of_batch(named)
            self.losses.append(float(output["loss"].detach()))

    def take(self) -> tuple[list, float | None]:
        """Return rows and mean loss since the last call."""
        rows, losses = self.rows, self.losses
        self.rows, self.losses = [], []
        return rows, sum(losses) / len(losses) if losses else None


def first_ids(batch: dict) -> list[int]:
    """Return each row's number, its first id."""
    return batch["input_ids"][:, 0].tolist()


class TrainerJournal(TrainerCallback):
    """Keeps the journal of a Trainer: a step as it ends, before its checkpoint is written."""

    def __init__(self, trainer: Trainer, journal: Journal, *, of_batch: Any = None):
        self.journal = journal
        self.batches = Batches(trainer.model, of_batch=of_batch)
        trainer.add_callback(self)

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.journal.start(state.global_step)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        rows, loss = self.batches.take()
        self.journal.step(state.global_step, rows, loss)

    def on_train_end(self, args, state, control, model=None, **kwargs) -> None:
        self.journal.end(state.global_step, model)
