"""Joules from samples of power, and what they are per token, in kWh and in money."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isnan
from pathlib import Path
from typing import Any

from pipeline.monitor.host import JOULES_PER_KWH
from pipeline.monitor.samples_file import GpuSeries, read_gpus

# Between two samples further apart than that nobody knows what was drawn.
GAP_PERIODS, SHORTEST_GAP_S = 5, 1.0


def longest_bridged_s(period_s: float) -> float:
    """Return how far apart two samples taken every period_s may lie and still be joined by a line. At high rates a
    busy driver answers late: then it is SHORTEST_GAP_S."""
    return max(GAP_PERIODS * period_s, SHORTEST_GAP_S)


@dataclass(kw_only=True)
class EnergyMeter:
    """Energy of one GPU by the trapezoid rule, sample by sample.

    Intervals longer than longest_s are left out of joules and covered_s and counted in gaps and gap_s. counted_j is
    the difference of the GPU's own counter (gaps included), None where it has none.
    """

    longest_s: float
    joules: float = 0.0
    covered_s: float = 0.0
    gaps: int = 0
    gap_s: float = 0.0
    counted_j: float | None = None
    _last: tuple[float, float] | None = None
    _counter: float | None = None

    def add(self, time_s: float, watts: float | None, counter_j: float | None = None) -> None:
        """Add one sample; what the GPU did not report is None."""
        if counter_j is not None:
            if self.counted_j is None or self._counter is None:
                self.counted_j = 0.0
            else:
                # Never less than nothing: the counter begins again when the driver is loaded again.
                self.counted_j += max(counter_j - self._counter, 0.0)
            self._counter = counter_j
        if watts is None:
            return
        if self._last is not None:
            elapsed = time_s - self._last[0]
            if elapsed <= self.longest_s:
                self.joules += elapsed * (watts + self._last[1]) / 2
                self.covered_s += elapsed
            else:
                self.gaps += 1
                self.gap_s += elapsed
        self._last = time_s, watts

    def best_j(self) -> float | None:
        """Return the counter's difference where there is one, else the integral; None for a GPU that has neither."""
        if self.counted_j is not None:
            return self.counted_j
        return None if self._last is None else self.joules


def energy_of(gpu: GpuSeries) -> EnergyMeter:
    """Return the energy of the recorded samples of one GPU in one attempt."""
    meter = EnergyMeter(longest_s=longest_bridged_s(usual_period_s(gpu.times) or 0.0))
    # The file holds no None: NaN is what the GPU did not report.
    power, counter = (
        [None if isnan(value) else value for value in gpu.numbers[name]] for name in ("power_w", "energy_j")
    )
    for sample in zip(gpu.times, power, counter, strict=True):
        meter.add(*sample)
    return meter


def usual_period_s(times: Sequence[float]) -> float | None:
    """Return the median distance of neighbouring samples; None for fewer than two."""
    if len(times) < 2:
        return None
    return statistics.median(later - earlier for earlier, later in pairwise(times))


def total_j(parts: Sequence[float | None]) -> float | None:
    """Return the sum; None when one of the parts is not known, as the others' sum is not the run's."""
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def kwh(joules: float) -> float:
    return joules / JOULES_PER_KWH


class RunEnergy:
    """Energy of the run's GPUs on this host: what earlier attempts recorded, and this one's so far."""

    def __init__(self, path: Path, *, hz: float):
        self.earlier_j = total_j([energy_of(gpu).best_j() for gpu in read_gpus(path)])
        self.hz, self.meters = hz, dict[int, EnergyMeter]()

    def add(self, time_s: float, gpus: list[dict[str, Any]]) -> None:
        for gpu in gpus:
            meter = self.meters.setdefault(gpu["index"], EnergyMeter(longest_s=longest_bridged_s(1 / self.hz)))
            meter.add(time_s, gpu.get("power_w"), gpu.get("energy_j"))

    def joules(self) -> float | None:
        """Return the energy so far; None when one of the GPUs reports neither power nor energy, as the others' sum is
        not the run's."""
        return total_j([self.earlier_j, *(meter.best_j() for meter in self.meters.values())])

    def summary(self) -> str:
        joules = self.joules()
        if joules is None:
            return "energy not known"
        counted = sum(meter.counted_j is not None for meter in self.meters.values())
        how = {0: "from their power", len(self.meters): "by their own counters"}.get(counted, "by counters and power")
        return f"{kwh(joules):.4g} kWh over all attempts, {how}"
