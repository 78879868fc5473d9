"""Four levels of a CUDA device's memory, which are often taken for each other."""

from typing import Any

import torch

GIB = 2**30


class DeviceMemory:
    """What PyTorch's allocator and the driver say, at the moments of logging; nothing where the device is not CUDA.

    run_peak: bytes allocated at most, over all attempts; start_peak: in this process. cuda: torch.cuda, or what stands in for
    it in a test.
    """

    def __init__(self, device: torch.device, *, cuda: Any = torch.cuda):
        self.device, self.cuda = device, cuda
        self.run_peak = self.start_peak = 0

    def read(self) -> dict[str, float]:
        """mem/* of this rank; the interval of peak_allocated begins again."""
        if self.device.type != "cuda":
            return {}
        stats = self.cuda.memory_stats(self.device)
        free, total = self.cuda.mem_get_info(self.device)
        peak = stats["allocated_bytes.all.peak"]
        self.cuda.reset_peak_memory_stats(self.device)
        self.start_peak = max(self.start_peak, peak)
        self.run_peak = max(self.run_peak, peak)
        return {
            "mem/allocated_gib": stats["allocated_bytes.all.current"] / GIB,
            "mem/reserved_gib": stats["reserved_bytes.all.current"] / GIB,
            "mem/peak_allocated_gib": peak / GIB,
            "mem/run_peak_allocated_gib": self.run_peak / GIB,
            "mem/device_used_gib": (total - free) / GIB,
            "mem/alloc_retries": stats["num_alloc_retries"],
            "mem/ooms": stats["num_ooms"],
        }

    def peak(self) -> int:
        """Bytes allocated at most in this process since its first reading, whatever was read meanwhile."""
        return max(self.start_peak, self.cuda.max_memory_allocated(self.device))
