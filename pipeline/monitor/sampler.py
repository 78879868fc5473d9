"""The process that samples a run's GPUs beside the training, which starts it by client.py.

A process and not a thread: a hundred samples a second of Python would take the interpreter's lock from the training
loop. No torch here. It ends with the training, also one that is killed: its standard input, a pipe that the training
holds, ends then. Its report goes to standard error: why there is nothing to sample, or what was sampled.
"""

import argparse
import csv
import io
import mmap
import os
import select
import socket
import statistics
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isnan, nan
from pathlib import Path
from typing import Any, TextIO

if not __package__:
    sys.path[0] = str(Path(__file__).parents[2])

from pipeline.monitor.client import (
    GIB,
    JOULES_PER_KWH,
    MEANS,
    NAMES,
    READING,
    SIZE,
    TOTALS,
    HostSampler,
    why_no_driver,
)
from pipeline.process.storage import note_once, open_regular
from pipeline.run_dir.rows import open_rows, whole_lines

# The samples as CSV: one row for each GPU and sample, the host's numbers beside them; appended over attempts.

GPU_COLUMNS = [
    "index", "name", "util_pct", "mem_busy_pct", "mem_used_gib", "mem_total_gib", "temp_c", "power_w", "power_pct",
    "sm_clock_mhz", "mem_clock_mhz", "throttle", "energy_j",
]  # fmt: skip
HOST_COLUMNS = [
    "host/cpu_pct", "mem/host_used_pct", "disk/read_mb_s", "disk/write_mb_s", "net/sent_mb_s", "net/received_mb_s",
]  # fmt: skip
COLUMNS = ["time", "attempt", "host", *(f"gpu/{name}" for name in GPU_COLUMNS), *HOST_COLUMNS]
FLUSH_S = 1.0
LONGEST_ROW = 1 << 16  # bytes, far above what a row can have
# Of GPU_COLUMNS, what is a number that changes.
NUMBERS = [
    "util_pct", "mem_busy_pct", "mem_used_gib", "temp_c", "power_w", "power_pct", "sm_clock_mhz", "mem_clock_mhz",
    "energy_j",
]  # fmt: skip

# Of a driver's reasons for a lower clock, what takes speed from a GPU that has work: power or heat. The others are
# idleness or somebody's setting.
THROTTLING = {
    "sw_power_cap",
    "hw_slowdown",
    "sw_thermal",
    "hw_thermal",
    "hw_power_brake",
    "board_limit",
    "reliability",
}


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
        # Open as long as it is sampled.
        file = io.TextIOWrapper(open_regular(path, "ab"), encoding="utf-8", newline="")
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
    """All samples of one GPU in one attempt. numbers: by name, as long as times (seconds since 1970), NaN where it did
    not tell; reasons: how many samples had which throttle reasons."""

    attempt: int
    index: int
    name: str
    times: array = field(default_factory=lambda: array("d"))
    numbers: dict[str, array] = field(default_factory=lambda: {name: array("d") for name in NUMBERS})
    reasons: Counter[str] = field(default_factory=Counter)

    def values(self, name: str) -> list[float]:
        return [value for value in self.numbers[name] if not isnan(value)]


def read_gpus(path: str | Path) -> list[GpuSeries]:
    """Return the GPUs of a file of samples, attempt by attempt. Without a dictionary a row: days of eight GPUs are a
    million rows."""
    lines = whole_rows(path)
    place = {name: n for n, name in enumerate(next(lines, []))}
    found: dict[tuple[str, str], GpuSeries] = {}
    needed = {"time", "attempt", "gpu/index", "gpu/name", "gpu/throttle", *(f"gpu/{name}" for name in NUMBERS)}
    if not needed <= place.keys():
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


# NVIDIA GPUs through their driver's library (pynvml, the extra `gpu`).

# Why the clocks are where they are, by NVML's bits (nvml.h, nvmlClocksThrottleReason*).
REASONS = {
    0x001: "gpu_idle",
    0x002: "application_clocks",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal",
    0x040: "hw_thermal",
    0x080: "hw_power_brake",
    0x100: "display_clocks",
    0x200: "board_limit",
    0x400: "reliability",
}
NO_REASON = "none"


