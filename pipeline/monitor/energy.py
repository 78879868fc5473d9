"""Joules from samples of power, and what they are per token, in kWh and in money."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isnan

from pipeline.monitor.samples import GpuSeries

JOULES_PER_KWH = 3.6e6
# Between two samples further apart than that nobody knows what was drawn.
GAP_PERIODS, SHORTEST_GAP_S = 5, 1.0


def longest_bridged_s(period_s: float) -> float:
    """How far apart two samples taken every period_s may lie and still be joined by a line. At high rates a busy driver
    answers late: then it is SHORTEST_GAP_S."""
    return max(GAP_PERIODS * period_s, SHORTEST_GAP_S)


@dataclass(kw_only=True)
class EnergyMeter:
    """Energy of one GPU by the trapezoid rule, sample by sample.

    Intervals longer than longest_s are left out of joules and covered_s and counted in gaps and gap_s. counted_j is the
    difference of the GPU's own counter (gaps included), None where it has none.
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
        """One sample; what the GPU did not tell is None."""
        if counter_j is not None:
            # Never less than nothing: the counter begins again when the driver is loaded again.
            since = 0.0 if self._counter is None else max(counter_j - self._counter, 0.0)
            self.counted_j = (self.counted_j or 0.0) + since
            self._counter = counter_j
        if watts is None:
            return
        if self._last is not None:
            elapsed = time_s - self._last[0]
            if elapsed <= self.longest_s:
                self.joules += elapsed * (watts + self._last[1]) / 2
                self.covered_s += elapsed
            else:
                self.gaps, self.gap_s = self.gaps + 1, self.gap_s + elapsed
        self._last = time_s, watts

    def best_j(self) -> float | None:
        """The counter's difference where there is one, else the integral; None for a GPU that tells neither."""
        if self.counted_j is not None:
            return self.counted_j
        return None if self._last is None else self.joules


def integrate(samples: Iterable[tuple[float, float]], *, longest_s: float) -> EnergyMeter:
    """samples: (seconds, watts) in the order of time."""
    meter = EnergyMeter(longest_s=longest_s)
    for time_s, watts in samples:
        meter.add(time_s, watts)
    return meter


def energy_of(gpu: GpuSeries) -> EnergyMeter:
    """Of the recorded samples of one GPU in one attempt."""
    meter = EnergyMeter(longest_s=longest_bridged_s(usual_period_s(gpu.times) or 0.0))
    for time_s, watts, counter_j in zip(gpu.times, gpu.numbers["power_w"], gpu.numbers["energy_j"], strict=True):
        meter.add(time_s, None if isnan(watts) else watts, None if isnan(counter_j) else counter_j)
    return meter


def usual_period_s(times: Sequence[float]) -> float | None:
    """Median distance of neighbouring samples; None for fewer than two."""
    return statistics.median(b - a for a, b in pairwise(times)) if len(times) > 1 else None


def kwh(joules: float) -> float:
    return joules / JOULES_PER_KWH
