"""Muon's update for the matrices of the blocks: momentum, orthogonalisation, per-neuron scale, cautious decay.

The parts and where they were published: Muon (Jordan et al. 2024); Polar Express, the polynomial that orthogonalises
(arXiv 2505.16932); MuonEq, equal row norms before it (arXiv 2603.28254); Muon+, the exact norm after it (2602.21545);
NorMuon, the running variance per neuron (2510.05491). Their order and constants are nanochat's, so that its rates
hold.

Shapes: M stacked matrices of R rows and C columns, as they are stored. `output_dim` says which axis counts the
outputs: -2 for nn.Linear's (out, in), -1 for GPT-2's Conv1D (in, out). float32 stacks are changed in place where a
name ends in _: on a CPU, new memory costs more than the arithmetic.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from pipeline.training.distributed import num_ranks
from pipeline.training.norms import local

# Five steps for singular values in [0.001, 1] with cushion 2, whose result is shrunk by 2 % for safety: Polar Express,
# Algorithm 1. Each triple (a, b, c) maps a singular value s to a s + b s^3 + c s^5.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
TINY = 1e-30  # keeps 0/0 out of gradients of zeros, and is so small that the loss's scale does not matter


def rate_factor(shape: Sequence[int], *, output_dim: int) -> float:
    """Return sqrt(max(1, outputs / inputs)), by which Muon's rate is multiplied for a matrix of this shape."""
    return math.sqrt(max(1.0, shape[output_dim] / shape[-3 - output_dim]))


def polar_express(x_MRC: Tensor) -> Tensor:
    """Return the nearest semi-orthogonal matrices, of inputs whose spectral norm is at most 1/1.01."""
    rows, columns = x_MRC.shape[-2:]
    tall = rows > columns
    if x_MRC.dtype == torch.float32 and max(rows, columns) >= 2 * min(rows, columns):
        return x_MRC @ _polar_factor(x_MRC.mT @ x_MRC) if tall else _polar_factor(x_MRC @ x_MRC.mT) @ x_MRC
    for a, b, c in POLAR_EXPRESS:
        gram = torch.bmm(x_MRC.mT, x_MRC) if tall else torch.bmm(x_MRC, x_MRC.mT)  # of the short side
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x_MRC = (
            torch.baddbmm(x_MRC, x_MRC, polynomial, beta=a)
            if tall
            else torch.baddbmm(x_MRC, polynomial, x_MRC, beta=a)
        )
    return x_MRC


def _polar_factor(gram_MSS: Tensor) -> Tensor:
    """Return what polar_express multiplies matrices by whose products along the long side are these, (S, S) of the
    short side.

    All steps happen on the short side: half the work for four times as long a matrix. The small singular values of the
    products are the squares of the matrix's, for which bfloat16 has too few digits.
    """
    factor = polynomial = None
    for a, b, c in POLAR_EXPRESS:
        if polynomial is not None:
            gram_MSS = polynomial @ gram_MSS @ polynomial
        polynomial = torch.baddbmm(gram_MSS, gram_MSS, gram_MSS, beta=b, alpha=c)
        polynomial.diagonal(dim1=-2, dim2=-1).add_(a)
        factor = polynomial if factor is None else polynomial @ factor
    assert factor is not None
    return factor


def equalise_(x_MRC: Tensor, *, output_dim: int) -> Tensor:
    """Return each output's row scaled to the mean row norm, then the whole to a Frobenius norm of 1/1.01."""
    row_norm = torch.linalg.vector_norm(x_MRC, dim=-3 - output_dim, keepdim=True)
    mean_norm = row_norm.square().mean(dim=output_dim, keepdim=True).sqrt()
    # A row 1e-6 of the mean is rounding noise: it is not blown up to full size.
    scale = mean_norm / torch.maximum(row_norm, 1e-6 * mean_norm + TINY)
    norm = torch.linalg.vector_norm(row_norm * scale, dim=output_dim, keepdim=True)
    return x_MRC.mul_(scale / (1.01 * norm + TINY))


def orthogonalised(x_MRC: Tensor, *, output_dim: int, product_dtype: torch.dtype) -> Tensor:
    """Return the momenta's nearly orthogonal directions, in the dtype of the products; `x_MRC`, float32, is used
    up."""
    return polar_express(equalise_(x_MRC, output_dim=output_dim).to(product_dtype))


