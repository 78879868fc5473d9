"""Texts that a model writes for a list of prompts."""

import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch

from pipeline.generation.sampling import generator_of, next_token
from pipeline.generation.stream import forward_last, positions, stop_ids_of, stream
from pipeline.tokenizer.chat import prompt_ids
from pipeline.tokenizer.encode import encode_documents

# Letters: B sequences, T positions.


def complete(
    model,
    tokenizer,
    prompts: list[str],
    *,
    chat: bool,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    system: str | None = None,
    batch_size: int = 1,
    watched: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> list[str]:
    """What the model writes after each prompt, up to an end token; control tokens are left out of the text.

    chat: a prompt is the user's first message (after `system`), rendered by the chat template; else it is a document's
    beginning. Each prompt has its own seed (seed + its place), so that its text does not depend on the other prompts.
    batch_size: prompts that are generated together, padded on the left. No global random state moves. watched: what the
    tokens of a single prompt go through, for a caller who may want to end early.
    """
    ids = [_chat_ids(tokenizer, prompt, system) if chat else document_ids(tokenizer, prompt) for prompt in prompts]
    sampling: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    found: list[list[int]] = []
    for first in range(0, len(ids), batch_size):
        some = ids[first : first + batch_size]
        if len(some) == 1:
            one = stream(model, tokenizer, some[0], max_new_tokens=max_new_tokens, seed=seed + first, **sampling)
            found.append(list(watched(one)))
        else:
            found += continue_together(
                model, tokenizer, some, max_new_tokens=max_new_tokens, seed=seed + first, **sampling
            )
    return [tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False) for new in found]


def document_ids(tokenizer, text: str) -> list[int]:
    """The ids of a document's beginning: BOS, where the tokenizer has one, and the text."""
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    return bos + encode_documents(tokenizer, [text])[0].tolist()


def continue_together(
    model,
    tokenizer,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop_ids: Collection[int] | None = None,
) -> list[list[int]]:
    """`stream` for several prompts in one batch, padded on the left; prompt n is sampled with seed + n.

    A row that has ended is fed padding until the last one ends.
    """
    stops = stop_ids_of(model, tokenizer) if stop_ids is None else set(stop_ids)
    longest, limit = max(map(len, prompts)), positions(model) or sys.maxsize
    if min(map(len, prompts)) == 0:
        raise ValueError("nothing to continue: a prompt has no ids; begin with the BOS id")
    if longest > limit:
        raise ValueError(f"{longest} ids are more than the model's {limit} positions")
    pad = tokenizer.pad_token_id or 0
    generators = [generator_of(seed + n) for n in range(len(prompts))]
    found: list[list[int]] = [[] for _ in prompts]
    ended = [False] * len(prompts)
    next_ids_BT = torch.tensor([[pad] * (longest - len(ids)) + ids for ids in prompts], device=model.device)
    mask_BT = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts], device=model.device)
    position_ids_BT = (mask_BT.cumsum(-1) - 1).clamp(min=0)
    cache = None
    for _ in range(max_new_tokens):
        logits_BV, cache = forward_last(
            model, next_ids_BT, attention_mask=mask_BT, position_ids=position_ids_BT, past_key_values=cache
        )
        tokens = []
        for n, generator in enumerate(generators):
            token = next_token(logits_BV[n], temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
            ended[n] = ended[n] or token in stops or len(prompts[n]) + len(found[n]) >= limit
            tokens.append(pad if ended[n] else token)
            if not ended[n]:
                found[n].append(token)
        if all(ended):
            break
        next_ids_BT = torch.tensor(tokens, device=model.device)[:, None]
        mask_BT = torch.cat([mask_BT, mask_BT.new_ones(len(prompts), 1)], dim=-1)
        position_ids_BT = (position_ids_BT[:, -1:] + 1).clamp(max=limit - 1)  # Rows that have ended run on.
    return found


def _chat_ids(tokenizer, prompt: str, system: str | None) -> list[int]:
    messages = [{"role": "system", "content": system}] if system else []
    return prompt_ids(tokenizer, [*messages, {"role": "user", "content": prompt}])
