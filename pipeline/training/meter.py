"""Rates of a run: step time, tokens a second, MFU, time left; without evaluations and saves."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pipeline.hardware.cpu import process_start
from pipeline.recipe.sizes import KeysSeen


class StepMeter:
    """Counts the seconds spent in steps; `pause` excludes what is not a step.

    flops_per_token: {"exact_causal", "nanochat"}, None where the model's are not known; peaks: FLOP/s of one device for the
    compute dtype and for bf16, or None where the device is unknown. What follows from either is left out, never guessed.
    windows, isolated_flops: keys that the layers' queries see at most, and the exact FLOPs by the mean of those they saw
    (recipe/sizes.py): rows whose documents are isolated have fewer pairs than their length says.
    """

    EMA = 0.9

    def __init__(
        self,
        *,
        batch_tokens: int,
        max_steps: int,
        world_size: int,
        flops_per_token: dict[str, float | None],
        peak: float | None,
        bf16_peak: float | None,
        windows: Sequence[int] = (),
        isolated_flops: Callable[[KeysSeen], float | None] | None = None,
    ):
        self.batch_tokens, self.max_steps, self.world_size = batch_tokens, max_steps, world_size
        self.flops_per_token, self.peak, self.bf16_peak = flops_per_token, peak, bf16_peak
        self.isolated_flops = isolated_flops
        # Of this rank's isolated rows since the last reading.
        self._keys, self._positions = dict.fromkeys(windows, 0), 0
        self.total_s = 0.0
        self.targets = 0  # trained on so far, over all ranks and attempts
        self.loss_ema, self.logged = 0.0, 0
        self._paused_s = self._waited_s = 0.0
        self._started: float | None = None
        self._paused_at: float | None = None
        self._steps_since = 0
        self._first = True
        self._first_step_s: float | None = None
        self._carried_s = 0.0  # of the interval that was open at the checkpoint
        self._timed_steps, self._timed_s = 0, 0.0

    def begin(self) -> None:
        """A step is about to be made. What came before the first one, as loading a checkpoint, is no time of steps."""
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

    def look(self, batch: dict[str, Any]) -> None:
        """Count the visible pairs of a micro-batch that still is on the host. A query sees itself and what stands before it in
        its document, as far as the window goes."""
        if (positions_BT := batch.get("position_ids")) is not None:
            self._positions += positions_BT.numel()
            for window in self._keys:
                self._keys[window] += int((positions_BT + 1).clamp(max=window).sum())

    def step(self, targets: int) -> None:
        """One optimizer step is about to be made on that many targets."""
        self._steps_since += 1
        self.targets += targets

    def read(self, *, step: int, loss: float, wait_s: float) -> dict[str, Any]:
        """Numbers of the interval since the last reading, which ends after `step` steps in all."""
        elapsed = max(self._elapsed(), 1e-9)
        steps = max(self._steps_since, 1)
        waited, self._waited_s = wait_s - self._waited_s, wait_s
        self.total_s += elapsed
        if not self._first:
            # The first interval holds compilation and cold caches: it counts as time, not in the forecast.
            self._timed_steps, self._timed_s = self._timed_steps + steps, self._timed_s + elapsed
        starting = self._first
        self._first, self._carried_s = False, 0.0
        self._started, self._paused_s, self._steps_since = time.perf_counter(), 0.0, 0
        self.loss_ema = self.EMA * self.loss_ema + (1 - self.EMA) * loss
        self.logged += 1
        step_s = elapsed / steps
        tokens_per_s = self.batch_tokens / step_s
        numbers = {
            "train/loss_ema": self.loss_ema / (1 - self.EMA**self.logged),
            "perf/step_s": step_s,
            "perf/tok_per_s": tokens_per_s,
            "perf/tok_per_s_per_gpu": tokens_per_s / self.world_size,
            "perf/eta_s": (self.max_steps - step)
            * (self._timed_s / self._timed_steps if self._timed_steps else step_s),
            "perf/total_s": self.total_s,
            "data/wait_s": waited / steps,
        }
        if starting:
            numbers["perf/first_step_s"] = self._first_step_s or _since_process_start()
        exact, nanochat = self._exact_flops(), self.flops_per_token.get("nanochat")
        if exact:
            numbers["perf/tflops_per_gpu"] = exact * tokens_per_s / self.world_size / 1e12
        if exact and self.peak:
            numbers["perf/mfu_pct"] = 100 * exact * tokens_per_s / self.world_size / self.peak
        if nanochat and self.bf16_peak:
            numbers["perf/bf16_mfu_pct"] = 100 * nanochat * tokens_per_s / self.world_size / self.bf16_peak
        return numbers

    def _exact_flops(self) -> float | None:
        """Return the exact FLOPs of a row position of the interval."""
        positions, keys = self._positions, self._keys
        if not positions or self.isolated_flops is None:
            return self.flops_per_token.get("exact_causal")
        self._keys, self._positions = dict.fromkeys(keys, 0), 0
        return self.isolated_flops(lambda window, rows: keys[min(window, rows)] / positions)

    def _elapsed(self) -> float:
        """Seconds of steps since the last reading."""
        if self._started is None:
            return self._carried_s
        now = time.perf_counter() if self._paused_at is None else self._paused_at
        return self._carried_s + now - self._started - self._paused_s

    def state_dict(self) -> dict[str, float]:
        """open_s, open_steps: of the interval since the last reading."""
        return {
            "total_s": self.total_s,
            "open_s": self._elapsed(),
            "open_steps": self._steps_since,
            "loss_ema": self.loss_ema,
            "logged": self.logged,
            "targets": self.targets,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.total_s, self.loss_ema, self.logged = state["total_s"], state["loss_ema"], int(state["logged"])
        self.targets = int(state["targets"])
        self._carried_s, self._steps_since = state.get("open_s", 0.0), int(state.get("open_steps", 0))


def _since_process_start() -> float:
    return time.time() - process_start()
