"""Try on two short texts whether a model lets the texts of a row see each other."""

import copy
from typing import Any, Literal

import torch

Found = Literal["isolates", "leaks", "looks_ahead"]

LENGTHS = (19, 23)  # tokens of the two texts: longer than a convolution, and no multiple of a chunk
# Shares of what the first text changes in the second where nothing keeps it out. SEEN: by another first text, which
# rounding leaves as it was but where experts share products. MOVED: against the second text alone, whose products have
# other shapes. Over all types of transformers (benchmarks/isolation.py) rounding came to 1e-6 and 4e-6, the weakest
# leak to 3e-4 (a new falcon_h1).
SEEN, MOVED = 3e-5, 1e-3
BLANK = 1e-4  # of the logits: the blocks of a new model may write nothing yet
STD = 0.1
MASKED = 1e30


@torch.no_grad()
def try_isolation(model: Any, *, row_tokens: int = sum(LENGTHS)) -> Found:
    """Return whether a text behind another one in a row has the logits that it has alone, when its positions begin
    again at 0.

    The model is on the CPU and called as training calls it: no mask, no cache. A new one whose blocks compute nothing
    yet is tried as a copy with random weights. looks_ahead: a token's logits depend on what comes behind it.
    """
    config, training, attention = model.config, model.training, model.config._attn_implementation
    parts = [(part, getattr(part, "use_cache", None)) for part in (config, config.get_text_config())]
    model.eval()  # dropout would give another result each time
    for part, _ in parts:
        part.use_cache = False  # as while training: with a cache, transformers takes a row for one text
    if attention not in ("eager", "sdpa"):
        config._attn_implementation = "eager"  # flash kernels do not run on the CPU
    try:
        return _found(model, row_tokens) or _found(_random_copy(model), row_tokens) or "isolates"
    finally:
        for part, use_cache in parts:
            part.use_cache = use_cache
        config._attn_implementation = attention
        model.train(training)


def _found(model: Any, row_tokens: int) -> Found | None:
    """Return None where no text changes what is behind it."""
    first = min(LENGTHS[0], row_tokens // 2)
    second = min(LENGTHS[1], row_tokens - first)
    vocab_size = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    # Control tokens and those of images mostly lie at the ends of a vocabulary.
    ids = torch.randint(vocab_size // 8, vocab_size // 2, (3, first + second), generator=generator)
    ids[1, first:] = ids[0, first:]  # the same second text behind another first one
    ids[2, :first] = ids[0, :first]  # another second text behind the same first one
    # 1. Does a token's logits depend on what comes behind it, and does a text change what follows it in a row at all?
    alone = _logits(model(input_ids=ids[:1, first:]))[0]
    together = _logits(model(input_ids=ids))
    if _largest(together[0, :first] - together[2, :first]) > SEEN * _largest(alone):
        return "looks_ahead"
    effect = _largest(together[0, first:] - alone)
    if effect <= BLANK * _largest(alone):
        return None
    # 2. Is that still so where the positions of the second text begin again at 0, as in packed rows?
    restarting = torch.cat([torch.arange(first), torch.arange(second)]).expand(3, -1)
    try:
        packed = _logits(model(input_ids=ids, position_ids=restarting))
    except Exception:  # it takes no positions, or none that begin again: a class of transformers or of the user's
        return "leaks"
    seen = _largest(packed[0, first:] - packed[1, first:])
    moved = _largest(packed[0, first:] - alone)
    if seen <= SEEN * effect and moved <= MOVED * effect:
        return "isolates"
    return "leaks"  # also where one is NaN


def _logits(output: Any) -> torch.Tensor:
    """Return the logits, 0 where a model masks them: with -inf or the lowest number."""
    logits = output.logits.float()
    return logits.masked_fill(logits < -MASKED, 0.0)


def _largest(difference: torch.Tensor) -> float:
    return difference.abs().max().item()


def _random_copy(model: Any) -> Any:
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.normal_(0.0, STD, generator=generator)
    return model
