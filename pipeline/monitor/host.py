"""The machine apart from its GPUs: processor, memory, disk and network, as rates since the last sample."""

import ctypes
import time
from importlib.util import find_spec
from pathlib import Path

import psutil

GIB = 2**30
MB = 1e6
JOULES_PER_KWH = 3.6e6
HOST_EVERY_S = 1.0  # reading the whole machine's counters takes longer than asking a GPU


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


def why_no_driver() -> str:
    """Return why GPUs cannot be asked on this machine, without starting the driver; "" where they can."""
    if find_spec("pynvml") is None:
        return "no GPU numbers: the package nvidia-ml-py is not installed: pip install nvidia-ml-py"
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return "no GPU numbers: this machine has no NVIDIA driver"
    return ""
