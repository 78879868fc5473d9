"""Samples of the sampler process: written, read, and integrated to energy."""

import csv
import io
import os
import statistics
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isnan
from pathlib import Path
from typing import Any, TextIO

from pipeline.monitor.client import JOULES_PER_KWH
from pipeline.process.storage import note_once, open_regular
from pipeline.run_dir.rows import open_rows, whole_lines

# The samples as CSV: one row for each GPU and sample, the host's numbers beside them; appended over attempts.

GPU_COLUMNS = ["index", "name", "util_pct", "mem_busy_pct", "mem_used_gib", "mem_total_gib", "temp_c", "power_w", "power_pct", "sm_clock_mhz", "mem_clock_mhz", "throttle", "energy_j"]  # fmt: skip
HOST_COLUMNS = ["host/cpu_pct", "mem/host_used_pct", "disk/read_mb_s", "disk/write_mb_s", "net/sent_mb_s", "net/received_mb_s"]  # fmt: skip
COLUMNS = ["time", "attempt", "host", *(f"gpu/{name}" for name in GPU_COLUMNS), *HOST_COLUMNS]
FLUSH_S = 1.0
LONGEST_ROW = 1 << 16  # bytes, far above what a row can have
# Of GPU_COLUMNS, what is a number that changes.
NUMBERS = ["util_pct", "mem_busy_pct", "mem_used_gib", "temp_c", "power_w", "power_pct", "sm_clock_mhz", "mem_clock_mhz", "energy_j"]  # fmt: skip

# Of a driver's reasons for a lower clock, what takes speed from a GPU that has work: power or heat. The others are idleness or
# somebody's setting.
THROTTLING = {"sw_power_cap", "hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake", "board_limit", "reliability"}


def is_throttled(words: str) -> bool:
    """Return whether one of a sample's reasons, joined by +, takes speed from a GPU that has work."""
    return not THROTTLING.isdisjoint(words.split("+"))


class SampleTable:
    """Writes samples; what was written stands in the file at most FLUSH_S later. attempt: None outside of a run."""

    def __init__(self, output: TextIO, *, host: str, attempt: int | None, header: bool = True):
        self.output, self.host, self.attempt = output, host, attempt
        self.rows = csv.writer(output, lineterminator="\n")
        self.flushed = 0.0
        if header:
            self.rows.writerow(COLUMNS)

    @classmethod
    def appended(cls, path: Path, *, host: str, attempt: int) -> "SampleTable":
        """Return the table, behind what earlier attempts wrote; a last line torn by a crash is cut off."""
        file = io.TextIOWrapper(
            open_regular(path, "ab"), encoding="utf-8", newline=""
        )  # written to as long as it is sampled
        whole = _whole_bytes(path)
        file.truncate(whole)
        return cls(file, host=host, attempt=attempt, header=whole == 0)

    def write(self, time_s: float, gpus: list[dict[str, Any]], host: dict[str, float]) -> None:
        """Write one sample of all GPUs; without a GPU one row of the host's numbers."""
        common = {"time": f"{time_s:.4f}", "attempt": self.attempt, "host": self.host} | host
        for gpu in gpus or [{}]:
            row = common | {f"gpu/{name}": value for name, value in gpu.items()}
            self.rows.writerow([_text(row.get(name)) for name in COLUMNS])
        if (now := time.monotonic()) - self.flushed >= FLUSH_S:
            self.output.flush()
            self.flushed = now

    def close(self) -> None:
        self.output.flush()


def _whole_bytes(path: Path) -> int:
    """Return bytes of the file up to the end of its last whole line."""
    with open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - LONGEST_ROW, 0))
        tail = file.read()
    return size - len(tail) + tail.rfind(b"\n") + 1


def _text(value: Any) -> Any:
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else value


