"""Muon's update for the matrices of the blocks: momentum, orthogonalisation, per-neuron scale, cautious decay.

The parts and where they were published: Muon (Jordan et al. 2024); Polar Express, the polynomial that orthogonalises
(arXiv 2505.16932); MuonEq, equal row norms before it (arXiv 2603.28254); Muon+, the exact norm after it (2602.21545);
NorMuon, the running variance per neuron (2510.05491). Their order and constants are nanochat's, so that its rates hold.

Shapes: M stacked matrices of R rows and C columns, as they are stored. `output_dim` says which axis counts the outputs: -2
for nn.Linear's (out, in), -1 for GPT-2's Conv1D (in, out). float32 stacks are changed in place where a name ends in _: on a
CPU, new memory costs more than the arithmetic.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

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
    """sqrt(max(1, outputs / inputs)): what Muon's rate is multiplied with for a matrix of this shape."""
    return math.sqrt(max(1.0, shape[output_dim] / shape[-3 - output_dim]))


def polar_express(x_MRC: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices, of inputs whose spectral norm is at most 1/1.01."""
    rows, columns = x_MRC.shape[-2:]
    tall = rows > columns
    if x_MRC.dtype == torch.float32 and max(rows, columns) >= 2 * min(rows, columns):
        return x_MRC @ _polar_factor(x_MRC.mT @ x_MRC) if tall else _polar_factor(x_MRC @ x_MRC.mT) @ x_MRC
    for a, b, c in POLAR_EXPRESS:
        gram = torch.bmm(x_MRC.mT, x_MRC) if tall else torch.bmm(x_MRC, x_MRC.mT)  # of the short side
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x_MRC = (
            torch.baddbmm(x_MRC, x_MRC, polynomial, beta=a) if tall else torch.baddbmm(x_MRC, polynomial, x_MRC, beta=a)
        )
    return x_MRC


def _polar_factor(gram_MSS: Tensor) -> Tensor:
    """What polar_express multiplies matrices by whose products along the long side are these, (S, S) of the short side.

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
    """Each output's row scaled to the mean row norm, then the whole to a Frobenius norm of 1/1.01."""
    row_norm = torch.linalg.vector_norm(x_MRC, dim=-3 - output_dim, keepdim=True)
    mean_norm = row_norm.square().mean(dim=output_dim, keepdim=True).sqrt()
    # A row 1e-6 of the mean is rounding noise: it is not blown up to full size.
    scale = mean_norm / torch.maximum(row_norm, 1e-6 * mean_norm + TINY)
    norm = torch.linalg.vector_norm(row_norm * scale, dim=output_dim, keepdim=True)
    return x_MRC.mul_(scale / (1.01 * norm + TINY))


def orthogonalised(x_MRC: Tensor, *, output_dim: int, product_dtype: torch.dtype) -> Tensor:
    """The momenta's nearly orthogonal directions, in the dtype of the products; `x_MRC`, float32, is used up."""
    return polar_express(equalise_(x_MRC, output_dim=output_dim).to(product_dtype))


def scale_neurons_(x_MRC: Tensor, variance_MN: Tensor, *, output_dim: int, beta2: float) -> Tensor:
    """Update directions of Frobenius norm sqrt(short side) from orthogonalised ones, float32; `variance_MN` moves on by one step.

    variance_MN: running mean square of each of the N neurons, which are the long side, or a square matrix's outputs.
    """
    rows, columns = x_MRC.shape[-2:]
    neuron_dim = output_dim if rows == columns else -2 if rows > columns else -1
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
    """parameter -= rate * (direction + weight_decay * parameter), the decay only where both have the same sign."""
    if weight_decay:
        agree = (direction * parameter).ge_(0)
        parameter.addcmul_(parameter, agree, value=-rate * weight_decay)
    parameter.sub_(direction, alpha=rate)
