"""Cross-entropy of the next token that never holds the logits of a whole batch in fp32.

Shapes: N scored positions (rows of hidden states), D width, V vocabulary.
"""

import torch

# Elements of the logits held at a time: on a CPU 32 MiB in fp32, which stay in its caches from pass to pass, elsewhere 128 MiB.
CHUNK_ELEMENTS = {"cpu": 2**23}
OTHER_CHUNK_ELEMENTS = 2**25
SAFE_EXPONENT = 60.0  # exp of it, times any vocabulary, is far from the largest fp32
IGNORED = -100  # the label of a position without a target, as everywhere in transformers


def chunk_rows(num_rows: int, vocab_size: int, device: str) -> int:
    """Rows of one chunk: the fewest chunks of equal size within the elements of the kind of device."""
    chunks = max(1, -(-num_rows * vocab_size // CHUNK_ELEMENTS.get(device, OTHER_CHUNK_ELEMENTS)))
    return max(1, -(-num_rows // chunks))


def exponentials(hidden_ND, weight_VD, target_N1, softcap: float | None):
    """Of a chunk: exp of its logits but for a factor a row, their sums (N, 1), nats (N, 1), and logits / softcap or None.

    fp32; the product itself is in hidden_ND's dtype. In place wherever it can be.
    """
    logits = (hidden_ND @ weight_VD.t()).float()
    capped = None
    if softcap is not None:
        capped = logits.div_(softcap).tanh_()
        logits = capped * softcap
    of_target = logits.gather(1, target_N1)
    if softcap is None or softcap > SAFE_EXPONENT:  # else the cap bounds the exponent: a pass less
        largest = logits.amax(-1, keepdim=True)
        logits, of_target = logits.sub_(largest), of_target - largest
    exponential = logits.exp_()
    sums = exponential.sum(-1, keepdim=True)
    return exponential, sums, sums.log() - of_target, capped


def token_nll(hidden_ND, weight_VD, labels_N, *, softcap: float | None = None):
    """Nats of each label: (N,) float32, 0 where the label is -100. Without gradients."""
    dtype = _compute_dtype(hidden_ND)
    hidden_ND, weight_VD = hidden_ND.to(dtype), weight_VD.to(dtype)
    rows = chunk_rows(hidden_ND.shape[0], weight_VD.shape[0], hidden_ND.device.type)
    parts = []
    for hidden, labels in zip(hidden_ND.split(rows), labels_N.split(rows), strict=True):
        _, _, nats, _ = exponentials(hidden, weight_VD, labels.clamp(min=0)[:, None], softcap)
        parts.append(nats.squeeze(1).masked_fill(labels == IGNORED, 0.0))
    return torch.cat(parts)


def summed_cross_entropy(hidden_ND, weight_VD, labels_N, *, softcap: float | None = None):
    """Sum of the labels' nats, float32, exact over all chunks; differentiable in hidden_ND and weight_VD. Beside it the nats
    themselves, as token_nll gives them.

    Under autocast the products are in its dtype, everything from the logits on is float32.
    """
    if not torch.is_grad_enabled():
        nats_N = token_nll(hidden_ND, weight_VD, labels_N, softcap=softcap)
        return nats_N.sum(), nats_N
    return _SummedCrossEntropy.apply(hidden_ND, weight_VD, labels_N, softcap, _compute_dtype(hidden_ND))


def _compute_dtype(tensor) -> torch.dtype:
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


def loss_and_gradients(
    hidden_ND: torch.Tensor, weight_VD: torch.Tensor, labels_N: torch.Tensor, softcap: float | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The summed nats and each label's (N,), fp32, and the sum's gradients of hidden_ND and weight_VD in the dtypes of these;
    dtype: of the products.

    Of a chunk two fp32 tensors (rows, V) are held at a time, one without a softcap.
    """
    weight = weight_VD.to(dtype)
    total = torch.zeros((), dtype=torch.float32, device=weight.device)
    parts: list[torch.Tensor] = []
    hidden_gradients: list[torch.Tensor] = []
    weight_gradient = torch.zeros_like(weight_VD, dtype=torch.float32)
    rows = chunk_rows(hidden_ND.shape[0], weight_VD.shape[0], weight.device.type)
    for hidden, labels in zip(hidden_ND.to(dtype).split(rows), labels_N.split(rows), strict=True):
        ignored = (labels == IGNORED)[:, None]
        target = labels.clamp(min=0)[:, None]
        gradient, sums, nats, capped = exponentials(hidden, weight, target, softcap)
        nats = nats.masked_fill(ignored, 0.0)
        parts.append(nats.squeeze(1))
        total = total + nats.sum()
        counted = torch.ones_like(sums).masked_fill(ignored, 0.0)
        gradient.mul_(counted / sums).scatter_add_(1, target, -counted)
        if capped is not None:
            one = torch.ones((), dtype=torch.float32, device=weight.device)
            gradient.mul_(torch.addcmul(one, capped, capped, value=-1.0, out=capped))
        del capped  # what follows holds the gradient in dtype only
        gradient = gradient.to(dtype)
        hidden_gradients.append((gradient @ weight).to(hidden_ND.dtype))
        if dtype == torch.float32:
            torch.addmm(weight_gradient, gradient.t(), hidden, out=weight_gradient)
        else:
            weight_gradient += gradient.t() @ hidden
    return total, torch.cat(parts), torch.cat(hidden_gradients), weight_gradient.to(weight_VD.dtype)


class _SummedCrossEntropy(torch.autograd.Function):
    """The gradients are computed in forward, while a chunk's logits are at hand; backward only scales them."""

    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, labels_N, softcap, dtype):
        total, nats_N, hidden_gradient_ND, weight_gradient_VD = loss_and_gradients(
            hidden_ND, weight_VD, labels_N, softcap, dtype
        )
        ctx.save_for_backward(hidden_gradient_ND, weight_gradient_VD)
        ctx.mark_non_differentiable(nats_N)
        return total, nats_N

    @staticmethod
    def backward(ctx, loss_gradient, _):
        hidden_gradient_ND, weight_gradient_VD = ctx.saved_tensors
        scale = loss_gradient.to(torch.float32)
        return (
            (hidden_gradient_ND * scale).to(hidden_gradient_ND.dtype),
            (weight_gradient_VD * scale).to(weight_gradient_VD.dtype),
            None,
            None,
            None,
        )