def scale_neurons_(x_MRC: Tensor, variance_MN: Tensor, *, output_dim: int, beta2: float) -> Tensor:
    """Update directions of Frobenius norm sqrt(short side) from orthogonalised ones, float32; `variance_MN` moves on
    by one step.

    variance_MN: running mean square of each of the N neurons, which are the long side, or a square matrix's outputs.
    """
    rows, columns = x_MRC.shape[-2:]
    neuron_dim = -2 if rows > columns else -1
    if rows == columns:
        neuron_dim = output_dim
    reduced_dim, reduced = -3 - neuron_dim, min(rows, columns)
    square = x_MRC.square().mean(dim=reduced_dim, keepdim=True)  # (M, R, 1) or (M, 1, C)
    # The polynomial leaves singular values of 0.85 to 1.15; an orthogonal matrix has the norm sqrt(short) exactly.
    norm_M11 = square.sum(dim=neuron_dim, keepdim=True).mul(reduced).sqrt()
    to_orthogonal_M11 = math.sqrt(reduced) / norm_M11.clamp_min(1e-3)  # below it only a gradient of zeros
    square = square * to_orthogonal_M11.square()
    variance_MN.lerp_(square.flatten(1), 1 - beta2)
    neuron_scale = variance_MN.clamp_min(1e-10).rsqrt().view_as(square)
    scaled_norm_M11 = (square * neuron_scale.square()).sum(dim=neuron_dim, keepdim=True).mul(reduced).sqrt()
    scale = to_orthogonal_M11 * neuron_scale * (math.sqrt(reduced) / scaled_norm_M11.clamp_min(1e-10))
    return x_MRC.mul_(scale)


def cautious_update_(parameter: Tensor, direction: Tensor, *, rate: float, weight_decay: float) -> None:
    """Update in place: parameter -= rate * (direction + weight_decay * parameter), the decay only where both have the
    same sign."""
    if weight_decay:
        agree = (direction * parameter).ge_(0)
        parameter.addcmul_(parameter, agree, value=-rate * weight_decay)
    parameter.sub_(direction, alpha=rate)


def fused_directions(x_MRC: Tensor, *, output_dim: int, product_dtype: torch.dtype) -> Tensor:
    """Return what orthogonalised returns and leave `x_MRC` as it is: the compiler makes no copy of it."""
    return orthogonalised(x_MRC.clone(), output_dim=output_dim, product_dtype=product_dtype)


def fused_update_(
    parameter_MRC: Tensor,
    direction_MRC: Tensor,
    variance_MN: Tensor | None,
    rate: Tensor,
    decay: Tensor,
    *,
    output_dim: int,
) -> Tensor:
    """Do what scale_neurons_ and cautious_update_ do to a whole stack, and return the norms of the changes (M,).

    The norms are always computed, so that a measured update and any other are the same graph, to the last bit.
    variance_MN: None for directions that are scaled already. rate, decay: 0-dimensional on the CPU, as numbers that
    change would be compiled anew; decay is multiplied with the rate.
    """
    direction_MRC = direction_MRC.to(torch.float32, copy=True)
    if variance_MN is not None:
        direction_MRC = scale_neurons_(direction_MRC, variance_MN, output_dim=output_dim, beta2=VARIANCE_BETA)
    agree = direction_MRC * parameter_MRC >= 0
    change_MRC = rate * direction_MRC + torch.where(agree, decay * parameter_MRC, 0.0)
    parameter_MRC.sub_(change_MRC)
    return torch.linalg.vector_norm(change_MRC, dim=(-2, -1))


@cache
def compiled(function: Callable[..., Tensor], backend: str) -> Callable[..., Tensor]:
    """Return the function as one graph for each shape."""
    graphs = torch.compile(function, backend=backend, dynamic=False)
    return torch._dynamo.config.patch(recompile_limit=MOST_SHAPES)(graphs)


VARIANCE_BETA = 0.9  # NorMuon's average per neuron; nanochat's value
MOST_SHAPES = 64  # of stacks; from the ninth on torch would run them uncompiled
SHARED_FROM = 1 << 18  # elements of a stack: less work than this is made by every rank sooner than it is gathered


