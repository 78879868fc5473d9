"""Texts that a model writes: tokens drawn row by row. The calculator that it may ask for: generation/tools.py.

Letters of shapes: B sequences, T positions, V vocabulary.
"""

import inspect
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pipeline.monitor.heartbeat import beat
from pipeline.process.errors import DataError
from pipeline.tokenizer.chat import prompt_ids
from pipeline.tokenizer.encode import document_start, encode_documents

if TYPE_CHECKING:
    from pipeline.generation.tools import ToolCalls


Ids = list[int]  # of tokens


def next_tokens(
    logits_BV: torch.Tensor,
    *,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generators: Sequence[torch.Generator],
) -> Ids:
    """Return each row's likeliest token at temperature 0, else one drawn after temperature, then top_k, then top_p, as
    `generate` does.

    Drawn on the CPU in fp32 with the row's generator alone: the global random state stays where it is, and equal
    logits and seed give the same token on any device. One wait for the device, however many rows. Raises DataError for
    logits that are no numbers.
    """
    # 1. The likeliest, found on the device: one wait for ids and whether they mean anything.
    if temperature == 0:
        likeliest_B = logits_BV.argmax(-1)
        finite_B = logits_BV.gather(-1, likeliest_B[:, None])[:, 0].isfinite()
        ids, finite = torch.stack([likeliest_B, finite_B.to(likeliest_B.dtype)]).tolist()
        _refuse_nonfinite(all(finite))
        return ids
    # 2. Or one drawn from what temperature, top_k and top_p leave.
    logits_BV = logits_BV.float().cpu() / temperature
    _refuse_nonfinite(bool(logits_BV.amax(-1).isfinite().all()))
    if top_k is not None and top_k < logits_BV.shape[-1]:
        lowest_B1 = logits_BV.topk(top_k).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < lowest_B1, -torch.inf)
    if top_p is not None and top_p < 1:
        sorted_BV, order_BV = logits_BV.sort(descending=True)
        share_BV = sorted_BV.softmax(-1)
        # A token stays while those before it hold less than top_p, so the likeliest one always stays.
        dropped_BV = share_BV.cumsum(-1) - share_BV >= top_p
        dropped_BV[:, 0] = False
        logits_BV = logits_BV.masked_fill(dropped_BV.gather(-1, order_BV.argsort(-1)), -torch.inf)
    drawn = []
    for share_V, generator in zip(logits_BV.softmax(-1), generators, strict=True):
        drawn.append(int(torch.multinomial(share_V, 1, generator=generator)))
    return drawn


def _refuse_nonfinite(finite: bool) -> None:
    """Raise DataError unless each row's largest logit is finite: it is NaN where any is, and there is nothing to
    choose by."""
    if not finite:
        raise DataError(
            "the model computes no numbers (its logits are NaN or infinite), so no token follows. Take another "
            "checkpoint, or compute in float32."
        )


def generator_of(seed: int) -> torch.Generator:
    return torch.Generator(device="cpu").manual_seed(seed)


def stream(model, tokenizer, ids: Ids, *, seed: int = 0, **settings: Any) -> Iterator[int]:
    """Yield the tokens that follow `ids`, each as soon as it is there; the settings are those of `stream_together`."""
    for step in stream_together(model, tokenizer, [ids], seeds=[seed], **settings):
        for _, token in step:
            yield token


