"""The processor: cores and memory this process may use, its flags, whether it can compile, and how its C library and
kernels behave."""

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
TOPOLOGY = Path("/sys/devices/system/cpu")


def usable_cores() -> int:
    """Return cores this process may keep busy: its affinity, and a container's quota, which the core count does not
    show."""
    try:
        affinity = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not on macOS; some sandboxes refuse the call
        affinity = os.cpu_count() or 1
    return min(affinity, _quota() or affinity)


def _quota() -> int | None:
    """Return cores of the container's quota, by cgroup v2 or v1; None without one."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            quota, period = " ".join((CGROUP / name).read_text() for name in names).split()
            if quota in ("max", "-1"):
                return None
            return max(1, int(quota) // int(period))
        except (OSError, ValueError):
            continue
    return None


def physical_cores() -> int:
    """Return cores behind the usable ones, two threads of one core counted once; as many where the kernel does not
    say."""
    try:
        cores = {(TOPOLOGY / f"cpu{cpu}/topology/thread_siblings_list").read_text() for cpu in os.sched_getaffinity(0)}
    except (AttributeError, OSError):
        return usable_cores()
    return min(len(cores), usable_cores())


def memory_bytes() -> int:
    """Return memory this process may use: the machine's, or a container's limit where that is less."""
    import psutil

    total = psutil.virtual_memory().total
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # of cgroup v2, v1
        try:
            limit = (CGROUP / name).read_text().strip()
        except OSError:
            continue
        return min(total, int(limit)) if limit.isdecimal() else total
    return total


def available_bytes() -> int:
    """Return what of it is free, or can be freed without swapping."""
    import psutil

    return min(memory_bytes(), psutil.virtual_memory().available)


def has_memory_files() -> bool:
    """Return whether a file without a name can be had in memory; macOS has no such call, and some sandboxes refuse
    it."""
    try:
        os.close(os.memfd_create("probe"))
    except (AttributeError, OSError):
        return False
    return True


def peak_bytes() -> int:
    """Return the most resident memory that this process has had."""
    if peak := _proc_field("self/status", "VmHWM"):
        return int(peak.split()[0]) * 1024
    try:
        import resource
    except ImportError:  # Windows
        import psutil

        memory = psutil.Process().memory_info()
        return getattr(memory, "peak_wset", memory.rss)
    # Of the whole life of the process, a part before exec included.
    peak_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":  # which counts bytes, others KiB
        return peak_rss
    return 1024 * peak_rss


_training_called: float | None = None


def training_is_called() -> None:
    """Note that a training begins now in a process that had lived before, such as a notebook's."""
    global _training_called
    _training_called = time.time()


def process_start() -> float:
    """Return when this process began, or called the training, in seconds since 1970: imports came after it."""
    import psutil

    return _training_called or psutil.Process().create_time()


def cpu_name() -> str:
    """Return the processor's name as the system gives it."""
    if name := _proc_field("cpuinfo", "model name"):
        return name
    if sys.platform == "darwin":
        asked = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(asked, capture_output=True, text=True).stdout.strip() or platform.machine()
    return platform.processor() or platform.machine() or "CPU"


def cpu_flags() -> frozenset[str]:
    """Return instruction sets by the kernel's names (amx_bf16, avx512_bf16 ...); empty where the kernel does not list
    them."""
    return frozenset(_proc_field("cpuinfo", "flags").split())


def _proc_field(file: str, field: str) -> str:
    """Return the first value of a field of a file in /proc; nothing where the kernel does not list it."""
    try:
        lines = Path("/proc", file).read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")


def cpu_can_compile() -> bool:
    """Return whether torch.compile can build its C++ kernels here: the compiler it calls, and Python's headers."""
    compiler = os.environ.get("CXX", "g++")
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    return sys.platform == "linux" and shutil.which(compiler) is not None and headers.exists()


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of <malloc.h>


def keep_freed_memory() -> None:
    """Let the C library keep what is freed: a training step takes the same tensors as the one before.

    By default glibc gives large blocks back at once, and touching fresh ones costs a page fault every 4 KiB: a third
    of the time of a bf16 step (docs/log.md). Other C libraries stay as they are, and so does what the user sets by
    MALLOC_* variables.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, -1)  # never


# What torch computes on a CPU with MKL's vector functions.
_VECTOR_FUNCTIONS = (
    "acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2", "sin",
    "sinh", "cosh", "sqrt", "tan", "tanh",
)  # fmt: skip


def use_deterministic_kernels() -> None:
    """Compute the same sums in the same order at every run, which resuming to the bit needs; it costs no time on a
    CPU.

    Without it compiled code of several threads adds up the embedding's gradient atomically, in whatever order.
    """
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    # A guard for debugging that costs a pass over every new tensor
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    initialize_vector_functions()


def initialize_vector_functions() -> None:
    """Call MKL's vector functions on one number, which one thread computes, before several threads call them.

    MKL looks for the kernel of a function at its first call, and of two threads that make that call at once one may
    take a coarse kernel: four digits instead of seven, in one call of some process of a thousand (pytorch issue
    188792).
    """
    import torch

    for name in _VECTOR_FUNCTIONS:
        for dtype in (torch.float32, torch.float64):
            getattr(torch, name)(torch.full((1,), 0.5, dtype=dtype))
