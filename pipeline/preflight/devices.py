"""The devices of a plan: accelerators by their names, and those that the drivers list, without torch and before anything holds a device.

A training asks torch for its own (hardware.py).
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from glob import glob
from pathlib import Path

from pipeline.hardware import (
    ACCELERATORS,
    Accelerator,
    DeviceInfo,
    cpu_name,
    cpu_was_asked_for,
    find_by_device_name,
    launched_hosts,
    memory_bytes,
    rated_device,
)


def parse_hardware(text: str) -> tuple[int, int, Accelerator]:
    """Return `64x8xH100`, `8xH100` or `H100` as hosts, devices of each and row. Raises ValueError with a sentence that lists the known names."""
    match = re.fullmatch(r"(?:(?:(\d+)\s*[xX*]\s*)?(\d+)\s*[xX*]\s*)?(.+)", text.strip())
    hosts, count = (int(match[part] or 1) if match else 1 for part in (1, 2))
    wanted = (match[3] if match else text).lower().replace(" ", "").replace("_", "-")
    for row in ACCELERATORS:
        if wanted in (row.name.lower(), row.name.lower().replace("-", "")) and hosts * count:
            return hosts, count, row
    names = " ".join(row.name for row in ACCELERATORS)
    raise ValueError(
        f"{text!r} is no hardware we know, and a plan for it would be a guess. Write <count>x<name> or <hosts>x<count>x<name>, one of: {names}."
    )


def planned_device(hardware: str) -> DeviceInfo:
    """Return `8xH100`, `64x8xH100` as the devices of a plan. Raises ValueError with a sentence that lists the known names."""
    hosts, count, row = parse_hardware(hardware)
    return replace(rated_device("cuda", row.name, count, row.memory_gib, row), hosts=hosts)


def device_without_torch() -> DeviceInfo:
    """Return the same as device_info, asked of the drivers alone: a plan starts at once, and holds no device."""
    gpus = [] if cpu_was_asked_for() else visible_gpus(os.environ)
    memory_gib = memory_bytes() / 2**30
    if not gpus:
        return rated_device("cpu", cpu_name(), 1, memory_gib, None)
    if sys.platform == "darwin":
        return rated_device("mps", cpu_name(), 1, memory_gib, None)
    name, gpu_memory_gib = gpus[0]
    here = rated_device("cuda", name or "AMD GPU", len(gpus), gpu_memory_gib, find_by_device_name(name or ""))
    return replace(here, hosts=launched_hosts())


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
    # CUDA stops reading at the first id that is none.
    ids = [part.strip() for part in visible.split(",")]
    ids = ids[: next((n for n, part in enumerate(ids) if part in ("", "-1")), len(ids))]
    # An id that is no number names a device or a slice of one; which, only the driver knows.
    return [present[int(i)] if i.isdecimal() and int(i) < len(present) else present[0] for i in ids]


def _nvidia() -> list[tuple[str | None, float | None]]:
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.rpartition(", ") for line in lines if line.strip()]
    return [(name, float(mebibytes) / 1024 if mebibytes.isdecimal() else None) for name, _, mebibytes in rows]


def _amd() -> list[tuple[str | None, float | None]]:
    # The kernel lists processors among the nodes, too, with the id 0.
    nodes = sorted(glob("/sys/class/kfd/kfd/topology/nodes/*/gpu_id"))
    return [(None, None) for node in nodes if Path(node).read_text().strip() != "0"]
