"""The processor: cores and memory this process may use, its flags, whether it can compile, how fast it multiplies."""

import ctypes
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pipeline.process.errors import CannotWriteError
from pipeline.process.storage import cache_dir, read_sealed_json, write_sealed_json

CGROUP = Path("/sys/fs/cgroup")
TOPOLOGY = Path("/sys/devices/system/cpu")


def usable_cores() -> int:
    """Return cores this process may keep busy: its affinity, and a container's quota, which the core count does not show."""
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
            return None if quota in ("max", "-1") else max(1, int(quota) // int(period))
        except (OSError, ValueError):
            continue
    return None


def physical_cores() -> int:
    """Return cores behind the usable ones, two threads of one core counted once; as many where the kernel does not say."""
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
    """Return whether a file without a name can be had in memory; macOS has no such call, and some sandboxes refuse it."""
    try:
        os.close(os.memfd_create("probe"))
    except (AttributeError, OSError):
        return False
    return True


def peak_bytes() -> int:
    """Return the most resident memory that this process has had."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows
        import psutil

        memory = psutil.Process().memory_info()
        return getattr(memory, "peak_wset", memory.rss)
    # Of the whole life of the process, a part before exec included; macOS counts bytes, others KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def process_start() -> float:
    """Return when this process began, in seconds since 1970: imports came after it."""
    import psutil

    return psutil.Process().create_time()


def cpu_name() -> str:
    """Return the processor's name as the system gives it."""
    for line in _cpuinfo():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    if sys.platform == "darwin":
        asked = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(asked, capture_output=True, text=True).stdout.strip() or platform.machine()
    return platform.processor() or platform.machine() or "CPU"


def cpu_flags() -> frozenset[str]:
    """Return instruction sets by the kernel's names (amx_bf16, avx512_bf16 ...); empty where the kernel does not list them."""
    for line in _cpuinfo():
        if line.startswith("flags"):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def can_compile() -> bool:
    """Return whether torch.compile can build its C++ kernels here: the compiler it calls, and Python's headers."""
    compiler = os.environ.get("CXX", "g++")
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    return sys.platform == "linux" and shutil.which(compiler) is not None and headers.exists()


def set_threads(local_processes: int = 1, *, kept: int | None = None) -> int:
    """Share the cores out among the processes of this machine, and return the threads that torch now uses.

    Where two threads share a core, one of each core is used unless both were measured to be faster (best_threads). The number
    changes the last bits of fp32 sums, and launchers set it to 1 unasked: it is set here, and printed and saved by the caller.
    kept: of a run that goes on, which stays where it is one of the two numbers of this machine, whatever is measured now.
    """
    import torch

    choices = {max(1, cores // local_processes) for cores in (physical_cores(), usable_cores())}
    threads = kept if kept in choices else max(1, best_threads() // local_processes)
    torch.set_num_threads(threads)
    return threads


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of <malloc.h>


def keep_freed_memory() -> None:
    """Let the C library keep what is freed: a training step takes the same tensors as the one before.

    By default glibc gives large blocks back at once, and touching fresh ones costs a page fault every 4 KiB: a third of the
    time of a bf16 step (docs/log.md). Other C libraries stay as they are, and so does what the user sets by MALLOC_* variables.
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
    *("acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2", "sin", "sinh"),
    *("cosh", "sqrt", "tan", "tanh"),
)  # fmt: skip


def use_deterministic_kernels() -> None:
    """Compute the same sums in the same order at every run, which resuming to the bit needs; it costs no time on a CPU.

    Without it compiled code of several threads adds up the embedding's gradient atomically, in whatever order.
    """
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a guard for debugging that costs a pass over every new tensor
    settle_vector_functions()


def settle_vector_functions() -> None:
    """Call MKL's vector functions on one number, which one thread computes, before several threads call them.

    MKL looks for the kernel of a function at its first call, and of two threads that make that call at once one may take a
    coarse kernel: four digits instead of seven, in one call of some process of a thousand (pytorch issue 188792).
    """
    import torch

    for name in _VECTOR_FUNCTIONS:
        for dtype in (torch.float32, torch.float64):
            getattr(torch, name)(torch.full((1,), 0.5, dtype=dtype))


# Measured speed of matrix products on this processor by dtype, cached: its flags do not tell it.
#
# An EPYC with avx512_bf16 and no AMX trains in bfloat16 1.8 times as fast as in float32, other processors emulate the type
# and lose by it (docs/log.md). The measurement takes a fraction of a second on one thread.

WIDTH = 512  # of the square matrices: as wide as the blocks of a small model
REPEATS = 8  # of each dtype in turn; the best counts, which other programs on the machine disturb least
GAIN = 1.1  # of both threads of a core over one: they share its units, and the other programs of the run find a thread free
FASTER = 1.5  # what bfloat16 must gain in the products, so that the step gains too: its other half stays as it is


@dataclass(frozen=True)
class ProductRates:
    """FLOP/s of one thread in square products, and when they were measured (seconds since 1970)."""

    float32: float
    bfloat16: float
    time: float

    @property
    def bfloat16_is_faster(self) -> bool:
        return self.bfloat16 >= FASTER * self.float32


_decided: list[bool] = []


def bfloat16_is_faster() -> bool:
    """Return whether bfloat16 is the faster type to train in here: as decided for all ranks, else as measured.

    Without torch, and nothing kept, the processor's flags are the guess.
    """
    if _decided:
        return _decided[0]
    rates = product_rates()
    if rates is not None:
        return rates.bfloat16_is_faster
    return bool({"amx_bf16", "avx512_bf16"} & cpu_flags())


def decide_for_all_ranks(faster: bool) -> None:
    """Use this answer in this process from now on: ranks that measured for themselves could train in two types."""
    _decided[:] = [faster]


def product_rates() -> ProductRates | None:
    """Return the rates of this processor as kept in the cache, else measured now; None without torch."""
    rates = kept_rates()
    if rates is None and importlib.util.find_spec("torch") is not None:
        rates = measure()
        with suppress(OSError, CannotWriteError):
            write_sealed_json(_place(), asdict(rates))
    return rates


def kept_rates() -> ProductRates | None:
    """Return what was measured on such a processor with this torch, without torch; None when nothing was."""
    try:
        return ProductRates(**read_sealed_json(_place()))
    except (OSError, ValueError, TypeError, PackageNotFoundError, CannotWriteError):
        return None


def measure() -> ProductRates:
    """Multiply matrices of both dtypes in turn on one thread, and return the best rate of each."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on several a product waits for the slowest, and another program makes one slow
    try:
        pairs = {
            dtype: [torch.ones(WIDTH, WIDTH, dtype=dtype) for _ in range(2)]
            for dtype in (torch.float32, torch.bfloat16)
        }
        best = dict.fromkeys(pairs, float("inf"))
        for repeat in range(1 + REPEATS):
            for dtype, (a, b) in pairs.items():
                began = time.perf_counter()
                a @ b
                if repeat:  # the first one looks for its kernel
                    best[dtype] = min(best[dtype], time.perf_counter() - began)
    finally:
        torch.set_num_threads(threads)
    flops = 2 * WIDTH**3
    return ProductRates(float32=flops / best[torch.float32], bfloat16=flops / best[torch.bfloat16], time=time.time())


def best_threads() -> int:
    """Return the threads to train with: one a core, or all that the cores have where products are faster so by GAIN.

    They are measured once on a machine with two threads a core, and kept.
    """
    physical, usable = physical_cores(), usable_cores()
    if physical == usable:
        return usable
    kept = f".{physical}-{usable}.json"
    with suppress(OSError, ValueError, TypeError, KeyError, PackageNotFoundError, CannotWriteError):
        return usable if read_sealed_json(_place(kept))["gain"] >= GAIN else physical
    gain = seconds_of_product(physical) / seconds_of_product(usable)
    with suppress(OSError, CannotWriteError):
        write_sealed_json(_place(kept), {"gain": gain, "time": time.time()})
    return usable if gain >= GAIN else physical


def seconds_of_product(threads: int) -> float:
    """Return the best time of a matrix product on so many threads, in the dtype that is the faster one here."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        a, b = torch.ones(2, 4 * WIDTH, WIDTH, dtype=torch.bfloat16 if bfloat16_is_faster() else torch.float32)
        best = float("inf")
        for _ in range(1 + REPEATS):
            began = time.perf_counter()
            a @ b.T
            best = min(best, time.perf_counter() - began)
    finally:
        torch.set_num_threads(before)
    return best


def _place(suffix: str = ".json") -> Path:
    flags = sorted(flag for flag in cpu_flags() if flag.startswith(("avx", "amx", "fma", "asimd", "sve", "bf16")))
    machine = "\n".join([cpu_name(), *flags, version("torch")])
    return cache_dir() / "processors" / f"{hashlib.sha256(machine.encode()).hexdigest()[:16]}{suffix}"
