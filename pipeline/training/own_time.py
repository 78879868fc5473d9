"""How long each rank itself takes for a step: without it a slow rank makes all of them look equally slow."""

import math
import time
from typing import Any

import torch

from pipeline.monitor.heartbeat import beat


class OwnTime:
    """Seconds from asking for a step's rows to the end of this rank's last backward pass, before it waits for the others.

    Gradients are exchanged while the backward pass runs, and DDP waits for the exchange in a callback at its end: a
    callback that was queued before the pass began comes before DDP's. On CUDA the two moments are events on the stream,
    read when a step is logged; nothing waits for them. One rank measures nothing.
    """

    def __init__(self, device: torch.device, *, world_size: int):
        self.device, self.world_size = device, world_size
        self.waits = False  # whether this rank's share of the backward pass is done and it waits for the others
        self._begun: Any = None
        self._ended: Any = None
        self._steps: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        """A step's rows are about to be asked for."""
        beat()
        self._close()
        if self.world_size > 1:
            self._begun, self._ended = self._now(), None

    def before_backward(self, loss: torch.Tensor) -> None:
        """Of every micro-batch; the last one's end counts."""
        beat()
        self.waits = False
        if self.world_size > 1:
            loss.register_hook(self._queue)

    def _queue(self, gradient: torch.Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self._mark)  # type: ignore[attr-defined]

    def _mark(self) -> None:
        self._ended, self.waits = self._now(), True

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _close(self) -> None:
        self.waits = False
        if self._begun is not None and self._ended is not None:
            self._steps.append((self._begun, self._ended))
        self._begun = None

    def read(self) -> float:
        """Seconds a step of this rank, mean of those since the last reading; NaN where nothing was measured."""
        self._close()
        if not self._steps:
            return math.nan
        seconds = [end - begun if isinstance(end, float) else self._between(begun, end) for begun, end in self._steps]
        self._steps = []
        return sum(seconds) / len(seconds)

    @staticmethod
    def _between(begun: Any, end: Any) -> float:
        end.synchronize()  # passed long ago, but for the last step's
        return begun.elapsed_time(end) / 1000


def slowest(seconds: list[float]) -> dict[str, float]:
    """The slowest rank and its time as a multiple of the others' mean. seconds: of each rank, at least two."""
    rank = max(range(len(seconds)), key=seconds.__getitem__)
    others = (sum(seconds) - seconds[rank]) / (len(seconds) - 1)
    return {"perf/slowest_rank": seconds[rank] / max(others, 1e-9), "perf/slowest_rank_id": rank}
