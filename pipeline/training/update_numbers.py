"""Numbers of an update that will be logged: zeros in the gradient before it, the norms of the update and of the parameters.

Each is one pass over memory, made on logged steps only, at most every tenth step. The norm of the update needs the parameters before and after it; a
copy of all of them would cost a quarter of the training's memory, so the optimizers of ours measure it a few matrices at a
time (optimizer.py, muon_step.py), where each is changed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.training.finite import total_norm
from pipeline.training.optimizer import MuonAdamW


class UpdateNumbers:
    """`look` before the update of a step that will be logged, `read` after it."""

    def __init__(self) -> None:
        self._zeros: Tensor | None = None
        self._norms: list[Tensor] = []

    def look(self, parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> None:
        """parameters: those with a gradient, which nothing has scaled or clipped to zero yet."""
        self._zeros, self._norms = count_zeros([p.grad for p in parameters if p.grad is not None]), []
        ours = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper
        if isinstance(ours, MuonAdamW):
            ours.measure_next_update(self._norms)

    def read(self, parameters: Sequence[Tensor]) -> dict[str, float]:
        """optim/param_norm, optim/num_zeros_in_grad and optim/update_ratio; nothing where nobody looked, and no ratio where
        the update was left out or the optimizer is another's."""
        if self._zeros is None:
            return {}
        numbers = {
            "optim/param_norm": total_norm([p.detach() for p in parameters]),
            "optim/num_zeros_in_grad": self._zeros,
        }
        if self._norms:
            numbers["optim/update_ratio"] = total_norm(self._norms) / numbers["optim/param_norm"]
        self._zeros, self._norms = None, []
        return {name: number.item() for name, number in numbers.items()}


def count_zeros(gradients: Sequence[Tensor]) -> Tensor:
    """Entries that are exactly 0, 0-dimensional on the device; Megatron-LM's num_zeros_in_grad."""
    return torch.stack([g.numel() - torch.count_nonzero(g) for g in gradients]).sum()  # int64
