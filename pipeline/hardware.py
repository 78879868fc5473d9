"""The machine that a run trains on: its processors, memory and devices, and what they can do."""

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from pipeline.process.user_code import import_built_in

# The processor: cores and memory this process may use, its flags, whether it can compile, how fast it multiplies.

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
    if peak := _proc_field("self/status", "VmHWM"):
        return int(peak.split()[0]) * 1024
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
    if name := _proc_field("cpuinfo", "model name"):
        return name
    if sys.platform == "darwin":
        asked = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(asked, capture_output=True, text=True).stdout.strip() or platform.machine()
    return platform.processor() or platform.machine() or "CPU"


def cpu_flags() -> frozenset[str]:
    """Return instruction sets by the kernel's names (amx_bf16, avx512_bf16 ...); empty where the kernel does not list them."""
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


def set_threads(local_processes: int = 1, *, kept: int | None = None) -> int:
    """Share the cores out among the processes of this machine, and return the threads that torch now uses.

    Where two threads share a core, one of each core is used unless both were measured to be faster (preflight/devices.py). The number
    changes the last bits of fp32 sums, and launchers set it to 1 unasked: it is set here, and printed and saved by the caller.
    kept: of a run that goes on, which stays where it is one of the two numbers of this machine, whatever is measured now.
    """
    import torch

    choices = {max(1, cores // local_processes) for cores in (physical_cores(), usable_cores())}
    if kept not in choices:
        kept = max(1, import_built_in("preflight.devices:best_threads")() // local_processes)
    torch.set_num_threads(kept)
    return kept


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
    initialize_vector_functions()


def initialize_vector_functions() -> None:
    """Call MKL's vector functions on one number, which one thread computes, before several threads call them.

    MKL looks for the kernel of a function at its first call, and of two threads that make that call at once one may take a
    coarse kernel: four digits instead of seven, in one call of some process of a thousand (pytorch issue 188792).
    """
    import torch

    for name in _VECTOR_FUNCTIONS:
        for dtype in (torch.float32, torch.float64):
            getattr(torch, name)(torch.full((1,), 0.5, dtype=dtype))


# The format that a processor trains in.

_decided: list[bool] = []


def bfloat16_is_faster() -> bool:
    """Return whether bfloat16 is the faster type to train in here: as decided for all ranks, else as measured.

    Without torch, and nothing kept, the processor's flags are the guess.
    """
    if _decided:
        return _decided[0]
    rates = import_built_in("preflight.devices:product_rates")()
    if rates is not None:
        return rates.bfloat16_is_faster
    return bool({"amx_bf16", "avx512_bf16"} & cpu_flags())


def decide_for_all_ranks(faster: bool) -> None:
    """Use this answer in this process from now on: ranks that measured for themselves could train in two types."""
    _decided[:] = [faster]


# The device that trains, and what `auto` means on it.

Kind = Literal["cuda", "mps", "cpu"]


@dataclass(frozen=True)
class DeviceInfo:
    """Devices of one machine. kind "cuda" is NVIDIA's and AMD's; memory_gib is one device's (for cpu the machine's),
    None where only torch could tell. hosts: machines of this kind that train, or that a plan is for.

    peak_flops: dense FLOP/s of one device by format (bfloat16, float16, tf32, float32, float8), None when unknown, and
    then MFU is not printed. source: where peaks and bandwidth come from.
    """

    kind: Kind
    name: str
    count: int
    memory_gib: float | None
    peak_flops: dict[str, float] | None = None
    bandwidth_bytes_s: float | None = None
    power_w: float | None = None
    source: str | None = None
    hosts: int = 1


@cache
def device_info() -> DeviceInfo:
    """Return the device of this process: CUDA or ROCm, else Apple's MPS, else the processor."""
    import torch

    use_cpu = cpu_was_asked_for()
    if torch.cuda.is_available() and not use_cpu:
        # Not current_device(): until a rank has chosen its device that is 0 for all of them.
        rank = int(os.environ.get("LOCAL_RANK", 0))
        properties = torch.cuda.get_device_properties(rank if rank < torch.cuda.device_count() else 0)
        given = (properties.name, torch.cuda.device_count(), properties.total_memory / 2**30)
        return import_built_in("preflight.devices:device_of_driver")(*given)
    kind: Kind = "mps" if torch.backends.mps.is_available() and not use_cpu else "cpu"
    return DeviceInfo(kind, cpu_name(), 1, memory_bytes() / 2**30)


def shards_model() -> bool:
    """Return whether processes share a model: FSDP2 (accelerate_configs/fsdp2.yaml) or tensor parallelism (tp.yaml)."""
    fsdp = os.environ.get("FSDP_VERSION") == "2" and int(os.environ.get("WORLD_SIZE", 1)) > 1
    return fsdp or tensor_parallel_size() > 1


def tensor_parallel_size() -> int:
    """Return how many processes compute each layer together, on the same rows (accelerate_configs/tp.yaml); 1 without it."""
    return parallelism_size("tp") if int(os.environ.get("WORLD_SIZE", 1)) > 1 else 1


def batch_ranks(processes: int) -> int:
    """Return among how many ranks the rows of a step are dealt: those that share layers read the same ones."""
    return processes // tensor_parallel_size()


def batch_rank(rank: int) -> int:
    """Return the place of a rank among batch_ranks: those that share layers have the same one."""
    return rank // tensor_parallel_size()


def model_replicas() -> int:
    """Return how often the ranks hold the whole of a sharded model: once under FSDP2, more often under HSDP (accelerate_configs/hsdp.yaml)."""
    return parallelism_size("dp_replicate") if shards_model() else 1


def model_shards(processes: int) -> int:
    """Return how many processes share a copy of the model: 1 where it is not sharded."""
    return processes // model_replicas() if shards_model() else 1


def parallelism_size(name: str) -> int:
    """Return a size of accelerate's parallelism_config (dp_replicate, dp_shard, tp, cp, sp); 1 where it is not given."""
    return int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", 1))


def leave_accelerators() -> None:
    """Train on the CPU, in this process: as the launcher's config file says it, before anything asks for the device."""
    os.environ["ACCELERATE_USE_CPU"] = "true"


def cpu_was_asked_for() -> bool:
    """Return whether the launcher is to leave the accelerators alone (`use_cpu: true` in its config file)."""
    return os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")


def bf16_is_fast() -> bool:
    """Return whether bf16 is the format to train in here: tensor cores have it, or this CPU multiplies it faster."""
    import torch

    kind = device_info().kind
    if kind == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return kind == "cpu" and bfloat16_is_faster()


def can_compile() -> bool:
    """Return whether torch.compile works here: Triton on CUDA and ROCm, a C++ compiler on the CPU; not on MPS.

    torch's own switches turn it into nothing, and a run would be recorded as compiled.
    """
    if "1" in (os.environ.get("TORCH_COMPILE_DISABLE"), os.environ.get("TORCHDYNAMO_DISABLE")):
        return False
    kind = device_info().kind
    if kind == "cuda":
        from torch.utils._triton import has_triton

        return has_triton()
    return kind == "cpu" and cpu_can_compile()


def decide_bf16(value: bool | str | None, *, fp16: bool = False) -> bool:
    """Return train.bf16 resolved: `auto` is True where bf16 is fast and fp16 was not asked for."""
    if value == "auto":
        return not fp16 and bf16_is_fast()
    return bool(value)


def decide_compile(value: bool | str | None) -> bool:
    """Return train.torch_compile resolved: `auto` is True where a compiler is at hand and the model is not sharded."""
    return can_compile() and not shards_model() if value == "auto" else bool(value)


def compute_format(*, bf16: bool, fp16: bool, tf32: bool, fp8: bool = False) -> str:
    """Return the format the matrices are multiplied in, as `peak_flops` names it; of the blocks' under train.fp8."""
    if fp8:
        return "float8"
    if bf16 or fp16:
        return "bfloat16" if bf16 else "float16"
    return "tf32" if tf32 and device_info().kind == "cuda" else "float32"
