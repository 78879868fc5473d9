"""The machine beside the devices: processor, memory, disk and network, as rates since the last sample."""

import time
from pathlib import Path

import psutil

GIB = 2**30
MB = 1e6


class HostSampler:
    """Numbers of this host and process, by the names of docs/metrics.md.

    Rates are means since the sample before, so the first sample has none; what the system does not tell is left out.
    """

    def __init__(self, folder: str | Path = "."):
        self.folder = Path(folder)
        self.process = psutil.Process()
        self.before: tuple[float, dict[str, int]] | None = None
        psutil.cpu_percent()  # its first answer is a meaningless 0

    def sample(self) -> dict[str, float]:
        """host/cpu_pct of all cores, mem/host_* of the machine and this process, disk/* and net/* of the whole host."""
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
    """Bytes since boot, by the name of their rate; a container may hide disks or network."""
    disk, net = psutil.disk_io_counters(), psutil.net_io_counters()
    bytes_by_name: dict[str, int] = {}
    if disk is not None:
        bytes_by_name |= {"disk/read_mb_s": disk.read_bytes, "disk/write_mb_s": disk.write_bytes}
    if net is not None:
        bytes_by_name |= {"net/sent_mb_s": net.bytes_sent, "net/received_mb_s": net.bytes_recv}
    return bytes_by_name
