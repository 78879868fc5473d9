"""From the logits of one position to a token."""

from collections.abc import Sequence

import torch

from pipeline.artifacts.errors import DataError

# Letters: B sequences, V vocabulary.


def next_tokens(
    logits_BV: torch.Tensor,
    *,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generators: Sequence[torch.Generator],
) -> list[int]:
    """Each row's likeliest token at temperature 0, else one drawn after temperature, then top_k, then top_p, as `generate` does.

    Drawn on the CPU in fp32 with the row's generator alone: the global random state stays where it is, and equal logits
    and seed give the same token on any device. One wait for the device, however many rows. Raises DataError for logits that are no numbers.
    """
    if temperature == 0:
        likeliest_B = logits_BV.argmax(-1)
        finite_B = logits_BV.gather(-1, likeliest_B[:, None])[:, 0].isfinite()
        ids, finite = torch.stack([likeliest_B, finite_B.to(likeliest_B.dtype)]).tolist()
        _refuse_nonfinite(all(finite))
        return ids
    logits_BV = logits_BV.float().cpu() / temperature
    _refuse_nonfinite(bool(logits_BV.amax(-1).isfinite().all()))
    if top_k is not None and top_k < logits_BV.shape[-1]:
        logits_BV = logits_BV.masked_fill(logits_BV < logits_BV.topk(top_k).values[:, -1:], -torch.inf)
    if top_p is not None and top_p < 1:
        sorted_BV, order_BV = logits_BV.sort(descending=True)
        share_BV = sorted_BV.softmax(-1)
        # A token stays while those before it hold less than top_p, so the likeliest one always stays.
        dropped_BV = share_BV.cumsum(-1) - share_BV >= top_p
        dropped_BV[:, 0] = False
        logits_BV = logits_BV.masked_fill(dropped_BV.gather(-1, order_BV.argsort(-1)), -torch.inf)
    shares_BV = logits_BV.softmax(-1)
    return [
        int(torch.multinomial(share_V, 1, generator=generator))
        for share_V, generator in zip(shares_BV, generators, strict=True)
    ]


def _refuse_nonfinite(finite: bool) -> None:
    """Raise DataError unless each row's largest logit is finite: it is NaN where any is, and there is nothing to choose by."""
    if not finite:
        raise DataError(
            "the model computes no numbers (its logits are NaN or infinite), so no token follows. Take another checkpoint, or compute in float32."
        )


def generator_of(seed: int) -> torch.Generator:
    return torch.Generator(device="cpu").manual_seed(seed)
