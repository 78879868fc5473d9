"""Checks that tensors hold finite numbers only, in memory and in a model's files."""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def first_nonfinite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the first name whose tensor holds a NaN or an infinity; of a sharded tensor this rank's part is looked
    at.

    The host waits once for each device, not for each tensor.
    """
    by_device: dict[torch.device, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        part = tensor.detach()
        if isinstance(part, DTensor):
            part = part.to_local()
        if part.is_floating_point() and part.numel():
            by_device[part.device][name] = part
    is_finite: dict[str, bool] = {}
    for parts in by_device.values():
        # The smallest and the largest value: both are NaN where one is, and nothing of the tensor's size is made.
        finite = [torch.stack(part.aminmax()).isfinite().all() for part in parts.values()]
        is_finite |= zip(parts, torch.stack(finite).tolist(), strict=True)
    for name in tensors:
        if not is_finite.get(name, True):
            return name
    return None


def first_nonfinite_of_files(folder: Path) -> str | None:
    """Return the first name of a tensor in the folder's safetensors files that holds a NaN or an infinity; one is in
    memory at a time."""
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # no mapping
                if first_nonfinite({name: tensors.get_tensor(name)}):
                    return name
    return None
