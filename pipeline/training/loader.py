"""Micro-batches for the Trainer's loop, starting at any step without reading what came before."""

import time
from collections.abc import Iterator
from typing import Any

import torch

from pipeline.monitor.heartbeat import beat


class StepLoader:
    """Iterates this rank's micro-batches of the steps start_step .. max_steps - 1.

    Its length is that of the whole run, because the Trainer derives its epochs from it: the run is one epoch. It is not a
    torch DataLoader: rows are read from memory maps in microseconds, and a DataLoader draws from the training's random
    state when it starts, which would make a resumed run differ.
    """

    def __init__(
        self,
        rows: Any,
        *,
        start_step: int,
        max_steps: int,
        micro_steps: int,
        micro_batch: int,
        rank: int,
        world_size: int,
        pin_memory: bool,
    ):
        self.rows = rows
        self.start_step, self.max_steps, self.micro_steps = start_step, max_steps, micro_steps
        self.micro_batch, self.rank, self.world_size, self.pin_memory = micro_batch, rank, world_size, pin_memory
        self.wait_s = 0.0

    def __len__(self) -> int:
        return self.max_steps * self.micro_steps

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for step in range(self.start_step, self.max_steps):
            for micro_step in range(self.micro_steps):
                started = time.perf_counter()
                batch = self.rows.micro_batch(
                    step, micro_step, rank=self.rank, world_size=self.world_size, rows=self.micro_batch
                )
                if self.pin_memory:
                    batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
                self.wait_s += time.perf_counter() - started
                beat()
                yield batch