def stream_together(
    model,
    tokenizer,
    prompts: Sequence[Ids],
    *,
    seeds: Sequence[int],
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_ids: Collection[int] | None = None,
    calculator: bool = False,
) -> Iterator[list[tuple[int, int]]]:
    """Yield the tokens that follow several prompts in one batch: after each forward, those that are new as (prompt's
    place, token).

    A row ends with a stop token that the model writes, which is not given, after max_new_tokens, or where the model
    has no more positions; it leaves the batch at once. stop_ids: default those of `stop_ids_of`. calculator: tool
    calls are answered, and the answer's tokens stand in the row and count as its own. seeds: one a prompt, which alone
    decides what is drawn for it. Prompts of unequal length are padded on the left. The global random state does not
    move and the model is left in the mode it was in. Raises ValueError when a prompt is empty, DataError for one
    longer than the model's positions.
    """
    stops = set(stop_ids_of(model, tokenizer) if stop_ids is None else stop_ids)
    limit = positions(model)
    if not all(prompts):
        raise ValueError("nothing to continue: a prompt has no ids; begin with the BOS id")
    longest = max(map(len, prompts))
    if limit is not None and longest > limit:
        raise DataError(f"a prompt of {longest} tokens is longer than the model's {limit} positions. Shorten it.")
    if calculator:
        from pipeline.generation.tools import ToolCalls

    # 1. One row a prompt, padded on the left so that all of them end where the next token comes.
    rows = []
    for place, (ids, seed) in enumerate(zip(prompts, seeds, strict=True)):
        room = max_new_tokens if limit is None else min(max_new_tokens, limit - len(ids))
        calls = ToolCalls(tokenizer) if calculator else None
        rows.append(_Row(place=place, room=room, generator=generator_of(seed), calls=calls))
    sampling: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    pad = tokenizer.pad_token_id or 0
    input_ids_BT = torch.tensor([[pad] * (longest - len(ids)) + ids for ids in prompts], device=model.device)
    aligned = _alignment([len(ids) for ids in prompts], model.device)

    # 2. A token for each row, until none has room. The cache holds what came before; the forward gets the new tokens.
    cache: Any = None
    while rows:
        logits_BV, cache = forward_last(model, input_ids_BT, cache=cache, **aligned)
        drawn = next_tokens(logits_BV, generators=[row.generator for row in rows], **sampling)
        tokens = [row.take(token, stops) for row, token in zip(rows, drawn, strict=True)]
        yield [(row.place, token) for row, token in zip(rows, tokens, strict=True) if token is not None]
        # 3. Rows that ended leave the batch.
        kept = [n for n, row in enumerate(rows) if row.room > 0]
        if 0 < len(kept) < len(rows):
            kept_B = torch.tensor(kept, device=model.device)
            # Not batch_select_indices: in transformers 5.23 it leaves the states of convolutions, `smear` here, as
            # they were.
            cache.reorder_cache(kept_B)
            aligned = {name: tensor_BT[kept_B] for name, tensor_BT in aligned.items()}
        rows = [rows[n] for n in kept]
        input_ids_BT = torch.tensor([[tokens[n]] for n in kept], device=model.device)
        aligned = _one_further(aligned)


@dataclass
class _Row:
    place: int
    room: int  # Tokens that it may still get.
    generator: torch.Generator
    calls: "ToolCalls | None"
    due: deque[int] = field(default_factory=deque)  # A tool's answer, which comes before what the model writes.

    def take(self, drawn: int, stops: Collection[int]) -> int | None:
        """Return the row's next token, or None where it ends."""
        if self.room == 0 or (not self.due and drawn in stops):
            self.room = 0
            return None
        token = self.due.popleft() if self.due else drawn
        self.room -= 1
        if self.calls is not None:
            self.due.extend(self.calls.push(token))
        return token


def _alignment(lengths: Ids, device: torch.device) -> dict[str, torch.Tensor]:
    """Return mask and positions of rows that are padded on the left; nothing for equal lengths, whose kernels need no
    mask."""
    longest = max(lengths)
    if min(lengths) == longest:
        return {}
    mask_BT = torch.tensor([[0] * (longest - length) + [1] * length for length in lengths], device=device)
    return {"attention_mask": mask_BT, "position_ids": (mask_BT.cumsum(-1) - 1).clamp(min=0)}


