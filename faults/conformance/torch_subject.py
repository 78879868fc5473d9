"""What the adapters over torch share: a tiny GPT-2, its rows, the journal of a model or a Trainer, a plain loop."""

import argparse
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback

from faults.conformance.subject import Journal, row_ids


def tiny_model(*, vocab_size: int = 128) -> GPT2LMHeadModel:
    """Return a model of 66,000 parameters with GPT-2's dropout, the same in every process."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=vocab_size, n_positions=64, n_embd=64, n_layer=1, n_head=2)
    return GPT2LMHeadModel(config)


def number_rows(num_rows: int) -> list[dict[str, list[int]]]:
    """Return rows for a causal model, each of which begins with its number."""
    return [{"input_ids": row_ids(row), "labels": row_ids(row)} for row in range(num_rows)]


def numbered(shards: list[list[int]]) -> Iterator[dict[str, list[int]]]:
    """Yield the rows of these numbers: a generator for streams, which deal the list out to their workers."""
    for shard in shards:
        for row in shard:
            yield {"input_ids": row_ids(row), "labels": row_ids(row)}


def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
    """Return the rows of equal length as a batch."""
    return {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}


def step_folders(folder: Path, name: str = "step_") -> list[Path]:
    """Return the checkpoints NAME_k in the order of their steps."""
    return sorted(folder.glob(f"{name}*"), key=lambda path: int(path.name.removeprefix(name)))


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


class PlainTraining:
    """What a plain loop keeps: model, AdamW, a schedule, torch's random state. A checkpoint is renamed when whole.

    It does all that PyTorch's page on checkpoints has, and the random state too: what is not exact is the loader's.
    https://docs.pytorch.org/tutorials/recipes/recipes/saving_and_loading_a_general_checkpoint.html
    """

    def __init__(self, given: argparse.Namespace):
        self.given = given
        self.model = tiny_model()
        self.batches = Batches(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.schedule = warmup_and_decay(self.optimizer, given.steps)
        self.step = 0
        self.random_state: torch.Tensor | None = None  # of the checkpoint, until an iterator has been made

    def batches_of(self, loader: Iterable) -> Iterator:
        """Return an iterator; the first one after load() leaves the random state as the checkpoint has it."""
        rows = iter(loader)  # a DataLoader draws a seed for its workers here, from torch's global generator
        if self.random_state is not None:
            torch.set_rng_state(self.random_state)
            self.random_state = None
        return rows

    def make_step(self, batch: dict[str, torch.Tensor], journal: Journal) -> bool:
        """Make a step; return whether its checkpoint is due."""
        self.model(**batch)["loss"].backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.step += 1
        journal.step(self.step, *self.batches.take())
        return self.step % self.given.save_every == 0

    def save(self, **more: Any) -> None:
        path = self.given.folder / f"step_{self.step}"
        state = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "schedule")}
        torch.save({**state, "random": torch.get_rng_state(), "step": self.step, **more}, f"{path}.part")
        os.rename(f"{path}.part", path)

    def load(self) -> dict | None:
        """Load the newest checkpoint; return it, or None when there is none."""
        paths = [path for path in self.given.folder.glob("step_*") if path.suffix != ".part"]
        if not paths:
            return None
        state = torch.load(max(paths, key=lambda path: int(path.name.removeprefix("step_"))), weights_only=False)
        for name in ("model", "optimizer", "schedule"):
            getattr(self, name).load_state_dict(state[name])
        self.random_state = state["random"]
        self.step = state["step"]
        return state


def warmup_and_decay(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a rate that rises for 5 steps and falls to zero at the last."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 5, (steps - step) / steps))
