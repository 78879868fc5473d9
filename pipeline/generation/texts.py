"""Texts that a model writes for a list of prompts."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pipeline.generation.stream import stream_together
from pipeline.tokenizer.chat import prompt_ids
from pipeline.tokenizer.encode import encode_documents
from pipeline.tokenizer.specials import document_start


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
    watched: Callable[[Iterable], Iterable] = iter,
) -> list[str]:
    """Return what the model writes after each prompt, up to an end token; control tokens are left out of the text.

    chat: a prompt is the user's first message (after `system`), rendered by the chat template, and the calculator answers
    the model's tool calls; else it is a document's beginning. Each prompt has its own seed (seed + its place), so that
    its text does not depend on the other prompts. batch_size: prompts that are generated together. No global random state
    moves. watched: what the steps of a batch go through, for a caller who may want to end early.
    """
    ids = [_chat_ids(tokenizer, prompt, system) if chat else document_ids(tokenizer, prompt) for prompt in prompts]
    found = continuations(
        model,
        tokenizer,
        ids,
        batch_size=batch_size,
        seed=seed,
        watched=watched,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        calculator=chat,
    )
    return [tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False) for new in found]


def document_ids(tokenizer, text: str) -> list[int]:
    """Return the ids of a document's beginning: what documents began with in training, where the tokenizer has it, and the text."""
    start = document_start(tokenizer)
    return ([] if start is None else [start]) + encode_documents(tokenizer, [text])[0].tolist()


def continuations(
    model,
    tokenizer,
    prompts: Sequence[list[int]],
    *,
    batch_size: int,
    seed: int = 0,
    watched: Callable[[Iterable], Iterable] = iter,
    **settings: Any,
) -> list[list[int]]:
    """Return the tokens that follow each prompt, in the prompts' order; the settings are those of `stream_together`.

    Prompts of about one length are continued together, the longest first: what is too much for the memory is so at once.
    Each prompt has its own seed (seed + its place). watched: what the steps of a batch go through.
    """
    found: list[list[int]] = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda place: -len(prompts[place]))
    for first in range(0, len(order), batch_size):
        places = order[first : first + batch_size]
        seeds = [seed + place for place in places]
        batch = stream_together(model, tokenizer, [prompts[place] for place in places], seeds=seeds, **settings)
        for step in watched(batch):
            for row, token in step:
                found[places[row]].append(token)
    return found


def _chat_ids(tokenizer, prompt: str, system: str | None) -> list[int]:
    messages = [{"role": "system", "content": system}] if system else []
    return prompt_ids(tokenizer, [*messages, {"role": "user", "content": prompt}])
