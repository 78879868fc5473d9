"""Muon's step for all matrices of a group: those of one shape are stacked, and the ranks share the orthogonalisation.

Of data-parallel ranks every one holds all gradients, momenta and variances, as its checkpoint does. The products, nearly
all of the work, are made by each rank for its part of a stack, and gathered in the products' dtype while the next stack is
worked on. What follows is element-wise and the same on every rank, so that parameters stay equal.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from pipeline.training.muon import cautious_update_, orthogonalised, rate_factor, scale_neurons_

VARIANCE_BETA = 0.9  # NorMuon's average per neuron; nanochat's value
SHARED_FROM = 1 << 18  # elements of a stack: less work than this is made by every rank sooner than it is gathered


def muon_step(
    group: dict[str, Any],
    parameters: list[Tensor],
    state: Mapping[Tensor, dict[str, Tensor]],
    *,
    norms: list[Tensor] | None = None,
) -> None:
    """One update in place of parameters that all have a gradient. Every rank calls it with the same ones.

    norms: to which the norm of each one's change is appended.
    """
    by_shape = defaultdict(list)
    for p in parameters:
        by_shape[tuple(p.shape)].append(p)
    before: _Stack | None = None
    for members in by_shape.values():
        stack = _Stack(group, members, state)
        if before is not None:
            before.update(norms)
        before = stack
    if before is not None:
        before.update(norms)


class _Stack:
    """The matrices of one shape; made, their directions are on the way from all ranks."""

    def __init__(self, group: dict[str, Any], members: list[Tensor], state: Mapping[Tensor, dict[str, Tensor]]):
        self.group, self.members = group, members
        self.output_dim = -2 if group["outputs_first"] else -1
        self.variances = [state[p]["variance"] for p in members]
        self.work: dist.Work | None = None
        x_MRC = self._momenta([state[p]["momentum"] for p in members])
        if not self._is_shared(x_MRC):
            self.directions_MRC = self._orthogonalised(x_MRC)
            return
        ranks = dist.get_world_size()
        count = -(-len(members) // ranks)  # of each rank; the last ones may have less to do
        first = min(dist.get_rank() * count, len(members))
        own = self._orthogonalised(x_MRC[first : first + count])
        padded = own.new_zeros(count, *own.shape[1:])
        padded[: len(own)] = own
        self.directions_MRC = own.new_empty(ranks * count, *own.shape[1:])
        self.work = dist.all_gather_into_tensor(self.directions_MRC, padded, async_op=True)

    def _momenta(self, momenta: list[Tensor]) -> Tensor:
        """The averages one step on, looked ahead of as Nesterov does, float32."""
        gradients = [local(p.grad) for p in self.members]  # type: ignore[arg-type]  # the caller took those that have one
        momenta = [local(momentum) for momentum in momenta]
        torch._foreach_lerp_(momenta, gradients, 1 - self.group["momentum"])
        x_MRC = torch.stack(gradients).lerp_(torch.stack(momenta), self.group["momentum"]).float()
        if any(isinstance(p, DTensor) for p in self.members):
            x_MRC = torch.stack([gathered(x, p) for x, p in zip(x_MRC, self.members, strict=True)])
        return x_MRC

    def _is_shared(self, x_MRC: Tensor) -> bool:
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        return several and len(self.members) > 1 and x_MRC.numel() >= SHARED_FROM

    def _orthogonalised(self, x_MRC: Tensor) -> Tensor:
        dtype = getattr(torch, self.group["product_dtype"])
        return orthogonalised(x_MRC, output_dim=self.output_dim, product_dtype=dtype)

    def update(self, norms: list[Tensor] | None) -> None:
        if self.work is not None:
            self.work.wait()
        x_MRC = self.directions_MRC[: len(self.members)].float()
        variance_MN = torch.stack(self.variances).float()
        x_MRC = scale_neurons_(x_MRC, variance_MN, output_dim=self.output_dim, beta2=VARIANCE_BETA)
        torch._foreach_copy_(self.variances, list(variance_MN))
        rate = self.group["lr"] * rate_factor(x_MRC.shape[1:], output_dim=self.output_dim)
        for p, x_RC in zip(self.members, x_MRC, strict=True):
            own = local(p)
            before = None if norms is None else own.clone()
            cautious_update_(own, shard_like(x_RC, p), rate=rate, weight_decay=self.group["weight_decay"])
            if norms is not None and before is not None:
                norms.append(torch.linalg.vector_norm(before.sub_(own), dtype=torch.float32))


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor (FSDP2), sharing its memory; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gathered(part: Tensor, like: Tensor) -> Tensor:
    """The whole matrix of which every rank holds a part as it holds one of `like`."""
    if not isinstance(like, DTensor):
        return part
    sharded = DTensor.from_local(part, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())
    return sharded.full_tensor()


def shard_like(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a matrix that every rank has whole, cut as `like` is."""
    if not isinstance(like, DTensor):
        return whole
    replicated = DTensor.from_local(whole, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)
    return replicated.redistribute(placements=like.placements).to_local()
