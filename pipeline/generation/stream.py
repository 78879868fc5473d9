"""One continuation, token by token, from any causal LM of transformers."""

import inspect
from collections.abc import Collection, Iterator
from typing import Any

import torch

from pipeline.generation.sampling import generator_of, next_token
from pipeline.monitor.heartbeat import beat

# Letters: B sequences, T positions, V vocabulary.


def stream(
    model,
    tokenizer,
    ids: list[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop_ids: Collection[int] | None = None,
) -> Iterator[int]:
    """The tokens that follow `ids`, each as soon as it is there; a stop token ends them and is not given.

    Ends after max_new_tokens or where the model has no more positions. stop_ids: default those of `stop_ids_of`. The
    global random state does not move and the model is left in the mode it was in. Raises ValueError when ids are empty
    or already longer than the model's positions.
    """
    stops = stop_ids_of(model, tokenizer) if stop_ids is None else set(stop_ids)
    limit = positions(model)
    if not ids:
        raise ValueError("nothing to continue: ids are empty; begin with the BOS id")
    if limit is not None and len(ids) > limit:
        raise ValueError(f"{len(ids)} ids are more than the model's {limit} positions")
    steps = max_new_tokens if limit is None else min(max_new_tokens, limit - len(ids))
    generator = generator_of(seed)
    next_ids_BT = torch.tensor([ids], device=model.device)
    cache: Any = None
    for _ in range(steps):
        logits_BV, cache = forward_last(model, next_ids_BT, past_key_values=cache)
        token = next_token(logits_BV[0], temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
        if token in stops:
            return
        yield token
        next_ids_BT = torch.tensor([[token]], device=model.device)


def forward_last(model, input_ids_BT: torch.Tensor, **inputs: Any) -> tuple[torch.Tensor, Any]:
    """(B, V) logits of the last position, and the cache behind it; without gradient and in evaluation mode.

    Written as one call and no context around the whole generation: a generator that is left half-way would leave the
    caller without gradients.
    """
    beat()
    known = inspect.signature(model.forward).parameters
    if "logits_to_keep" in known:
        inputs["logits_to_keep"] = 1  # The head for the prompt's other positions would cost T x V numbers.
    if "position_ids" not in known:
        inputs.pop("position_ids", None)
    training = model.training
    if training:
        model.eval()
    try:
        with torch.no_grad():
            output = model(input_ids=input_ids_BT, use_cache=True, **inputs)
    finally:
        if training:
            model.train()
    return output.logits[:, -1], output.past_key_values


def positions(model) -> int | None:
    """The longest sequence the model takes, or None when its config does not say."""
    return getattr(model.config, "max_position_embeddings", None)


def stop_ids_of(model, tokenizer) -> set[int]:
    """What ends a text: the end token, a BOS (the next document begins), and what the model's generation config names."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    named = named if isinstance(named, list) else [named]
    return {i for i in (*named, tokenizer.eos_token_id, tokenizer.bos_token_id) if i is not None}
