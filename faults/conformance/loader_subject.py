"""What the adapters of data loaders share: a plain torch training around a loader that has a state."""

from typing import Any

import torch
import torch._dynamo  # the first optimizer imports it, for seconds: here once for all starts
from torch import distributed, nn

from faults.conformance.subject import Journal, row_ids

VOCABULARY = 128
WARMUP_STEPS = 5


class LoaderTraining:
    """A training whose own part of a resume is exact, so that what differs is the loader's.

    Model, optimizer, schedule and the loader's state lie in one file that is replaced as a whole. The dropout of a step
    is drawn from the step's number: torch's loaders draw a number from the global state with every pass.
    """

    def __init__(self, given):
        self.given = given
        if given.ranks > 1:
            distributed.init_process_group("gloo")
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Embedding(VOCABULARY, 64), nn.Dropout(0.1), nn.Linear(64, VOCABULARY))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._rate)
        self.step = 0
        self.loader_state: Any = None
        self.file = given.folder / "checkpoint.pt"
        if self.file.exists():
            saved = torch.load(self.file, weights_only=False)
            self.step = saved["step"]
            self.model.load_state_dict(saved["model"])
            self.schedule.load_state_dict(saved["schedule"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.loader_state = saved["loader"]
        self.journal = Journal(given.folder)

    def _rate(self, step: int) -> float:
        if step < WARMUP_STEPS:
            return (step + 1) / WARMUP_STEPS
        return 1 - step / (self.given.steps + 1)

    def train(self, loader: Any, *, state_of: Any = None, set_epoch: Any = None) -> None:
        """Make passes over the loader until all steps are made.

        state_of: returns the loader's state, its state_dict if not given. set_epoch: is called before each pass with
        the epoch, from 0; after a resume with that of the last step. Raises RuntimeError when two passes give no batch.
        """
        state_of = state_of or loader.state_dict
        epoch = max(self.step - 1, 0) * self.given.batch // self.given.rows
        self.journal.start(self.step)
        num_empty = 0
        while self.step < self.given.steps:
            if set_epoch is not None:
                set_epoch(epoch)
            epoch += 1
            before = self.step
            for batch in loader:
                self.update(batch)
                if self.step % self.given.save_every == 0:
                    self.save(state_of())
                if self.step == self.given.steps:
                    break
            num_empty = num_empty + 1 if self.step == before else 0
            if num_empty == 2:
                raise RuntimeError(f"two passes over the loader gave no batch after step {self.step}")
        self.journal.end(self.step, self.model)

    def update(self, batch: Any) -> None:
        """Make one step with a batch: ids, or a dict with "ids"; (B, T)."""
        ids_BT = torch.as_tensor(batch["ids"] if isinstance(batch, dict) else batch).long()
        torch.manual_seed(1000 * self.step + self.given.rank)
        logits_BTV = self.model(ids_BT[:, :-1])
        loss = nn.functional.cross_entropy(logits_BTV.flatten(0, 1), ids_BT[:, 1:].flatten())
        loss.backward()
        if self.given.ranks > 1:
            for parameter in self.model.parameters():
                distributed.all_reduce(parameter.grad)
                parameter.grad /= self.given.ranks
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.journal.step(self.step, ids_BT[:, 0].tolist(), loss.item())

    def save(self, loader_state: Any) -> None:
        """Write the checkpoint of this step, with rank 0's state of the loader."""
        if self.given.rank == 0:
            saved = {
                "step": self.step,
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "schedule": self.schedule.state_dict(),
                "loader": loader_state,
            }
            unfinished = self.file.with_suffix(".unfinished")
            torch.save(saved, unfinished)
            unfinished.replace(self.file)
        wait_for_all(self.given)


def row_tensor(row: int) -> torch.Tensor:
    """Return the ids of a row, (T,). Here, so that the processes of a library can import it."""
    return torch.tensor(row_ids(row))


def wait_for_all(given) -> None:
    """Wait until every rank is here."""
    if given.ranks > 1:
        distributed.barrier()
