"""Muon's update for the matrices of the blocks: momentum, orthogonalisation, per-neuron scale, cautious decay.

The parts and where they were published: Muon (Jordan et al. 2024); Polar Express, the polynomial that orthogonalises
(arXiv 2505.16932); MuonEq, equal row norms before it (arXiv 2603.28254); Muon+, the exact norm after it (2602.21545);
NorMuon, the running variance per neuron (2510.05491). Their order and constants are nanochat's, so that its rates hold.

Shapes: M stacked matrices, S their short side, L their long side. A matrix is laid down as (S, L) whatever way it is
stored, so that GPT-2's Conv1D (in, out) and nn.Linear (out, in) share one code path; `output_dim` says which of the two
axes counts the outputs.
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


def is_tall(shape: Sequence[int]) -> bool:
    """Whether a stored matrix is turned to be laid down as (S, L)."""
    return shape[0] > shape[1]


def output_dim(shape: Sequence[int], *, outputs_first: bool) -> int:
    """Axis of the outputs in the (S, L) layout, -2 or -1. outputs_first: stored (out, in) as nn.Linear does."""
    return -2 if outputs_first != is_tall(shape) else -1


def rate_factor(shape: Sequence[int], *, outputs_first: bool) -> float:
    """sqrt(max(1, outputs / inputs)): what Muon's rate is multiplied with for a matrix of this shape."""
    outputs, inputs = shape if outputs_first else reversed(shape)
    return math.sqrt(max(1.0, outputs / inputs))


def polar_express(x_MSL: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices, of inputs whose spectral norm is at most 1/1.01."""
    for a, b, c in POLAR_EXPRESS:
        gram_MSS = torch.bmm(x_MSL, x_MSL.mT)
        polynomial_MSS = torch.baddbmm(gram_MSS, gram_MSS, gram_MSS, beta=b, alpha=c)
        x_MSL = torch.baddbmm(x_MSL, polynomial_MSS, x_MSL, beta=a)
    return x_MSL


def equalised(x_MSL: Tensor, *, output_dim: int) -> Tensor:
    """Each output's row scaled to the mean row norm, then the whole to a Frobenius norm of 1/1.01."""
    row_norm = torch.linalg.vector_norm(x_MSL, dim=-1 if output_dim == -2 else -2, keepdim=True)
    mean_norm = row_norm.square().mean(dim=output_dim, keepdim=True).sqrt()
    # A row 1e-6 of the mean is rounding noise: it is not blown up to full size.
    scale = mean_norm / torch.maximum(row_norm, 1e-6 * mean_norm + TINY)
    norm = torch.linalg.vector_norm(row_norm * scale, dim=output_dim, keepdim=True)
    return x_MSL * (scale / (1.01 * norm + TINY))


def orthogonal_directions(
    x_MSL: Tensor, variance_ML: Tensor, *, output_dim: int, beta2: float, dtype: torch.dtype
) -> Tensor:
    """The update directions, float32, each of Frobenius norm sqrt(S); `variance_ML` moves on by one step.

    variance_ML: running mean square per neuron, along L, or along the outputs of a square matrix.
    dtype: type of the orthogonalisation's products; everything around it is float32.
    """
    short, long = x_MSL.shape[-2:]
    x_MSL = polar_express(equalised(x_MSL.float(), output_dim=output_dim).to(dtype)).float()
    reduced_dim = -1 if short == long and output_dim == -2 else -2
    square_M = x_MSL.square().mean(dim=reduced_dim, keepdim=True)  # (M, 1, L), or (M, S, 1)
    # The polynomial leaves singular values of 0.85 to 1.15; an orthogonal matrix has the norm sqrt(S) exactly.
    norm_M11 = square_M.sum(dim=(-2, -1), keepdim=True).mul(x_MSL.shape[reduced_dim]).sqrt()
    to_orthogonal_M11 = math.sqrt(short) / norm_M11.clamp_min(1e-3)  # below it only a gradient of zeros
    square_M = square_M * to_orthogonal_M11.square()
    variance_ML.lerp_(square_M.flatten(1), 1 - beta2)
    neuron_scale_M = variance_ML.clamp_min(1e-10).rsqrt().view_as(square_M)
    scaled_norm_M11 = (square_M * neuron_scale_M.square()).sum(dim=(-2, -1), keepdim=True)
    scaled_norm_M11 = scaled_norm_M11.mul(x_MSL.shape[reduced_dim]).sqrt()
    return x_MSL * (to_orthogonal_M11 * neuron_scale_M * (math.sqrt(short) / scaled_norm_M11.clamp_min(1e-10)))


def cautious_update(parameter: Tensor, direction: Tensor, *, rate: float, weight_decay: float) -> None:
    """parameter -= rate * (direction + weight_decay * parameter), the decay only where it points the same way."""
    if weight_decay:
        agree = (direction * parameter) >= 0
        direction = torch.addcmul(direction, parameter, agree.to(parameter.dtype), value=weight_decay)
    parameter.sub_(direction, alpha=rate)
