"""Accelerators: what their makers publish, hardware that a plan is for, and what the drivers of this machine list.

All of it works without torch and before anything holds a device. A training asks torch for its own device (hardware/device.py).
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from glob import glob
from pathlib import Path
from typing import Literal

from pipeline.hardware.processor import cpu_name, memory_bytes

Kind = Literal["cuda", "mps", "cpu"]


@dataclass(frozen=True)
class DeviceInfo:
    """Devices of one machine. kind "cuda" is NVIDIA's and AMD's; memory_gib is one device's (for cpu the machine's),
    None where only torch could tell. hosts: machines of this kind that train, or that a plan is for.

    peak_flops: dense FLOP/s of one device by format (bfloat16, float16, tf32, float32, float8), None when unknown, and
    then MFU is not printed. power_w: rated.
    """

    kind: Kind
    name: str
    count: int
    memory_gib: float | None
    peak_flops: dict[str, float] | None = None
    power_w: float | None = None
    hosts: int = 1


# Accelerators we know: dense peak FLOP/s by number format, memory, power, each with its source.
TERA = 1e12


@dataclass(frozen=True)
class Accelerator:
    """One model of accelerator. peak_flops: FLOP/s by format; the rest as the maker rates it.

    memory_gib: the driver keeps 1 to 8 % of it for itself and for error correction.
    """

    name: str
    device_name: str  # regular expression for the whole name that the driver gives
    peak_flops: dict[str, float]
    memory_gib: float
    power_w: float | None
    source: str


def _peaks(
    bfloat16: float | None = None,
    *,
    float16: float | None = None,
    tf32: float | None = None,
    float32: float,
    float8: float | None = None,
):
    """Return FLOP/s by format from TFLOP/s; float16 runs at bfloat16's rate where both exist."""
    rates = {"bfloat16": bfloat16, "float16": float16 or bfloat16, "tf32": tf32, "float32": float32, "float8": float8}
    return {name: rate * TERA for name, rate in rates.items() if rate is not None}


H100_SXM = _peaks(989.5, tf32=494.5, float32=67, float8=1979)
A100 = _peaks(312, tf32=156, float32=19.5)
# fmt: off
ACCELERATORS = (
    Accelerator("H100", r"NVIDIA H100 80GB HBM3", H100_SXM, 80, 700, "https://www.nvidia.com/en-us/data-center/h100/ (SXM; sparse rates halved)"),
    Accelerator("H100-PCIe", r"NVIDIA H100 PCIe", _peaks(756, tf32=378, float32=51, float8=1513), 80, 350, "https://www.nvidia.com/en-us/data-center/h100/ (PCIe datasheet 2022; sparse rates halved)"),
    Accelerator("H200", r"NVIDIA H200", H100_SXM, 140, 700, "https://www.nvidia.com/en-us/data-center/h200/ (SXM; sparse rates halved)"),
    Accelerator("B200", r"NVIDIA B200", _peaks(2250, float32=75, float8=4500), 180, 1000, "https://www.nvidia.com/en-us/data-center/hgx/ (B200, an eighth of the board; sparse rates halved)"),
    Accelerator("A100", r"NVIDIA A100-SXM4-80GB", A100, 80, 400, "https://www.nvidia.com/en-us/data-center/a100/"),
    Accelerator("A100-40GB", r"NVIDIA A100-SXM4-40GB", A100, 40, 400, "https://www.nvidia.com/en-us/data-center/a100/"),
    Accelerator("A100-PCIe", r"NVIDIA A100 80GB PCIe", A100, 80, 300, "https://www.nvidia.com/en-us/data-center/a100/"),
    Accelerator("A100-PCIe-40GB", r"NVIDIA A100-PCIE-40GB", A100, 40, 250, "https://www.nvidia.com/en-us/data-center/a100/"),
    Accelerator("A40", r"NVIDIA A40", _peaks(149.7, tf32=74.8, float32=37.4), 48, 300, "https://www.nvidia.com/en-us/data-center/a40/"),
    Accelerator("A10", r"NVIDIA A10", _peaks(125, tf32=62.5, float32=31.2), 24, 150, "https://www.nvidia.com/en-us/data-center/products/a10-gpu/"),
    Accelerator("L40S", r"NVIDIA L40S", _peaks(362, tf32=183, float32=91.6, float8=733), 48, 350, "https://www.nvidia.com/en-us/data-center/l40s/"),
    Accelerator("L40", r"NVIDIA L40", _peaks(181, tf32=90.5, float32=90.5, float8=362), 48, 300, "https://www.nvidia.com/en-us/data-center/l40/"),
    Accelerator("L4", r"NVIDIA L4", _peaks(121, tf32=60, float32=30.3, float8=242.5), 24, 72, "https://www.nvidia.com/en-us/data-center/l4/ (sparse rates halved)"),
    Accelerator("T4", r"(NVIDIA |)(Tesla |)T4", _peaks(float16=65, float32=8.1), 16, 70, "https://www.nvidia.com/en-us/data-center/tesla-t4/ (no bfloat16)"),
    Accelerator("V100", r"(NVIDIA |)Tesla V100-SXM2-(16|32)GB", _peaks(float16=125, float32=15.7), 16, 300, "https://www.nvidia.com/en-us/data-center/v100/ (no bfloat16)"),
    Accelerator("RTX5090", r"NVIDIA GeForce RTX 5090", _peaks(209.5, tf32=104.8, float32=104.8, float8=419), 32, 575, "NVIDIA architecture whitepaper, tensor rates with FP32 accumulation: Blackwell"),
    Accelerator("RTX4090", r"NVIDIA GeForce RTX 4090", _peaks(165.2, tf32=82.6, float32=82.6, float8=330.3), 24, 450, "NVIDIA architecture whitepaper, tensor rates with FP32 accumulation: Ada"),
    Accelerator("RTX3090", r"NVIDIA GeForce RTX 3090", _peaks(71, tf32=35.6, float32=35.6), 24, 350, "NVIDIA architecture whitepaper, tensor rates with FP32 accumulation: Ampere GA102"),
    Accelerator("MI300X", r"AMD Instinct MI300X( OAM|)", _peaks(1307.4, tf32=653.7, float32=163.4, float8=2614.9), 192, 750, "AMD Instinct MI300X data sheet"),
)
# fmt: on