class GpuSampler:
    """One row of numbers for each GPU of this machine; no rows where there is no driver or no pynvml.

    uuids: the GPUs to look at, as the driver names them; default all. why_none says why there are no rows, for the one
    line that informs the user.
    """

    def __init__(self, uuids: Sequence[str] = ()) -> None:
        self.gpus: list[_Gpu] = []
        self.why_none = why_no_driver()
        if self.why_none:
            return
        import pynvml as nvml

        try:
            nvml.nvmlInit()
            devices = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
            for index, device in enumerate(devices):
                if not uuids or nvml.nvmlDeviceGetUUID(device) in uuids:
                    self.gpus.append(_Gpu(nvml, index, device))
        except nvml.NVMLError as error:
            self.gpus, self.why_none = [], f"no GPU numbers: NVIDIA's driver does not answer ({error})"
            return
        if not self.gpus:
            self.why_none = f"no GPU numbers: NVIDIA's driver sees no GPU{' that the run uses' if uuids else ''}"

    def __str__(self) -> str:
        return f"{len(self.gpus)} GPU{'' if len(self.gpus) == 1 else 's'}"

    def sample(self) -> list[dict[str, Any]]:
        """Return for each GPU index, name, util_pct, mem_busy_pct, mem_used_gib, mem_total_gib, temp_c, power_w,
        power_pct, sm_clock_mhz, mem_clock_mhz, throttle, energy_j.

        util_pct is the share of the last moments in which any kernel ran; power_pct is of the enforced limit; throttle
        holds REASONS joined by +, or NO_REASON; energy_j is the GPU's own counter, which runs since the driver was
        loaded. What a GPU does not tell is left out.
        """
        return [gpu.sample() for gpu in self.gpus]


def throttle_words(bits: int) -> str:
    """Return the reasons as words; a bit that NVML added later as its number."""
    words = [REASONS.get(1 << n, hex(1 << n)) for n in range(bits.bit_length()) if bits >> n & 1]
    return "+".join(words) or NO_REASON


# One question to the driver each, since consumer boards and virtual GPUs do not answer every one.
QUESTIONS: tuple[Callable[[Any, Any], dict[str, Any]], ...] = (
    lambda nvml, gpu: {
        "util_pct": (rates := nvml.nvmlDeviceGetUtilizationRates(gpu)).gpu,
        "mem_busy_pct": rates.memory,
    },
    lambda nvml, gpu: {
        "mem_used_gib": (memory := nvml.nvmlDeviceGetMemoryInfo(gpu)).used / GIB,
        "mem_total_gib": memory.total / GIB,
    },
    lambda nvml, gpu: {"temp_c": nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)},
    lambda nvml, gpu: {"power_w": nvml.nvmlDeviceGetPowerUsage(gpu) / 1000},
    lambda nvml, gpu: {"limit_w": nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000},
    lambda nvml, gpu: {"sm_clock_mhz": nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)},
    lambda nvml, gpu: {"mem_clock_mhz": nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM)},
    lambda nvml, gpu: {"throttle": throttle_words(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu))},
    lambda nvml, gpu: {"energy_j": nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000},
)


class _Gpu:
    """One GPU. questions: those that it answers, as far as is known."""

    def __init__(self, nvml: Any, index: int, device: Any):
        self.nvml, self.device, self.questions = nvml, device, list(QUESTIONS)
        self.known = {"index": index, **self._answer(lambda nvml, gpu: {"name": nvml.nvmlDeviceGetName(gpu)})}

    def sample(self) -> dict[str, Any]:
        row = dict(self.known)
        for question in tuple(self.questions):
            row |= self._answer(question)
        if "power_w" in row and "limit_w" in row:
            row["power_pct"] = 100 * row["power_w"] / row["limit_w"]
        row.pop("limit_w", None)
        return row

    def _answer(self, question: Callable[[Any, Any], dict[str, Any]]) -> dict[str, Any]:
        nvml = self.nvml
        try:
            return question(nvml, self.device)
        except nvml.NVMLError as error:
            never = (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND)
            if error.value in never and question in self.questions:
                self.questions.remove(question)  # a hundred times a second it would cost what an answer costs
            return {}


class TotalsWriter:
    """Writes the totals that the training reads. descriptor: an open file of SIZE bytes that both processes map."""

    def __init__(self, descriptor: int):
        self.memory = mmap.mmap(descriptor, SIZE)
        self.totals = dict.fromkeys(NAMES, 0.0) | {"hottest_c": nan}
        self.samples = self.reading = 0

    def add(self, gpus: list[dict[str, Any]], *, energy_j: float | None) -> None:
        """Add one sample of all GPUs, and set the energy of the run up to it."""
        totals = self.totals
        reading = READING.unpack_from(self.memory)[0]
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
        TOTALS.pack_into(self.memory, READING.size, self.samples, *totals.values(), self.samples)


# The moments at which to sample, and the rate that was reached.

HIGHEST_HZ = 100.0  # the driver itself renews most numbers less often


