"""Micro-batches for the Trainer's loop, starting at any step without reading what came before."""

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pipeline.monitor.heartbeat import beat

if TYPE_CHECKING:
    import torch


class StepLoader:
    """Iterates this rank's micro-batches of the steps start_step .. max_steps - 1, on the device.

    The Trainer asks for all micro-batches of a step at once, ahead of what the device works on: on CUDA they are
    copied from pinned memory on a stream of their own meanwhile.

    Its length is that of the whole run, because the Trainer derives its epochs from it: the run is one epoch. It is
    not a torch DataLoader: rows are read from memory maps in microseconds, and a DataLoader draws from the training's
    random state when it starts, which would make a resumed run differ.

    look: gives more tensors for a batch, found while it still is on the host.
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
        device: "torch.device",
        look: "Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]" = lambda batch: {},
    ):
        import torch

        self.rows, self.look = rows, look
        self.start_step, self.max_steps, self.micro_steps = start_step, max_steps, micro_steps
        self.micro_batch, self.rank, self.world_size = micro_batch, rank, world_size
        self.device = device
        self.copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.wait_s = 0.0

    def __len__(self) -> int:
        return self.max_steps * self.micro_steps

    def __iter__(self) -> "Iterator[dict[str, torch.Tensor]]":
        for step in range(self.start_step, self.max_steps):
            rows = self.rows.micro_rows(step, self.micro_batch)
            for micro_step in range(self.micro_steps):
                started = time.perf_counter()
                batch = self.rows.micro_batch(step, micro_step, rank=self.rank, world_size=self.world_size, rows=rows)
                batch |= self.look(batch)
                if self.device.type != "cpu":
                    batch = on_device(batch, self.device, stream=self.copies)
                self.wait_s += time.perf_counter() - started
                beat()
                yield batch


def on_device(
    batch: "dict[str, torch.Tensor]", device: "torch.device", *, stream: "torch.cuda.Stream | None" = None
) -> "dict[str, torch.Tensor]":
    """Return the batch on the device; a tensor under two names (labels, shift_labels) is copied once and stays one.

    stream: of the copies, on CUDA; the current stream then waits for them, and the host for nothing.
    """
    import torch

    once = {id(tensor): tensor for tensor in batch.values()}
    if stream is None:
        moved = {key: tensor.to(device) for key, tensor in once.items()}
    else:
        current = torch.cuda.current_stream(device)
        with torch.cuda.stream(stream):
            # Pinned memory is not used again before its copy is done: its allocator notes the stream.
            moved = {key: tensor.pin_memory().to(device, non_blocking=True) for key, tensor in once.items()}
        current.wait_stream(stream)
        for tensor in moved.values():
            tensor.record_stream(current)  # it was allocated on the other one, which may not take it back too early
    return {name: moved[id(tensor)] for name, tensor in batch.items()}
