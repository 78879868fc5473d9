"""The process that samples a run's GPUs beside the training; `pipeline/monitor/sampler.py` starts it.

A process and not a thread: a hundred samples a second of Python would take the interpreter's lock from the training loop.
No torch here. It ends with the training, also one that is killed: its standard input, a pipe that the training holds, ends
then. What it has to say stands on its standard error: why there is nothing to sample, or what was sampled.
"""

import argparse
import mmap
import os
import select
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from math import isnan, nan
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).parents[2])

from pipeline.monitor.gpu import GpuSampler, HostSampler, is_throttled, why_no_driver
from pipeline.monitor.samples import EnergyMeter, SampleTable, energy_of, kwh, longest_bridged_s, read_gpus

# What a sampler has added up so far, in memory that the training reads without asking it or waiting for it.

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
            f"gpu/{name}": (now[name] - before[name]) / count
            for name in MEANS
            if (count := now[f"{name} n"] - before[f"{name} n"])
        }
        if judged := now["throttled n"] - before["throttled n"]:
            numbers["gpu/throttled_pct"] = 100 * (now["throttled"] - before["throttled"]) / judged
        if not isnan(now["hottest_c"]):
            numbers["gpu/temp_c"] = now["hottest_c"]
        if not isnan(now["energy_j"]):
            numbers["energy_j"] = now["energy_j"]
        return numbers | {"gpus": now["gpus"]}

    def _whole(self) -> dict[str, float] | None:
        """Return the totals after a sample that was not read yet. The sample's number stands at both ends: two different ones mean
        that it was being written; the next reading then has it."""
        first, *values, last = _TOTALS.unpack(self.memory[_READING.size : SIZE])
        if first != last or last == self.samples:
            return None
        self.samples = last
        return dict(zip(_NAMES, values, strict=True))


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
        """The first sample is one period from now."""
        self._due_s = time.monotonic() + self.period_s

    def wait_s(self) -> float:
        """Until the next sample is due."""
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
        """For people: how many samples at which rate."""
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
        """None when one of the GPUs tells neither power nor energy: the sum of the others would be no energy of the run."""
        parts = [self.earlier_j, *(meter.best_j() for meter in self.meters.values())]
        return None if None in parts else sum(part for part in parts if part is not None)

    def summary(self) -> str:
        joules = self.joules()
        if joules is None:
            return "energy not known"
        counted = sum(meter.counted_j is not None for meter in self.meters.values())
        how = {0: "from their power", len(self.meters): "by their own counters"}.get(counted, "by counters and power")
        return f"{kwh(joules):.4g} kWh over all attempts, {how}"


def sample_until_told(gpus: GpuSampler, *, output: Path, attempt: int, hz: float, descriptor: int) -> str:
    """Sample until standard input ends; returns what was sampled, in words."""
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
        print(sample_until_told(gpus, output=options.output, **facts), file=sys.stderr)
    except OSError as error:
        print(f"{options.output}: GPUs are not sampled any more ({error.strerror})", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


# The training's side of sampling GPUs: start the sampler, read what it has added up, and hear its last words.

LAST_WORDS_S = 10.0  # a driver that hangs must not hold the end of a run


class GpuMonitor:
    """GPUs of this host, sampled into a CSV from a process of its own until `stop` or the end of this one.

    why_none says why there is none; a process that ends early says so in the reading that notices it.
    """

    def __init__(self, output: Path, *, attempt: int, hz: float, gpus: Sequence[str] = ()):
        self.process: subprocess.Popen[str] | None = None
        self.why_none = why_no_driver()
        if self.why_none:
            return
        with tempfile.TemporaryFile() as shared:
            shared.truncate(SIZE)
            self.totals = TotalsReader(shared.fileno())
            command = [sys.executable, str(__file__), str(output), "--attempt", str(attempt), "--hz", str(hz)]
            self.process = subprocess.Popen(
                [*command, "--descriptor", str(shared.fileno()), "--gpus", *gpus],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,  # else who reads the training's output would wait for it, too
                stderr=subprocess.PIPE,
                text=True,
                pass_fds=[shared.fileno()],
                start_new_session=True,  # Ctrl-C at the terminal is the run's; this ends with it
            )

    def read(self) -> dict[str, float]:
        """See TotalsReader.read."""
        if self.process is None:
            return {}
        if self.process.poll() is not None:
            self.stop()
            return {}
        return self.totals.read()

    def stop(self) -> None:
        """End the sampler and print what it says."""
        if self.process is None:
            return
        process, self.process = self.process, None
        try:
            words = process.communicate(timeout=LAST_WORDS_S)[1]
        except subprocess.TimeoutExpired:
            process.kill()
            words = process.communicate()[1]
        if words.strip():
            print(words.strip(), flush=True)
