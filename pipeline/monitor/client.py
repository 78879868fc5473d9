"""The training's side of monitoring: the host's own numbers, and those of the process that samples its GPUs.

What samples is another process (sampler.py), so that a training loads none of it.
"""

import ctypes
import mmap
import struct
import subprocess
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from math import isnan
from pathlib import Path

import psutil

from pipeline.process import commands

GIB = 2**30
JOULES_PER_KWH = 3.6e6

# The machine beside the devices: processor, memory, disk and network, as rates since the last sample.

MB = 1e6


class HostSampler:
    """Reads numbers of this host and process, by the names of docs/metrics.md.

    Rates are means since the sample before, so the first sample has none; what the system does not tell is left out.
    """

    def __init__(self, folder: str | Path = "."):
        self.folder = Path(folder)
        self.process = psutil.Process()
        self.before: tuple[float, dict[str, int]] | None = None
        psutil.cpu_percent()  # its first answer is a meaningless 0

    def sample(self) -> dict[str, float]:
        """Return host/cpu_pct of all cores, mem/host_* of the machine and this process, disk/* and net/* of the whole
        host."""
        numbers = {
            "mem/host_rss_gib": self.process.memory_info().rss / GIB,
            "mem/host_used_pct": psutil.virtual_memory().percent,
            "disk/free_gib": psutil.disk_usage(str(self.folder)).free / GIB,
        }
        now, counters = time.monotonic(), _counters()
        if self.before is not None:
            elapsed = max(now - self.before[0], 1e-9)
            numbers["host/cpu_pct"] = psutil.cpu_percent()
            for name, value in counters.items():
                if name in self.before[1]:
                    numbers[name] = (value - self.before[1][name]) / MB / elapsed
        self.before = now, counters
        return numbers


def _counters() -> dict[str, int]:
    """Return bytes since boot, by the name of their rate; a container may hide disks or network."""
    disk, net = psutil.disk_io_counters(), psutil.net_io_counters()
    bytes_by_name: dict[str, int] = {}
    if disk is not None:
        bytes_by_name |= {"disk/read_mb_s": disk.read_bytes, "disk/write_mb_s": disk.write_bytes}
    if net is not None:
        bytes_by_name |= {"net/sent_mb_s": net.bytes_sent, "net/received_mb_s": net.bytes_recv}
    return bytes_by_name


# Totals of the GPUs, in memory that the sampler writes and the training reads without asking it or waiting for it.

MEANS = ("util_pct", "mem_busy_pct", "power_w", "power_pct", "sm_clock_mhz")
NAMES = [*MEANS, *(f"{name} n" for name in MEANS), "throttled", "throttled n", "gpus", "energy_j", "hottest_c"]
READING = struct.Struct("<Q")  # which reading the reader waits for; it alone writes this
TOTALS = struct.Struct(f"<Q{len(NAMES)}dQ")
SIZE = READING.size + TOTALS.size


class TotalsReader:
    """Reads the totals in the training. descriptor: an open file of SIZE bytes that both processes map."""

    def __init__(self, descriptor: int):
        self.memory = mmap.mmap(descriptor, SIZE)
        self.before = dict.fromkeys(NAMES, 0.0)
        self.samples = self.reading = 0

    def read(self) -> dict[str, float]:
        """Return, by the names of docs/metrics.md, means over GPUs and samples since the last reading that had one;
        energy_j and gpus beside them, without a prefix. Nothing when no sample was taken since."""
        now = self._whole()
        if now is None:
            return {}
        self.reading += 1
        READING.pack_into(self.memory, 0, self.reading)
        before, self.before = self.before, now
        numbers = {
            f"gpu/{name}": (now[name] - before[name]) / count
            for name in MEANS
            if (count := now[f"{name} n"] - before[f"{name} n"])
        }
        if samples := now["throttled n"] - before["throttled n"]:
            numbers["gpu/throttled_pct"] = 100 * (now["throttled"] - before["throttled"]) / samples
        if not isnan(now["hottest_c"]):
            numbers["gpu/temp_c"] = now["hottest_c"]
        if not isnan(now["energy_j"]):
            numbers["energy_j"] = now["energy_j"]
        return numbers | {"gpus": now["gpus"]}

    def _whole(self) -> dict[str, float] | None:
        """Return the totals after a sample that was not read yet. The sample's number is at both ends: two different
        ones mean that it was being written; the next reading then has it."""
        first, *values, last = TOTALS.unpack(self.memory[READING.size : SIZE])
        if first != last or last == self.samples:
            return None
        self.samples = last
        return dict(zip(NAMES, values, strict=True))


# Start the sampler, read its totals, print what it reports at its end.

SAMPLER = Path(__file__).with_name("sampler.py")
REPORT_WITHIN_S = 10.0  # a driver that hangs must not hold the end of a run


class GpuMonitor:
    """Samples the GPUs of this host into a CSV, from a process of its own, until `stop` or the end of this one.

    why_none: why there is none. Of a process that ends early the next reading prints the reason.
    """

    def __init__(self, output: Path, *, attempt: int, hz: float, gpus: Sequence[str] = ()):
        self.process: subprocess.Popen[str] | None = None
        self.why_none = why_no_driver()
        if self.why_none:
            return
        with tempfile.TemporaryFile() as shared:
            shared.truncate(SIZE)
            self.totals = TotalsReader(shared.fileno())
            options = [f"--attempt={attempt}", f"--hz={hz}", f"--descriptor={shared.fileno()}", "--gpus", *gpus]
            self.process = commands.start(SAMPLER, output, *options, text=True, pass_fds=[shared.fileno()])

    def read(self) -> dict[str, float]:
        """Return what TotalsReader.read does; {} without a sampler."""
        if self.process is None:
            return {}
        if self.process.poll() is not None:
            self.stop()
            return {}
        return self.totals.read()

    def stop(self) -> None:
        """End the sampler and print its report."""
        if self.process is None:
            return
        process, self.process = self.process, None
        try:
            report = process.communicate(timeout=REPORT_WITHIN_S)[1]
        except subprocess.TimeoutExpired:
            process.kill()
            report = process.communicate()[1]
        if report.strip():
            print(report.strip(), flush=True)


def why_no_driver() -> str:
    """Return why GPUs cannot be asked on this machine, without starting the driver; "" where they can."""
    if find_spec("pynvml") is None:
        return "no GPU numbers: the package nvidia-ml-py is not installed: pip install nvidia-ml-py"
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return "no GPU numbers: this machine has no NVIDIA driver"
    return ""
