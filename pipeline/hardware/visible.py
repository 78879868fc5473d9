"""The accelerators a run would see, asked of the drivers: without torch, and before anything holds a device."""

import subprocess
import sys
from collections.abc import Mapping
from glob import glob
from pathlib import Path


def visible_gpus(environ: Mapping[str, str]) -> list[tuple[str | None, float | None]]:
    """Name and memory in GiB of each accelerator that CUDA_VISIBLE_DEVICES leaves; what the driver keeps to itself is None.

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
