"""The device that trains, and what `auto` means on it."""

import os
from dataclasses import dataclass
from functools import cache
from typing import Literal

from pipeline.hardware import cpu
from pipeline.hardware.peaks import find_by_device_name

Kind = Literal["cuda", "mps", "cpu"]


@dataclass(frozen=True)
class DeviceInfo:
    """Devices of one machine. kind "cuda" is NVIDIA's and AMD's; memory_gib is one device's (for cpu the machine's).

    peak_flops: dense FLOP/s of one device by format (bfloat16, float16, tf32, float32, float8), None when unknown, and
    then MFU is not printed. source: where peaks and bandwidth come from.
    """

    kind: Kind
    name: str
    count: int
    memory_gib: float
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
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        known = find_by_device_name(properties.name)
        return DeviceInfo(
            kind="cuda",
            name=properties.name,
            count=torch.cuda.device_count(),
            memory_gib=properties.total_memory / 2**30,
            peak_flops=known.peak_flops if known else None,
            bandwidth_bytes_s=known.bandwidth_bytes_s if known else None,
            power_w=known.power_w if known else None,
            source=known.source if known else None,
        )
    kind: Kind = "mps" if torch.backends.mps.is_available() and not use_cpu else "cpu"
    return DeviceInfo(
        kind=kind,
        name=cpu.cpu_name(),
        count=1,
        memory_gib=cpu.memory_bytes() / 2**30,
        peak_flops=None,
        bandwidth_bytes_s=None,
        power_w=None,
        source=None,
    )


def _cpu_was_asked_for() -> bool:
    """Whether the launcher was told to leave the accelerators alone (`use_cpu: true` in its config file)."""
    return os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")


def bf16_is_fast() -> bool:
    """Whether bf16 is the format to train in here: tensor cores that have it, or a CPU with AMX."""
    import torch

    kind = device_info().kind
    if kind == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return kind == "cpu" and cpu.multiplies_bf16_fast()


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


def compute_format(*, bf16: bool, fp16: bool, tf32: bool) -> str:
    """The format the matrices are multiplied in, as `peak_flops` names it."""
    if bf16 or fp16:
        return "bfloat16" if bf16 else "float16"
    return "tf32" if tf32 and device_info().kind == "cuda" else "float32"