class Pace:
    """Every 1/hz seconds; a moment that was missed is not made up for.

    Times are seconds since 1970 that never go back, whatever is done to the system's clock.
    """

    def __init__(self, hz: float):
        self.period_s = 1 / hz
        self._offset_s = time.time() - time.monotonic()
        self._due_s = time.monotonic()
        self.samples = 0
        self._first_s = self._last_s = 0.0

    def skip(self) -> None:
        """Set the next sample to one period from now."""
        self._due_s = time.monotonic() + self.period_s

    def wait_s(self) -> float:
        """Return the seconds until the next sample is due."""
        return max(self._due_s - time.monotonic(), 0.0)

    def mark(self) -> float:
        """Return a sample is taken: the time to write beside it."""
        now = time.monotonic()
        self._due_s = max(self._due_s + self.period_s, now)
        self._last_s = now
        if not self.samples:
            self._first_s = now
        self.samples += 1
        return now + self._offset_s

    def summary(self) -> str:
        """Return how many samples were taken, and at which rate, in words."""
        seconds = self._last_s - self._first_s
        rate = f" at {(self.samples - 1) / seconds:.2f} Hz" if self.samples > 1 and seconds > 0 else ""
        return f"{self.samples:,} samples{rate} ({1 / self.period_s:g} Hz asked for)"


HOST_EVERY_S = 1.0  # reading the whole machine's counters takes longer than asking a GPU


class HostNow:
    """The host's numbers with one sample of every HOST_EVERY_S, none with the others."""

    def __init__(self) -> None:
        self.sampler, self.last_s = HostSampler(), time.monotonic()
        self.sampler.sample()  # rates begin here

    def sample(self) -> dict[str, float]:
        if (now := time.monotonic()) - self.last_s < 0.9 * HOST_EVERY_S:  # at 1 Hz a sample may come a little early
            return {}
        self.last_s = now
        return self.sampler.sample()


class RunEnergy:
    """Energy of the run's GPUs on this host: what earlier attempts recorded, and this one's so far."""

    def __init__(self, path: Path, *, hz: float):
        earlier = [energy_of(gpu).best_j() for gpu in read_gpus(path)]
        self.earlier_j = None if None in earlier else sum(e for e in earlier if e is not None)
        self.hz, self.meters = hz, dict[int, EnergyMeter]()

    def add(self, time_s: float, gpus: list[dict[str, Any]]) -> None:
        for gpu in gpus:
            meter = self.meters.setdefault(gpu["index"], EnergyMeter(longest_s=longest_bridged_s(1 / self.hz)))
            meter.add(time_s, gpu.get("power_w"), gpu.get("energy_j"))

    def joules(self) -> float | None:
        """Return the energy so far; None when one of the GPUs reports neither power nor energy, as the others' sum is
        not the run's."""
        parts = [self.earlier_j, *(meter.best_j() for meter in self.meters.values())]
        return None if None in parts else sum(part for part in parts if part is not None)

    def summary(self) -> str:
        joules = self.joules()
        if joules is None:
            return "energy not known"
        counted = sum(meter.counted_j is not None for meter in self.meters.values())
        how = {0: "from their power", len(self.meters): "by their own counters"}.get(counted, "by counters and power")
        return f"{kwh(joules):.4g} kWh over all attempts, {how}"


def sample_until_stdin_ends(gpus: GpuSampler, *, output: Path, attempt: int, hz: float, descriptor: int) -> str:
    """Sample until standard input or the training ends; return a report in words."""
    energy = RunEnergy(output, hz=hz)
    table = SampleTable.appended(output, host=socket.gethostname(), attempt=attempt)
    totals, host, pace, trainer = TotalsWriter(descriptor), HostNow(), Pace(hz), os.getppid()
    while not select.select([sys.stdin], [], [], pace.wait_s())[0] and os.getppid() == trainer:
        time_s, rows = pace.mark(), gpus.sample()
        energy.add(time_s, rows)
        totals.add(rows, energy_j=energy.joules())
        table.write(time_s, rows, host.sample())
    table.close()
    return f"{output.name}: {gpus}, {pace.summary()}, {energy.summary()}"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--hz", type=float, required=True)
    parser.add_argument("--descriptor", type=int, required=True)
    parser.add_argument("--gpus", nargs="*", default=[])
    options = parser.parse_args(arguments)
    gpus = GpuSampler(options.gpus)
    if gpus.why_none:
        print(gpus.why_none, file=sys.stderr)
        return 0
    facts = {"attempt": options.attempt, "hz": options.hz, "descriptor": options.descriptor}
    try:
        print(sample_until_stdin_ends(gpus, output=options.output, **facts), file=sys.stderr)
    except OSError as error:
        print(f"{options.output}: GPUs are not sampled any more ({error.strerror})", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
