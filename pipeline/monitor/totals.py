"""What a sampler has added up so far, in memory that the training reads without asking it or waiting for it."""

import mmap
import struct
from math import isnan, nan
from typing import Any

from pipeline.monitor.gpu import is_throttled

MEANS = ("util_pct", "mem_busy_pct", "power_w", "power_pct", "sm_clock_mhz")
_NAMES = [*MEANS, *(f"{name} n" for name in MEANS), "throttled", "throttled n", "gpus", "energy_j", "hottest_c"]
_READING = struct.Struct("<Q")  # which reading the reader waits for; it alone writes this
_TOTALS = struct.Struct(f"<Q{len(_NAMES)}dQ")
SIZE = _READING.size + _TOTALS.size


class TotalsWriter:
    """The sampler's side; descriptor: an open file of SIZE bytes that both processes map."""

    def __init__(self, descriptor: int):
        self.memory = mmap.mmap(descriptor, SIZE)
        self.totals = dict.fromkeys(_NAMES, 0.0) | {"hottest_c": nan}
        self.samples = self.reading = 0

    def add(self, gpus: list[dict[str, Any]], *, energy_j: float | None) -> None:
        """One sample of all GPUs, and the energy of the run up to it."""
        totals = self.totals
        reading = _READING.unpack_from(self.memory)[0]
        if reading != self.reading:
            self.reading, totals["hottest_c"] = reading, nan
        for gpu in gpus:
            for name in MEANS:
                if name in gpu:
                    totals[name] += gpu[name]
                    totals[f"{name} n"] += 1
            if "throttle" in gpu:
                totals["throttled"] += is_throttled(gpu["throttle"])
                totals["throttled n"] += 1
            if "temp_c" in gpu and not gpu["temp_c"] <= totals["hottest_c"]:  # nor when that is NaN
                totals["hottest_c"] = gpu["temp_c"]
        totals["gpus"], totals["energy_j"] = len(gpus), nan if energy_j is None else energy_j
        self.samples += 1
        _TOTALS.pack_into(self.memory, _READING.size, self.samples, *totals.values(), self.samples)


class TotalsReader:
    """The training's side."""

    def __init__(self, descriptor: int):
        self.memory = mmap.mmap(descriptor, SIZE)
        self.before = dict.fromkeys(_NAMES, 0.0)
        self.samples = self.reading = 0

    def read(self) -> dict[str, float]:
        """By the names of docs/metrics.md: means over GPUs and samples since the last reading that had one; energy_j and gpus
        beside them, without a prefix. Nothing when no sample was taken since."""
        now = self._whole()
        if now is None:
            return {}
        self.reading += 1
        _READING.pack_into(self.memory, 0, self.reading)
        before, self.before = self.before, now
        numbers = {
            f"gpu/{name}": (now[name] - before[name]) / told
            for name in MEANS
            if (told := now[f"{name} n"] - before[f"{name} n"])
        }
        if judged := now["throttled n"] - before["throttled n"]:
            numbers["gpu/throttled_pct"] = 100 * (now["throttled"] - before["throttled"]) / judged
        if not isnan(now["hottest_c"]):
            numbers["gpu/temp_c"] = now["hottest_c"]
        if not isnan(now["energy_j"]):
            numbers["energy_j"] = now["energy_j"]
        return numbers | {"gpus": now["gpus"]}

    def _whole(self) -> dict[str, float] | None:
        """The totals after a sample that was not read yet. The sample's number stands at both ends: two different ones mean
        that it was being written; the next reading then has it."""
        first, *values, last = _TOTALS.unpack(self.memory[_READING.size : SIZE])
        if first != last or last == self.samples:
            return None
        self.samples = last
        return dict(zip(_NAMES, values, strict=True))