def find_by_device_name(device_name: str) -> Accelerator | None:
    """Return the table's row for the whole name a driver gives; a laptop's or a cut-down variant's name is another name."""
    return next((row for row in ACCELERATORS if re.fullmatch(row.device_name, device_name.strip())), None)


def device_of_driver(name: str, count: int, memory_gib: float | None) -> DeviceInfo:
    """Return the accelerators of this machine by the name that their driver gives, on the hosts of this training."""
    return _rated(name, count, memory_gib, find_by_device_name(name), hosts=_launched_hosts())


def _rated(name: str, count: int, memory_gib: float | None, known: Accelerator | None, *, hosts: int) -> DeviceInfo:
    device = DeviceInfo("cuda", name, count, memory_gib, hosts=hosts)
    if known is None:
        return device
    return replace(device, peak_flops=known.peak_flops, power_w=known.power_w)


def _launched_hosts() -> int:
    """Return how many machines the launcher started ranks on; 1 without one."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    return max(1, ranks // int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))


def parse_hardware(text: str) -> tuple[int, int, Accelerator]:
    """Return `64x8xH100`, `8xH100` or `H100` as hosts, devices of each and row. Raises ValueError with a sentence that lists the known names."""
    match = re.fullmatch(r"(?:(?:(\d+)\s*[xX*]\s*)?(\d+)\s*[xX*]\s*)?(.+)", text.strip())
    if match:
        hosts, count = int(match[1] or 1), int(match[2] or 1)
        wanted = match[3].lower().replace(" ", "").replace("_", "-")
        for row in ACCELERATORS:
            name = row.name.lower()
            if wanted in (name, name.replace("-", "")) and hosts * count:
                return hosts, count, row
    names = " ".join(row.name for row in ACCELERATORS)
    raise ValueError(
        f"{text!r} is no hardware we know, and a plan for it would be a guess. Write <count>x<name> or <hosts>x<count>x<name>, one of: {names}."
    )


def planned_device(hardware: str) -> DeviceInfo:
    """Return `8xH100`, `64x8xH100` as the devices of a plan. Raises ValueError with a sentence that lists the known names."""
    hosts, count, row = parse_hardware(hardware)
    return _rated(row.name, count, row.memory_gib, row, hosts=hosts)


def cpu_was_asked_for() -> bool:
    """Return whether the launcher is to leave the accelerators alone (`use_cpu: true` in its config file)."""
    return os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")


def leave_accelerators() -> None:
    """Train on the CPU, in this process: as the launcher's config file says it, before anything asks for the device."""
    os.environ["ACCELERATE_USE_CPU"] = "true"


def device_without_torch() -> DeviceInfo:
    """Return the same as device_info, by the drivers alone: a plan starts at once, and holds no device."""
    gpus = [] if cpu_was_asked_for() else visible_gpus(os.environ)
    memory_gib = memory_bytes() / 2**30
    if not gpus:
        return DeviceInfo("cpu", cpu_name(), 1, memory_gib)
    if sys.platform == "darwin":
        return DeviceInfo("mps", cpu_name(), 1, memory_gib)
    name, gpu_memory_gib = gpus[0]
    return device_of_driver(name or "AMD GPU", len(gpus), gpu_memory_gib)


def visible_gpus(environ: Mapping[str, str]) -> list[tuple[str | None, float | None]]:
    """Return name and memory in GiB of each accelerator that CUDA_VISIBLE_DEVICES leaves; what the driver keeps to itself is None.

    NVIDIA's, else AMD's; on a Mac the one it has.
    """
    if sys.platform == "darwin":
        return [(None, None)]
    present = _nvidia() or _amd()
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not present:
        return present
    gpus = []
    for part in map(str.strip, visible.split(",")):
        if part in ("", "-1"):  # CUDA stops reading at the first id that is none
            break
        gpu = present[0]  # an id that is no number names a device or a slice of one; which, only the driver knows
        if part.isdecimal() and int(part) < len(present):
            gpu = present[int(part)]
        gpus.append(gpu)
    return gpus


def _nvidia() -> list[tuple[str | None, float | None]]:
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
    gpus: list[tuple[str | None, float | None]] = []
    for line in filter(str.strip, lines):
        name, _, mebibytes = line.rpartition(", ")
        memory_gib = None
        if mebibytes.isdecimal():  # else [N/A], of a device that shares the machine's memory
            memory_gib = float(mebibytes) / 1024
        gpus.append((name, memory_gib))
    return gpus


def _amd() -> list[tuple[str | None, float | None]]:
    # The kernel lists processors among the nodes, too, with the id 0.
    nodes = sorted(glob("/sys/class/kfd/kfd/topology/nodes/*/gpu_id"))
    return [(None, None) for node in nodes if Path(node).read_text().strip() != "0"]
