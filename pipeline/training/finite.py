"""Whether tensors hold finite numbers only: asked of what is loaded, of what is about to be saved, and, by their norm, of
gradients."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from pipeline.artifacts.errors import DataError


def first_nonfinite(tensors: Mapping[str, Tensor]) -> str | None:
    """The first name whose tensor holds a NaN or an infinity; of a sharded tensor this rank's part is looked at.

    The host waits once for each device, not for each tensor.
    """
    by_device: dict[torch.device, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        part = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        if part.is_floating_point() and part.numel():
            by_device[part.device][name] = part
    bad = set()
    for parts in by_device.values():
        # The smallest and the largest value: both are NaN where one is, and nothing of the tensor's size is made.
        finite = torch.stack([torch.stack(part.aminmax()).isfinite().all() for part in parts.values()]).tolist()
        bad |= {name for name, is_finite in zip(parts, finite, strict=True) if not is_finite}
    return next((name for name in tensors if name in bad), None)


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm over all, 0-dimensional float32 on the device, also of 16-bit gradients, whose own norm would have their few bits."""
    wide = [g if g.dtype.itemsize >= 4 else torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]
    return torch.nn.utils.get_total_norm(wide)


def refuse_nonfinite(tensors: Mapping[str, Tensor], *, where: str, instead: str) -> None:
    """Raises DataError for numbers that no training can go on from; every rank reads the same ones."""
    if name := first_nonfinite(tensors):
        error = DataError(f"{where}: {name} holds a NaN or an infinity, which every step would spread. {instead}")
        error.of_all_ranks = True
        raise error
