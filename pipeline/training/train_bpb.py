"""Bits per byte of the text that is trained on, from numbers that a step makes anyway."""

import math
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from pipeline.data.rows import IGNORED
from pipeline.metrics import Numbers


class TrainBpbMeter:
    """Nats and bytes of this rank's trained targets since the last log, of text alone: as val/bpb counts them.

    The loss is a sum over all targets, BOS and control tokens among them. Their nats are taken off again: by the
    model's own nats per target, or by the logits of these few positions. Where they are is found before a batch leaves
    the host, so that nothing waits for the device. byte_lengths_V: (V,) raw bytes per id, 0 for specials; None where
    ids have no fixed bytes: then, and for a model that shows neither nats nor logits, there is no number.
    """

    def __init__(self, byte_lengths_V: np.ndarray | None, device: torch.device):
        self.byte_lengths_V = byte_lengths_V
        self.nats = torch.zeros((), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
        self.bytes = 0
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self._before = self.nats.clone(), self.bytes

    def undo(self) -> None:
        """Forget the step that was made: its loss is not finite."""
        self.nats, self.bytes = self._before[0].clone(), self._before[1]

    def count(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Count the bytes of a micro-batch that is about to be trained on; gives where its special targets are."""
        if self.byte_lengths_V is None:
            return {}
        labels_N = batch["shift_labels"].numpy().ravel()
        is_target_N = labels_N != IGNORED
        lengths_N = np.where(is_target_N, self.byte_lengths_V[labels_N.clip(min=0)], 0)
        self.bytes += int(lengths_N.sum())
        return {"special_targets": torch.from_numpy(np.flatnonzero(is_target_N & (lengths_N == 0)))}

    @torch.no_grad()
    def add(self, loss: torch.Tensor, outputs: Any, labels_BT: torch.Tensor, special: torch.Tensor) -> None:
        """Add a micro-batch. loss: the nats of all its targets. special: as count() found them."""
        if getattr(outputs, "nats", None) is not None:
            of_special = outputs.nats.flatten()[special].sum()
        elif getattr(outputs, "logits", None) is not None:
            logits = outputs.logits.flatten(0, 1)[special].float()
            of_special = F.cross_entropy(logits, labels_BT.flatten()[special], reduction="sum")
        else:
            self.byte_lengths_V = None
            return
        self.nats += loss.to(self.nats.dtype) - of_special

    def read(self) -> Numbers:
        """Return this rank's sums since the last reading, for bits_per_byte."""
        if self.byte_lengths_V is None:
            return {}
        numbers = self.state()
        self.load([])
        return numbers

    def state(self) -> Numbers:
        return {"nats": self.nats.item(), "bytes": self.bytes}

    def load(self, states: list[Numbers]) -> None:
        """Take over these sums, which other ranks may have made: only the sum over all ranks counts."""
        self.nats.fill_(sum(state["nats"] for state in states))
        self.bytes = int(sum(state["bytes"] for state in states))
        self.begin()


def bits_per_byte(ranks: list[Numbers]) -> float | None:
    """Return the figure over all ranks, from what each of them has read; None where no byte was trained on."""
    num_bytes = sum(rank.get("bytes", 0) for rank in ranks)
    if not num_bytes:
        return None
    return sum(rank["nats"] for rank in ranks) / (math.log(2) * num_bytes)  # a bit is log(2) nats
