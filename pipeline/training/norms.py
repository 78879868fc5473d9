"""Norms of gradients, updates and parameters, of sharded tensors too."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from pipeline.hardware.device import model_replicas


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, sharing its memory; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def group_by_placement(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the sharded tensors and the others, which torch does not take in one list, as far as there are any.
    Tensor parallelism has both: what it does not split is whole on every rank."""
    sharded: list[Tensor] = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    whole = [tensor for tensor in tensors if not isinstance(tensor, DTensor)]
    return [some for some in (sharded, whole) if some]


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm over all, 0-dimensional float32 on the device, also of 16-bit gradients, whose own norm would
    have their few bits."""
    wide = []
    for gradient in gradients:
        if gradient.dtype.itemsize < 4:  # its norm counts for it: the norm of norms is that of all
            gradient = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        wide.append(gradient)
    parts = group_by_placement(wide)
    if len(parts) > 1:
        return torch.linalg.vector_norm(torch.stack([total_norm(part) for part in parts]))
    norm = torch.nn.utils.get_total_norm(wide)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def norm_over_ranks(measured: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the norm over all ranks. measured: pairs of a parameter and a tensor of it, of a sharded one this rank's
    part."""
    parts = [tensor for parameter, tensor in measured if isinstance(parameter, DTensor)]
    whole = [tensor for parameter, tensor in measured if not isinstance(parameter, DTensor)]
    if not parts:
        return total_norm(whole)
    # The squares of the parts add up over the ranks; each of HSDP's copies would count them again.
    square = total_norm(parts).double().square() / model_replicas()
    torch.distributed.all_reduce(square)
    if whole:  # the same on every rank: added once
        square = square + total_norm(whole).double().square()
    return square.sqrt()


def count_zeros(gradients: Sequence[Tensor]) -> Tensor:
    """Return the number of entries that are exactly 0, 0-dimensional on the device; Megatron-LM's
    num_zeros_in_grad."""
    return torch.stack([g.numel() - torch.count_nonzero(g) for g in gradients]).sum()  # int64
