"""The process that samples a run's GPUs beside the training; `pipeline/monitor/beside.py` starts it.

A process and not a thread: a hundred samples a second of Python would take the interpreter's lock from the training loop.
No torch here. It ends with the training, also one that is killed: its standard input, a pipe that the training holds, ends
then. What it has to say stands on its standard error: why there is nothing to sample, or what was sampled.
"""

import argparse
import os
import select
import socket
import sys
import time
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).parents[2])

from pipeline.monitor.energy import EnergyMeter, energy_of, kwh, longest_bridged_s
from pipeline.monitor.gpu import GpuSampler
from pipeline.monitor.host import HostSampler
from pipeline.monitor.pace import Pace
from pipeline.monitor.samples import SampleTable, read_gpus
from pipeline.monitor.totals import TotalsWriter

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

    def told(self) -> str:
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
    return f"{output.name}: {gpus}, {pace.told()}, {energy.told()}"


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