def muon_step(
    group: dict[str, Any],
    parameters: list[Tensor],
    state: Mapping[Tensor, dict[str, Tensor]],
    *,
    norms: list[tuple[Tensor, Tensor]] | None = None,
    backend: str | None = None,
) -> None:
    """Make one update in place of parameters that all have a gradient. Every rank calls it with the same ones.

    norms: to which each one is appended with the norm of its change. backend: of torch.compile; None: not compiled.
    """
    stacks: dict[tuple, list[Any]] = defaultdict(list)
    for p in parameters:
        stacks[tuple(p.shape), p.placements if isinstance(p, DTensor) else ()].append(p)
    before: _Stack | None = None
    first_owner = 0
    for (_, placements), members in stacks.items():
        stack = (_ShardedStack if placements else _Stack)(group, members, state, first_owner, backend)
        first_owner += len(members)
        if before is not None:
            before.update(norms)
        before = stack
    if before is not None:
        before.update(norms)


class _Stack:
    """The matrices of one shape. Once made, their directions are being gathered from all ranks.

    first_owner: of sharded matrices, the rank (modulo their number) that makes the first one whole.
    """

    def __init__(
        self,
        group: dict[str, Any],
        members: list[Any],
        state: Mapping[Tensor, dict[str, Tensor]],
        first_owner: int,
        backend: str | None,
    ):
        self.group, self.members, self.first_owner, self.backend = group, members, first_owner, backend
        self.output_dim = -2 if group["outputs_first"] else -1
        self.variances = [state[p]["variance"] for p in members]
        self.work: dist.Work | None = None
        self._begin(self._momenta([state[p]["momentum"] for p in members]))

    def _momenta(self, momenta: list[Tensor]) -> Tensor:
        """Return the averages after this step with Nesterov's look ahead, float32; of sharded matrices this rank's
        part."""
        gradients = [local(p.grad) for p in self.members]
        momenta = [local(momentum) for momentum in momenta]
        torch._foreach_lerp_(momenta, gradients, 1 - self.group["momentum"])
        return torch.stack(torch._foreach_lerp(gradients, momenta, self.group["momentum"])).float()

    def _begin(self, x_MRC: Tensor) -> None:
        if not self._is_divided(x_MRC):
            self.directions_MRC = self._orthogonalised(x_MRC, self.output_dim)
            return
        ranks = dist.get_world_size()
        count = -(-len(self.members) // ranks)  # of each rank; the last ones may have less to do
        first = min(dist.get_rank() * count, len(self.members))
        own = self._orthogonalised(x_MRC[first : first + count], self.output_dim)
        padded = own.new_zeros(count, *own.shape[1:])
        padded[: len(own)] = own
        self.directions_MRC = own.new_empty(ranks * count, *own.shape[1:])
        self.work = dist.all_gather_into_tensor(self.directions_MRC, padded, async_op=True)

    def _is_divided(self, x_MRC: Tensor) -> bool:
        return num_ranks() > 1 and len(self.members) > 1 and x_MRC.numel() >= SHARED_FROM

    def _orthogonalised(self, x_MRC: Tensor, output_dim: int) -> Tensor:
        dtype = getattr(torch, self.group["product_dtype"])
        if self.backend is not None:
            return compiled(fused_directions, self.backend)(x_MRC, output_dim=output_dim, product_dtype=dtype)
        return orthogonalised(x_MRC, output_dim=output_dim, product_dtype=dtype)

    def _scaled(self, x_MRC: Tensor, variance_MN: Tensor, output_dim: int) -> Tensor:
        return scale_neurons_(x_MRC.float(), variance_MN, output_dim=output_dim, beta2=VARIANCE_BETA)

    def _ended(self) -> tuple[Tensor, Tensor | None]:
        """Return the directions, of sharded matrices this rank's part, and the variances before this step, or None
        where the directions are scaled by them."""
        return self.directions_MRC[: len(self.members)], torch.stack(self.variances).float()

    def update(self, norms: list[tuple[Tensor, Tensor]] | None) -> None:
        if self.work is not None:
            self.work.wait()
        x_MRC, variance_MN = self._ended()
        rate = self.group["lr"] * rate_factor(self.members[0].shape, output_dim=self.output_dim)
        if self.backend is not None:
            self._fused_update(x_MRC, variance_MN, rate, norms)
        else:
            if variance_MN is not None:
                x_MRC = self._scaled(x_MRC, variance_MN, self.output_dim)
            self._update(x_MRC, rate, norms)
        if variance_MN is not None:
            torch._foreach_copy_(self.variances, list(variance_MN))

    def _update(self, x_MRC: Tensor, rate: float, norms: list[tuple[Tensor, Tensor]] | None) -> None:
        for p, x_RC in zip(self.members, x_MRC, strict=True):
            own = local(p)
            before = None if norms is None else own.clone()
            cautious_update_(own, x_RC, rate=rate, weight_decay=self.group["weight_decay"])
            if norms is not None and before is not None:
                norms.append((p, torch.linalg.vector_norm(before.sub_(own), dtype=torch.float32)))

    def _fused_update(
        self, x_MRC: Tensor, variance_MN: Tensor | None, rate: float, norms: list[tuple[Tensor, Tensor]] | None
    ) -> None:
        own = [local(p) for p in self.members]
        own_MRC = torch.stack(own)
        decay = torch.tensor(rate * self.group["weight_decay"])
        update_ = compiled(fused_update_, self.backend)
        norm_M = update_(own_MRC, x_MRC, variance_MN, torch.tensor(rate), decay, output_dim=self.output_dim)
        torch._foreach_copy_(own, list(own_MRC))
        if norms is not None:
            norms.extend(zip(self.members, norm_M, strict=True))


class _ShardedStack(_Stack):
    """Matrices whose rows or columns are cut among the ranks (FSDP2, tensor parallelism), or among those of each copy
    (HSDP), which all compute the same. Each matrix is sent whole to one rank, its owner, which sends every rank its
    part of the direction: a rank holds its share of the whole matrices, and never the stack."""

    def _begin(self, x_MRC: Tensor) -> None:
        mesh, self.cut_dim = self.members[0].device_mesh, self.members[0].placements[-1].dim + 1
        self.process_group, rank, ranks = mesh.get_group(-1), mesh.get_local_rank(-1), mesh.size(-1)
        # The next rank owns the next matrix, also of the next stack: stacks of few matrices have different owners.
        self.owned = [slice((r - self.first_owner) % ranks, None, ranks) for r in range(ranks)]
        variance_MN = torch.stack(self.variances).float()
        counts = [len(variance_MN[owned]) for owned in self.owned]
        variance_MN = variance_MN[self.owned[rank]]
        x_MRC = x_MRC.movedim(self.cut_dim, 1)
        self.part_shape = x_MRC.shape[1:]
        sizes = chunk_sizes(self.members[0].shape[self.cut_dim - 1], ranks)
        shapes = [(counts[rank], size, x_MRC.shape[2]) for size in sizes]
        x_MRC = torch.cat(self._exchange([x_MRC[owned] for owned in self.owned], shapes)[0], dim=1)
        x_MRC = x_MRC.movedim(1, self.cut_dim)
        if len(x_MRC):
            x_MRC = self._scaled(self._orthogonalised(x_MRC, self.output_dim), variance_MN, self.output_dim)
        # All ranks keep the variances of all matrices: the owner's follow each part.
        sent = [
            torch.cat([part.flatten(1), variance_MN], dim=1)
            for part in x_MRC.movedim(self.cut_dim, 1).split(sizes, dim=1)
        ]
        width = self.part_shape.numel() + variance_MN.shape[1]
        self.parts, self.work = self._exchange(sent, [(count, width) for count in counts], async_op=True)

    def _exchange(
        self, sent: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], *, async_op: bool = False
    ) -> tuple[list[Tensor], dist.Work | None]:
        """Return the tensor of each rank, of these shapes, and the work to wait for. sent: one tensor to each rank."""
        flat = torch.cat([tensor.flatten() for tensor in sent])
        sizes = [math.prod(shape) for shape in shapes]
        received = flat.new_empty(sum(sizes))
        work = dist.all_to_all_single(
            received, flat, sizes, [tensor.numel() for tensor in sent], group=self.process_group, async_op=async_op
        )
        return [part.view(shape) for part, shape in zip(received.split(sizes), shapes, strict=True)], work

    def _ended(self) -> tuple[Tensor, Tensor | None]:
        x_MK = self.parts[0].new_empty(len(self.members), self.parts[0].shape[1])
        for owned, part in zip(self.owned, self.parts, strict=True):
            x_MK[owned] = part
        num_own = self.part_shape.numel()
        torch._foreach_copy_(self.variances, list(x_MK[:, num_own:]))
        return x_MK[:, :num_own].unflatten(1, self.part_shape).movedim(1, self.cut_dim), None


def chunk_sizes(rows: int, ranks: int) -> list[int]:
    """Return the rows of each rank, as torch.chunk cuts them, and FSDP2."""
    most = -(-rows // ranks)
    return [min(max(rows - r * most, 0), most) for r in range(ranks)]
