"""Meters of a training step: its loss, time, tokens, FLOPs, memory, and the norms of its update."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from pipeline.hardware.device import model_replicas
from pipeline.hardware.processor import process_start
from pipeline.metrics import Numbers
from pipeline.monitor.heartbeat import beat
from pipeline.recipe.sizes import Sizes
from pipeline.training.norms import count_zeros, group_by_placement, local, norm_over_ranks
from pipeline.training.optimizer import MuonAdamW

GIB = 2**30


class DeviceMemory:
    """Memory by PyTorch's allocator and the driver, at the moments of logging; nothing where the device is not CUDA.

    run_peak: bytes allocated at most, over all attempts; start_peak: in this process. cuda: torch.cuda, or a test's.
    """

    def __init__(self, device: torch.device, *, cuda: Any = torch.cuda):
        self.device, self.cuda = device, cuda
        self.run_peak = self.start_peak = 0

    def read(self) -> Numbers:
        """Return mem/* of this rank; the interval of peak_allocated begins again."""
        if self.device.type != "cuda":
            return {}
        stats = self.cuda.memory_stats(self.device)
        free, total = self.cuda.mem_get_info(self.device)
        peak = stats["allocated_bytes.all.peak"]
        self.cuda.reset_peak_memory_stats(self.device)
        self.start_peak = max(self.start_peak, peak)
        self.run_peak = max(self.run_peak, peak)
        return {
            "mem/allocated_gib": stats["allocated_bytes.all.current"] / GIB,
            "mem/reserved_gib": stats["reserved_bytes.all.current"] / GIB,
            "mem/peak_allocated_gib": peak / GIB,
            "mem/run_peak_allocated_gib": self.run_peak / GIB,
            "mem/device_used_gib": (total - free) / GIB,
            "mem/alloc_retries": stats["num_alloc_retries"],
            "mem/ooms": stats["num_ooms"],
        }

    def peak(self) -> int:
        """Return bytes allocated at most in this process since its first reading, whatever was read meanwhile."""
        return max(self.start_peak, self.cuda.max_memory_allocated(self.device))


class UpdateNumbers:
    """Zeros in the gradient, norms of the update and of the parameters: `record` before the update of a step that will
    be logged, `read` after it."""

    def __init__(self) -> None:
        self._zeros: Tensor | None = None  # of the parts of sharded weights, and of what every rank has whole
        # A parameter, and the norm of its change and that of some like it.
        self._norms: list[tuple[Tensor, Tensor]] = []

    def record(self, parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> None:
        """Record the parameters with a gradient, before anything scales it or clips it to zero."""
        gradients = group_by_placement([p.grad for p in parameters if p.grad is not None])
        zeros = []
        for of_one_placement in gradients:
            zeros.append(count_zeros([local(gradient) for gradient in of_one_placement]))
        self._zeros, self._norms = torch.stack(zeros), []
        # The update's norm is measured while it is made, by our own optimizer.
        ours = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper
        if isinstance(ours, MuonAdamW):
            ours.measure_next_update(self._norms)

    def read(self, parameters: Sequence[Tensor]) -> Numbers:
        """Return optim/param_norm, optim/num_zeros_in_grad and optim/update_ratio; nothing without `record`, and no
        ratio where the update was skipped or the optimizer is another's."""
        if self._zeros is None:
            return {}
        param_norm = norm_over_ranks([(p, local(p.detach())) for p in parameters])
        if any(isinstance(p, DTensor) for p in parameters):  # then the first number is of this rank's parts
            torch.distributed.all_reduce(self._zeros[:1])
            self._zeros[:1] //= model_replicas()
        numbers = {"optim/param_norm": param_norm, "optim/num_zeros_in_grad": self._zeros.sum()}
        if self._norms:
            numbers["optim/update_ratio"] = norm_over_ranks(self._norms) / param_norm
        self._zeros, self._norms = None, []
        return {name: number.item() for name, number in numbers.items()}


class LossSum:
    """This rank's loss of each step since the last log, on the device: nothing waits for it. kept: steps that are not
    skipped."""

    def __init__(self, device: torch.device):
        self.device = device
        self.load([])

    def begin(self) -> None:
        """Begin a step."""
        self.steps.append(torch.zeros((), device=self.device))
        self.kept += 1

    def add(self, loss: Tensor) -> None:
        """Add the loss of a micro-step."""
        self.steps[-1] += loss

    def undo(self) -> None:
        """Take out the step that was made: its loss is not finite, and averages would stay so for ever."""
        self.steps[-1].fill_(math.nan)
        self.kept -= 1

    def read(self, *, gather: Callable[[Tensor], Tensor] = torch.atleast_1d) -> list[float | None]:
        """Return each step's loss, None of a skipped one: this rank's, or the mean of all whose losses
        `gather` gives."""
        if not self.steps:
            return []
        means = gather(torch.stack(self.steps)).view(-1, len(self.steps)).mean(0)
        return [loss if math.isfinite(loss) else None for loss in means.tolist()]

    def load(self, losses: Sequence[float | None]) -> None:
        self.kept = sum(loss is not None for loss in losses)
        self.steps = [torch.full((), math.nan if loss is None else loss, device=self.device) for loss in losses]


class RankStepTimer:
    """Seconds from asking for a step's rows to the end of this rank's last backward pass, before it waits for the
    others.

    Gradients are exchanged while the backward pass runs, and DDP waits for the exchange in a callback at its end: a
    callback that was queued before the pass began comes before DDP's. On CUDA the two moments are events on the
    stream, read when a step is logged; nothing waits for them. One rank measures nothing.
    """

    def __init__(self, device: torch.device, *, world_size: int):
        self.device, self.world_size = device, world_size
        self.waits = False  # whether this rank's share of the backward pass is done and it waits for the others
        self._begun: Any = None
        self._ended: Any = None
        self._steps: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        """Note that a step's rows are about to be requested."""
        beat()
        self._close()
        if self.world_size > 1:
            self._begun, self._ended = self._now(), None

    def before_backward(self, loss: torch.Tensor) -> None:
        """Watch the backward pass of a micro-batch; the end of the last one counts."""
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
        """Return seconds a step of this rank, mean of those since the last reading; NaN where nothing was measured."""
        self._close()
        if not self._steps:
            return math.nan
        mean_s = fmean(self._between(begun, end) for begun, end in self._steps)
        self._steps = []
        return mean_s

    @staticmethod
    def _between(begun: Any, end: Any) -> float:
        if isinstance(end, float):
            return end - begun
        end.synchronize()  # passed long ago, but for the last step's
        return begun.elapsed_time(end) / 1000  # from ms


def slowest(seconds: list[float]) -> Numbers:
    """Return the slowest rank and its time as a multiple of the others' mean. seconds: of each rank, at least two."""
    rank = seconds.index(max(seconds))
    others = (sum(seconds) - seconds[rank]) / (len(seconds) - 1)
    return {"perf/slowest_rank": seconds[rank] / max(others, 1e-9), "perf/slowest_rank_id": rank}


class StepMeter:
    """Counts the seconds spent in steps; `pause` excludes what is not a step.

    sizes: of the model, None where they are not known; peaks: FLOP/s of one device for the compute dtype and for bf16,
    or None where the device is unknown. What follows from either is left out, never guessed. FLOPs are those of the
    keys that were seen: rows whose documents are isolated have fewer pairs than their length says. tokens_at: row
    positions of the first so many steps.
    """

    EMA = 0.9

    def __init__(
        self,
        *,
        tokens_at: Callable[[int], int],
        max_steps: int,
        world_size: int,
        sizes: Sizes | None = None,
        peak: float | None = None,
        bf16_peak: float | None = None,
    ):
        self.tokens_at, self.max_steps, self.world_size = tokens_at, max_steps, world_size
        self.sizes, self.peak, self.bf16_peak = sizes, peak, bf16_peak
        # Keys by the layers' windows, of this rank's isolated rows since the last reading.
        self._keys: dict[int, int] = {}
        self._positions = 0
        if sizes:
            self._keys = {min(window, sizes.row_tokens): 0 for window in sizes.windows}
        self.total_s = 0.0  # of steps, over all attempts
        self.targets = 0  # trained on so far, over all ranks and attempts
        self.loss_ema, self.num_losses = 0.0, 0
        self._paused_s = self._waited_s = 0.0
        self._started: float | None = None
        self._paused_at: float | None = None
        self._steps_since = 0  # the last reading
        self._first = True
        self._first_step_s: float | None = None
        self._carried_s = 0.0  # of the interval that was open at the checkpoint
        self._timed_tokens, self._timed_s = 0, 0.0  # of all intervals but the first, for the forecast

    def begin(self) -> None:
        """Begin a step. What came before the first one, as loading a checkpoint, is no time of steps."""
        if self._started is None:
            self._started, self._paused_s = time.perf_counter(), 0.0
        elif self._first_step_s is None:
            self._first_step_s = _since_process_start()

    @contextmanager
    def pause(self) -> Iterator[None]:
        self._paused_at = started = time.perf_counter()
        try:
            yield
        finally:
            self._paused_s += time.perf_counter() - started
            self._paused_at = None

    def count(self, batch: dict[str, Any]) -> None:
        """Count the visible pairs of a micro-batch that still is on the host. A query sees itself and
        the tokens before it in its document, within the window."""
        positions_BT = batch.get("position_ids")
        if positions_BT is None:
            return
        self._positions += positions_BT.numel()
        for window in self._keys:
            self._keys[window] += int((positions_BT + 1).clamp(max=window).sum())

    def step(self, targets: int) -> None:
        """Note that an optimizer step on that many targets is about to be made."""
        self._steps_since += 1
        self.targets += targets

    def read(self, *, step: int, losses: Sequence[float], wait_s: float) -> dict[str, Any]:
        """Return numbers of the interval since the last reading, which ends after `step` steps in all. losses: of its
        steps."""
        # 1. The interval: its seconds without pauses, its steps and tokens. The next one begins now.
        elapsed = max(self._elapsed(), 1e-9)
        steps = max(self._steps_since, 1)
        tokens = self.tokens_at(step) - self.tokens_at(step - steps)
        waited, self._waited_s = wait_s - self._waited_s, wait_s
        self.total_s += elapsed
        is_first, self._first = self._first, False
        if not is_first:
            # The first interval holds compilation and cold caches: it counts as time, not in the forecast.
            self._timed_tokens += tokens
            self._timed_s += elapsed
        self._started, self._paused_s, self._carried_s, self._steps_since = time.perf_counter(), 0.0, 0.0, 0

        # 2. The smoothed loss. The mean begins at 0, so its first values are divided by the weight that they have.
        for loss in losses:
            self.loss_ema = self.EMA * self.loss_ema + (1 - self.EMA) * loss
        self.num_losses += len(losses)

        # 3. Speed, and what is left at the speed of all intervals but the first.
        step_s = elapsed / steps
        tokens_per_s = tokens / steps / step_s
        per_gpu = tokens_per_s / self.world_size
        numbers = {
            "train/loss_ema": self.loss_ema / (1 - self.EMA**self.num_losses),
            "perf/step_s": step_s,
            "perf/tok_per_s": tokens_per_s,
            "perf/tok_per_s_per_gpu": per_gpu,
            "perf/total_s": self.total_s,
            "data/wait_s": waited / steps,
        }
        if self._timed_tokens or step >= self.max_steps:  # a forecast from compilation would be off by hours
            left = self.tokens_at(self.max_steps) - self.tokens_at(step)
            numbers["perf/eta_s"] = left * self._timed_s / max(self._timed_tokens, 1)
        if is_first:
            numbers["perf/first_step_s"] = self._first_step_s or _since_process_start()

        # 4. FLOP/s = FLOPs of a token x tokens/s, and their share of what the device can do.
        exact = self._exact_flops()
        if exact:
            numbers["perf/tflops_per_gpu"] = exact * tokens_per_s / self.world_size / 1e12
        if exact and self.peak:
            numbers["perf/mfu_pct"] = 100 * exact * tokens_per_s / self.world_size / self.peak
        nanochat = self.sizes and self.sizes.flops_per_token("nanochat")  # its count, against the peak in bf16
        if nanochat and self.bf16_peak:
            numbers["perf/bf16_mfu_pct"] = 100 * nanochat * tokens_per_s / self.world_size / self.bf16_peak
        return numbers

    def _exact_flops(self) -> float | None:
        """Return the exact FLOPs of a row position of the interval."""
        positions, keys = self._positions, self._keys
        self._keys, self._positions = dict.fromkeys(keys, 0), 0
        if self.sizes is None:
            return None
        if not positions:  # rows whose documents see each other
            return self.sizes.flops_per_token("exact_causal")

        def keys_per_query(window: int, row_tokens: int) -> float:
            return keys[min(window, row_tokens)] / positions

        return self.sizes.flops_per_token("exact_causal", seen=keys_per_query)

    def _elapsed(self) -> float:
        """Return seconds of steps since the last reading."""
        if self._started is None:
            return self._carried_s
        now = time.perf_counter() if self._paused_at is None else self._paused_at  # a pause is no time of steps
        return self._carried_s + now - self._started - self._paused_s

    def state_dict(self) -> Numbers:
        """Return the state. open_s, open_steps: of the interval since the last reading."""
        return {
            "total_s": self.total_s,
            "open_s": self._elapsed(),
            "open_steps": self._steps_since,
            "loss_ema": self.loss_ema,
            "logged": self.num_losses,  # earlier versions averaged logged values: the name is theirs
            "targets": self.targets,
        }

    def load_state_dict(self, state: Numbers) -> None:
        self.total_s, self.loss_ema = state["total_s"], state["loss_ema"]
        self.num_losses = int(state["logged"])
        self.targets = int(state["targets"])
        self._carried_s, self._steps_since = state.get("open_s", 0.0), int(state.get("open_steps", 0))


def _since_process_start() -> float:
    return time.time() - process_start()
