"""From the logits of one position to a token."""

import torch

# Letters: V vocabulary.


def next_token(
    logits_V: torch.Tensor,
    *,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator,
) -> int:
    """The likeliest token at temperature 0, else one drawn after temperature, then top_k, then top_p, as `generate` does.

    Drawn on the CPU in fp32 with the generator alone: the global random state stays where it is, and equal logits and
    seed give the same token on any device.
    """
    if temperature == 0:
        return int(logits_V.argmax())
    logits_V = logits_V.float().cpu() / temperature
    if top_k is not None and top_k < len(logits_V):
        logits_V = logits_V.masked_fill(logits_V < logits_V.topk(top_k).values[-1], -torch.inf)
    if top_p is not None and top_p < 1:
        sorted_V, order_V = logits_V.sort(descending=True)
        share_V = sorted_V.softmax(-1)
        # A token stays while those before it hold less than top_p, so the likeliest one always stays.
        dropped_V = share_V.cumsum(-1) - share_V >= top_p
        dropped_V[0] = False
        logits_V = logits_V.masked_fill(dropped_V[order_V.argsort()], -torch.inf)
    return int(torch.multinomial(logits_V.softmax(-1), 1, generator=generator))


def generator_of(seed: int) -> torch.Generator:
    return torch.Generator(device="cpu").manual_seed(seed)
