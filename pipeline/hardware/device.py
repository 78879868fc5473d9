"""The device that trains, and what `auto` means on it."""

import os
import sys
from dataclasses import dataclass
from functools import cache
from typing import Literal

from pipeline.hardware import cpu, products
from pipeline.hardware.peaks import Accelerator, find_by_device_name, parse_hardware
from pipeline.hardware.visible import visible_gpus

Kind = Literal["cuda", "mps", "cpu"]


@dataclass(frozen=True)
class DeviceInfo:
    """Devices of one machine. kind "cuda" is NVIDIA's and AMD's; memory_gib is one device's (for cpu the machine's),
    None where only torch could tell.

    peak_flops: dense FLOP/s of one device by format (bfloat16, float16, tf32, float32, float8), None when unknown, and
    then MFU is not printed. source: where peaks and bandwidth come from.
    """

    kind: Kind
    name: str
    count: int
    memory_gib: float | None
    peak_flops: dict[str, float] | None
    bandwidth_bytes_s: float | None
    power_w: float | None
    source: str | None


@cache
def device_info() -> DeviceInfo:
    """The device of this process: CUDA or ROCm, else Apple's MPS, else the processor."""
    import torch

    use_cpu = _cpu_was_asked_for()
    if torch.cuda.is_available() and not use_cpu:
        # Not current_device(): until a rank has chosen its device that is 0 for all of them.
        rank = int(os.environ.get("LOCAL_RANK", 0))
        properties = torch.cuda.get_device_properties(rank if rank < torch.cuda.device_count() else 0)
        known = find_by_device_name(properties.name)
        return _device("cuda", properties.name, torch.cuda.device_count(), properties.total_memory / 2**30, known)
    kind: Kind = "mps" if torch.backends.mps.is_available() and not use_cpu else "cpu"
    return _device(kind, cpu.cpu_name(), 1, cpu.memory_bytes() / 2**30, None)


def planned_device(hardware: str) -> DeviceInfo:
    """`8xH100` as the devices of a plan. Raises ValueError with a sentence that lists the known names."""
    count, row = parse_hardware(hardware)
    return _device("cuda", row.name, count, row.memory_gib, row)


def device_without_torch() -> DeviceInfo:
    """As device_info, asked of the drivers alone: a plan starts at once, and holds no device."""
    gpus = [] if _cpu_was_asked_for() else visible_gpus(os.environ)
    memory_gib = cpu.memory_bytes() / 2**30
    if not gpus:
        return _device("cpu", cpu.cpu_name(), 1, memory_gib, None)
    if sys.platform == "darwin":
        return _device("mps", cpu.cpu_name(), 1, memory_gib, None)
    name, gpu_memory_gib = gpus[0]
    return _device("cuda", name or "AMD GPU", len(gpus), gpu_memory_gib, find_by_device_name(name or ""))


def _device(kind: Kind, name: str, count: int, memory_gib: float | None, known: Accelerator | None) -> DeviceInfo:
    return DeviceInfo(
        kind=kind,
        name=name,
        count=count,
        memory_gib=memory_gib,
        peak_flops=known.peak_flops if known else None,
        bandwidth_bytes_s=known.bandwidth_bytes_s if known else None,
        power_w=known.power_w if known else None,
        source=known.source if known else None,
    )


def leave_accelerators() -> None:
    """Train on the CPU, in this process: as the launcher's config file says it, before anything asks for the device."""
    os.environ["ACCELERATE_USE_CPU"] = "true"


def _cpu_was_asked_for() -> bool:
    """Whether the launcher was told to leave the accelerators alone (`use_cpu: true` in its config file)."""
    return os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")


def bf16_is_fast() -> bool:
    """Return whether bf16 is the format to train in here: tensor cores have it, or this CPU multiplies it faster."""
    import torch

    kind = device_info().kind
    if kind == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return kind == "cpu" and products.bfloat16_is_faster()


def can_compile() -> bool:
    """Whether torch.compile works here: Triton on CUDA and ROCm, a C++ compiler on the CPU; not on MPS."""
    kind = device_info().kind
    if kind == "cuda":
        from torch.utils._triton import has_triton

        return has_triton()
    return kind == "cpu" and cpu.can_compile()


def decide_bf16(value: bool | str | None, *, fp16: bool = False) -> bool:
    """train.bf16 as a fact: `auto` is yes where bf16 is fast and fp16 was not asked for."""
    if value == "auto":
        return not fp16 and bf16_is_fast()
    return bool(value)


def decide_compile(value: bool | str | None) -> bool:
    """train.torch_compile as a fact: `auto` is yes where a compiler is at hand."""
    return can_compile() if value == "auto" else bool(value)


def compute_format(*, bf16: bool, fp16: bool, tf32: bool, fp8: bool = False) -> str:
    """The format the matrices are multiplied in, as `peak_flops` names it; of the blocks' under train.fp8."""
    if fp8:
        return "float8"
    if bf16 or fp16:
        return "bfloat16" if bf16 else "float16"
    return "tf32" if tf32 and device_info().kind == "cuda" else "float32"
