"""Sampling of a run's GPUs while it trains: a thread that writes the samples file and sums up for the logged rows."""

import socket
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.monitor.energy import RunEnergy
from pipeline.monitor.gpus import GpuSampler, is_throttled
from pipeline.monitor.host import HostNow, why_no_driver
from pipeline.monitor.pace import Pace
from pipeline.monitor.samples_file import SampleTable

MEANS = ("util_pct", "mem_busy_pct", "power_w", "power_pct", "sm_clock_mhz")
STOP_WITHIN_S = 10.0  # a driver that hangs must not hold the end of a run


class Totals:
    """Sums over GPUs and samples since the last reading."""

    def __init__(self) -> None:
        self.sums: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.hottest_c: float | None = None
        self.gpus = 0
        self.energy_j: float | None = None

    def add(self, gpus: list[dict[str, Any]], *, energy_j: float | None) -> None:
        """Add one sample of all GPUs. energy_j: the run's up to it."""
        for gpu in gpus:
            row = {name: gpu[name] for name in MEANS if name in gpu}
            if "throttle" in gpu:
                row["throttled"] = is_throttled(gpu["throttle"])
            self.sums.update(row)
            self.counts.update(row.keys())
            if "temp_c" in gpu:
                self.hottest_c = max(gpu["temp_c"], self.hottest_c or 0)
        self.gpus, self.energy_j = len(gpus), energy_j

    def numbers(self) -> dict[str, float]:
        """Return means by the names of docs/metrics.md, and energy_j and gpus without a prefix; {} without a sample."""
        if not self.gpus:
            return {}
        counts = self.counts
        numbers: dict[str, float] = {f"gpu/{name}": self.sums[name] / counts[name] for name in MEANS if counts[name]}
        if counts["throttled"]:
            numbers["gpu/throttled_pct"] = 100 * self.sums["throttled"] / counts["throttled"]
        if self.hottest_c is not None:
            numbers["gpu/temp_c"] = self.hottest_c
        if self.energy_j is not None:
            numbers["energy_j"] = self.energy_j
        return numbers | {"gpus": self.gpus}


class GpuMonitor:
    """Samples the GPUs of this host into a CSV until `stop` or the end of the process.

    why_none: why there is nothing to sample. uuids: the GPUs to look at, as the driver names them; default all.
    """

    def __init__(self, output: Path, *, attempt: int, hz: float, uuids: Sequence[str] = ()):
        self.output, self.attempt, self.hz, self.uuids = output, attempt, hz, uuids
        self.why_none = why_no_driver()
        self._lock, self._totals = threading.Lock(), Totals()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="gpu monitor", daemon=True)
        if not self.why_none:
            self._thread.start()

    def read(self) -> dict[str, float]:
        """Return Totals.numbers of the samples since the last reading."""
        # The sampling thread adds to the new one from now on.
        with self._lock:
            totals, self._totals = self._totals, Totals()
        return totals.numbers()

    def stop(self) -> None:
        """End the sampling, which prints its report."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(STOP_WITHIN_S)

    def _sample(self) -> None:
        gpus = GpuSampler(self.uuids)
        if gpus.why_none:
            print(gpus.why_none, flush=True)
            return
        try:
            energy = RunEnergy(self.output, hz=self.hz)
            table = SampleTable.appended(self.output, host=socket.gethostname(), attempt=self.attempt)
            host, pace = HostNow(), Pace(self.hz)
            while not self._stopped.wait(pace.wait_s()):
                time_s, rows = pace.mark(), gpus.sample()
                energy.add(time_s, rows)
                with self._lock:
                    self._totals.add(rows, energy_j=energy.joules())
                table.write(time_s, rows, host.sample())
            table.close()
        except OSError as error:
            print(f"{self.output}: GPUs are not sampled any more ({error.strerror})", flush=True)
            return
        print(f"{self.output.name}: {gpus}, {pace.summary()}, {energy.summary()}", flush=True)