def whole_rows(path: str | Path) -> Iterator[list[str]]:
    """Yield the cells of every line that has as many as the header, which comes first."""
    try:
        file = open_rows(path)
    except FileNotFoundError:
        return
    with file:
        lines = csv.reader(
            line.decode(errors="replace")
            for line in whole_lines(file)
            if line.endswith(b"\n") and len(line) <= LONGEST_ROW
        )
        columns: list[str] = []
        while True:
            try:
                cells = next(lines)
            except StopIteration:
                return
            except csv.Error:  # a quote that no line closes
                continue
            if not columns or len(cells) == len(columns):
                columns = columns or cells
                yield cells


@dataclass(kw_only=True)
class GpuSeries:
    """All samples of one GPU in one attempt. numbers: by name, as long as times (seconds since 1970), NaN where it did not
    tell; reasons: how many samples had which throttle reasons."""

    attempt: int
    index: int
    name: str
    times: array = field(default_factory=lambda: array("d"))
    numbers: dict[str, array] = field(default_factory=lambda: {name: array("d") for name in NUMBERS})
    reasons: Counter[str] = field(default_factory=Counter)

    def values(self, name: str) -> list[float]:
        return [value for value in self.numbers[name] if not isnan(value)]


def read_gpus(path: str | Path) -> list[GpuSeries]:
    """Return the GPUs of a file of samples, attempt by attempt. Without a dictionary a row: days of eight GPUs are a million rows."""
    lines = whole_rows(path)
    place = {name: n for n, name in enumerate(next(lines, []))}
    found: dict[tuple[str, str], GpuSeries] = {}
    if not {"time", "attempt", "gpu/index", "gpu/name", "gpu/throttle", *(f"gpu/{name}" for name in NUMBERS)} <= set(
        place
    ):
        if place:
            note_once(f"{path}: has not the columns of GPU samples; it is left out")
        return []
    moment, attempt, index, throttle = (place[name] for name in ("time", "attempt", "gpu/index", "gpu/throttle"))
    numbers = [(name, place[f"gpu/{name}"]) for name in NUMBERS]
    for cells in lines:
        if not cells[index]:
            continue
        key = cells[attempt] or "1", cells[index]
        try:
            series = found.get(key)
            if series is None:
                series = GpuSeries(attempt=int(key[0]), index=int(key[1]), name=cells[place["gpu/name"]])
            values = [float(cells[moment]), *(float(cells[n] or "nan") for _, n in numbers)]
        except ValueError:  # no row of ours
            continue
        found[key] = series
        for column, value in zip((series.times, *(series.numbers[name] for name, _ in numbers)), values, strict=True):
            column.append(value)
        if cells[throttle]:
            series.reasons[cells[throttle]] += 1
    return list(found.values())


# Joules from samples of power, and what they are per token, in kWh and in money.

# Between two samples further apart than that nobody knows what was drawn.
GAP_PERIODS, SHORTEST_GAP_S = 5, 1.0


def longest_bridged_s(period_s: float) -> float:
    """Return how far apart two samples taken every period_s may lie and still be joined by a line. At high rates a busy driver
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
        """Add one sample; what the GPU did not report is None."""
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
        """Return the counter's difference where there is one, else the integral; None for a GPU that has neither."""
        if self.counted_j is not None:
            return self.counted_j
        return None if self._last is None else self.joules


def energy_of(gpu: GpuSeries) -> EnergyMeter:
    """Return the energy of the recorded samples of one GPU in one attempt."""
    meter = EnergyMeter(longest_s=longest_bridged_s(usual_period_s(gpu.times) or 0.0))
    for time_s, watts, counter_j in zip(gpu.times, gpu.numbers["power_w"], gpu.numbers["energy_j"], strict=True):
        meter.add(time_s, None if isnan(watts) else watts, None if isnan(counter_j) else counter_j)
    return meter


def usual_period_s(times: Sequence[float]) -> float | None:
    """Return the median distance of neighbouring samples; None for fewer than two."""
    return statistics.median(b - a for a, b in pairwise(times)) if len(times) > 1 else None


def kwh(joules: float) -> float:
    return joules / JOULES_PER_KWH
