"""Tensors that must hold finite numbers only: what is loaded, what is about to be saved and, by their norm, gradients."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pipeline.artifacts.errors import DataError
from pipeline.model.finite import first_nonfinite


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
