"""The process that samples a run's GPUs beside the training, which starts it by client.py.

A process and not a thread: a hundred samples a second of Python would take the interpreter's lock from the training loop.
No torch here. It ends with the training, also one that is killed: its standard input, a pipe that the training holds, ends
then. Its report goes to standard error: why there is nothing to sample, or what was sampled.
"""

import argparse
import mmap
import os
import select
import socket
import sys
import time
from math import nan
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).parents[2])

from pipeline.monitor.client import MEANS, NAMES, READING, SIZE, TOTALS, HostSampler
from pipeline.monitor.gpu import GpuSampler, is_throttled
from pipeline.monitor.samples import EnergyMeter, SampleTable, energy_of, kwh, longest_bridged_s, read_gpus


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
        """Return the energy so far; None when one of the GPUs reports neither power nor energy, as the others' sum is not the run's."""
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
