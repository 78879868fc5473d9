"""Cross-entropy of the next token that never holds the logits of a whole batch in fp32.

Shapes: N scored positions (rows of hidden states), D width, V vocabulary.
"""

import torch

# Elements of the fp32 logits held at a time: 128 MiB. A small head (16 rows of 256 tokens, vocabulary 4096) takes one chunk.
CHUNK_ELEMENTS = 2**25
SAFE_EXPONENT = 60.0  # exp of it, times any vocabulary, is far from the largest fp32
IGNORED = -100  # the label of a position without a target, as everywhere in transformers


def chunk_rows(num_rows: int, vocab_size: int) -> int:
    """Rows of one chunk: the fewest chunks of equal size within CHUNK_ELEMENTS."""
    chunks = max(1, -(-num_rows * vocab_size // CHUNK_ELEMENTS))
    return max(1, -(-num_rows // chunks))


def logits_of(hidden_ND, weight_VD, softcap: float | None):
    """fp32 logits (N, V); the product itself is in hidden_ND's dtype."""
    logits_NV = (hidden_ND @ weight_VD.t()).float()
    return logits_NV if softcap is None else softcap * torch.tanh(logits_NV / softcap)


def token_nll(hidden_ND, weight_VD, labels_N, *, softcap: float | None = None):
    """Nats of each label: (N,) float32, 0 where the label is -100. Without gradients."""
    dtype = _compute_dtype(hidden_ND)
    hidden_ND, weight_VD = hidden_ND.to(dtype), weight_VD.to(dtype)
    rows = chunk_rows(hidden_ND.shape[0], weight_VD.shape[0])
    parts = []
    for hidden, labels in zip(hidden_ND.split(rows), labels_N.split(rows), strict=True):
        logits = logits_of(hidden, weight_VD, softcap)
        target = labels.clamp(min=0)[:, None]
        nll = torch.logsumexp(logits, -1) - logits.gather(1, target).squeeze(1)
        parts.append(nll * (labels != IGNORED))
    return torch.cat(parts)


def summed_cross_entropy(hidden_ND, weight_VD, labels_N, *, softcap: float | None = None):
    """Sum of the labels' nats, float32, exact over all chunks; differentiable in hidden_ND and weight_VD.

    Under autocast the products are in its dtype, everything from the logits on is float32.
    """
    if not torch.is_grad_enabled():
        return token_nll(hidden_ND, weight_VD, labels_N, softcap=softcap).sum()
    rows = chunk_rows(hidden_ND.shape[0], weight_VD.shape[0])
    return _SummedCrossEntropy.apply(hidden_ND, weight_VD, labels_N, softcap, rows, _compute_dtype(hidden_ND))


def _compute_dtype(tensor) -> torch.dtype:
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


class _SummedCrossEntropy(torch.autograd.Function):
    """The gradients are computed in forward, while a chunk's logits are at hand; backward only scales them.

    In place wherever it can be: of a chunk two fp32 tensors (rows, V) are held at a time, one without a softcap.
    """

    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, labels_N, softcap, rows, dtype):
        weight = weight_VD.to(dtype)
        total = torch.zeros((), dtype=torch.float32, device=weight.device)
        hidden_gradients: list[torch.Tensor] = []
        weight_gradient = torch.zeros_like(weight_VD, dtype=torch.float32)
        for hidden, labels in zip(hidden_ND.to(dtype).split(rows), labels_N.split(rows), strict=True):
            ignored = (labels == IGNORED)[:, None]
            target = labels.clamp(min=0)[:, None]
            logits = (hidden @ weight.t()).float()
            if softcap is None:
                of_target, slope = logits.gather(1, target), None
            else:
                slope = logits.div_(softcap).tanh_()  # as yet the capped logits / softcap
                logits = slope * softcap
                of_target = logits.gather(1, target)
            if softcap is None or softcap > SAFE_EXPONENT:  # else the cap bounds the exponent: a pass less
                largest = logits.amax(-1, keepdim=True)
                logits, of_target = logits.sub_(largest), of_target - largest
            gradient = logits.exp_()
            sums = gradient.sum(-1, keepdim=True)
            total = total + (sums.log() - of_target).masked_fill(ignored, 0.0).sum()
            gradient.div_(sums)
            gradient.scatter_add_(1, target, torch.full_like(sums, -1.0))
            if slope is not None:
                gradient.mul_(slope.square_().neg_().add_(1.0))
            del slope, logits  # another name of gradient: what follows holds it in dtype only
            gradient = gradient.masked_fill_(ignored, 0.0).to(dtype)
            hidden_gradients.append((gradient @ weight).to(hidden_ND.dtype))
            if dtype == torch.float32:
                weight_gradient.addmm_(gradient.t(), hidden)
            else:
                weight_gradient += gradient.t() @ hidden
        ctx.save_for_backward(torch.cat(hidden_gradients), weight_gradient.to(weight_VD.dtype))
        return total

    @staticmethod
    def backward(ctx, loss_gradient):
        hidden_gradient_ND, weight_gradient_VD = ctx.saved_tensors
        scale = loss_gradient.to(torch.float32)
        return (
            (hidden_gradient_ND * scale).to(hidden_gradient_ND.dtype),
            (weight_gradient_VD * scale).to(weight_gradient_VD.dtype),
            None,
            None,
            None,
            None,
        )