def _one_further(aligned: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if not aligned:
        return aligned
    mask_BT = aligned["attention_mask"]
    mask_BT = torch.cat([mask_BT, mask_BT.new_ones(len(mask_BT), 1)], dim=-1)
    return {"attention_mask": mask_BT, "position_ids": aligned["position_ids"][:, -1:] + 1}


def cache_argument(model) -> str:
    """Return the name of a cache among the arguments of the model's forward: `cache` in transformers' own models since
    5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def cache_of(output: Any) -> Any:
    """Return the cache of a model's output, None where it has none."""
    return output.cache if hasattr(output, "cache") else getattr(output, "past_key_values", None)


def forward_last(model, input_ids_BT: torch.Tensor, cache: Any = None, **inputs: Any) -> tuple[torch.Tensor, Any]:
    """Return (B, V) logits of the last position, and the cache behind it; without gradient and in evaluation mode.

    Raises DataError for a model that keeps no cache.

    Written as one call and no context around the whole generation: a generator that is left half-way would leave the
    caller without gradients.
    """
    beat()
    known = inspect.signature(model.forward).parameters
    inputs[cache_argument(model)] = cache
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
    if (cache := cache_of(output)) is None:
        raise DataError(
            f"{type(model).__name__} keeps no cache of the text before a token (past_key_values, or cache), so no "
            "text can be written with it. Its bits per byte and CORE can be computed; for texts, take another model "
            "or a newer transformers."
        )
    return output.logits[:, -1], cache


def positions(model) -> int | None:
    """Return the longest sequence that the model takes, or None when its config does not say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def stop_ids_of(model, tokenizer) -> set[int]:
    """Return what ends a text: the end token, a BOS (the next document begins), and what the model's generation config
    names."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if not isinstance(named, list):
        named = [named]
    return {*named, tokenizer.eos_token_id, tokenizer.bos_token_id} - {None}


def complete(
    model,
    tokenizer,
    prompts: list[str],
    *,
    chat: bool,
    system: str | None = None,
    batch_size: int = 1,
    **settings: Any,
) -> list[str]:
    """Return what the model writes after each prompt, up to an end token; control tokens are left out of the text.

    chat: a prompt is the user's first message (after `system`), rendered by the chat template, and the calculator
    answers the model's tool calls; else it is a document's beginning. The settings are those of `continuations`: a
    prompt's text does not depend on the other prompts, and no global random state moves.
    """
    ids_of = partial(_chat_ids, system=system) if chat else document_ids
    ids = [ids_of(tokenizer, prompt) for prompt in prompts]
    found = continuations(model, tokenizer, ids, batch_size=batch_size, calculator=chat, **settings)
    return [tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False) for new in found]


def document_ids(tokenizer, text: str) -> Ids:
    """Return the ids of a document's beginning: what documents began with in training, where the tokenizer has it, and
    the text."""
    start = document_start(tokenizer)
    ids = encode_documents(tokenizer, [text])[0].tolist()
    return ids if start is None else [start, *ids]


def continuations(
    model,
    tokenizer,
    prompts: Sequence[Ids],
    *,
    batch_size: int,
    seed: int = 0,
    watched: Callable[[Iterable], Iterable] = iter,
    **settings: Any,
) -> list[Ids]:
    """Return the tokens that follow each prompt, in the prompts' order; the settings are those of `stream_together`.

    Prompts of about one length are continued together, the longest first: what is too much for the memory is so at
    once. Each prompt has its own seed (seed + its place). watched: what the steps of a batch go through, for a caller
    who may want to end early.
    """
    found: list[Ids] = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda place: -len(prompts[place]))
    for first in range(0, len(order), batch_size):
        places = order[first : first + batch_size]
        seeds = [seed + place for place in places]
        batch = stream_together(model, tokenizer, [prompts[place] for place in places], seeds=seeds, **settings)
        for step in watched(batch):
            for row, token in step:
                found[places[row]].append(token)
    return found


def _chat_ids(tokenizer, prompt: str, system: str | None) -> Ids:
    messages = [{"role": "system", "content": system}] if system else []
    return prompt_ids(tokenizer, [*messages, {"role": "user", "content": prompt}])
