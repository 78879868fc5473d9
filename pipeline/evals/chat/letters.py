"""Multiple choice by the logits of the letters alone: one forward pass a question, nothing is generated."""

import inspect
from collections.abc import Callable, Iterable, Sequence

import torch

from pipeline.artifacts.errors import DataError
from pipeline.monitor.heartbeat import beat
from pipeline.tokenizer.chat import prompt_ids

# Letters: B rows, T positions, K kept positions, V vocabulary.


def letter_ids(tokenizer, letters: Iterable[str]) -> dict[str, int]:
    """The id of each letter where the assistant's answer begins.

    Raises DataError when a letter is not one token there: its logit would then not be the answer's.
    """
    messages = [{"role": "user", "content": "A or B?"}]
    before = prompt_ids(tokenizer, messages, today=True)  # as the text below
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids, wrong = {}, []
    for letter in dict.fromkeys(letters):
        after = tokenizer(text + letter, add_special_tokens=False)["input_ids"]
        if after[:-1] == before:
            ids[letter] = after[-1]
        else:
            wrong.append(letter)
    if wrong or len(set(ids.values())) < len(ids):
        what = f"{', '.join(map(repr, wrong))} is not one token" if wrong else "two letters are the same token"
        raise DataError(
            f"the tokenizer: {what} where the assistant's answer begins, so the letters' logits say nothing. Take a tokenizer that has them, or leave out the tasks of letters."
        )
    return ids


def chosen_letters(
    model,
    prompts: Sequence[list[int]],
    letters: Sequence[Sequence[int]],
    *,
    pad: int,
    batch_rows: int,
    watched: Callable[[Iterable], Iterable] = iter,
) -> list[int]:
    """For each prompt, the place among its letters' ids of the one with the highest logit behind the prompt.

    The same for any batch_rows: rows are padded on the right, where a causal model does not look. watched: what the
    batches go through.
    """
    # Longest first: what does not fit into memory is known at once, and a batch is padded little.
    order = sorted(range(len(prompts)), key=lambda n: -len(prompts[n]))
    chosen = [0] * len(prompts)
    for some in watched([order[first : first + batch_rows] for first in range(0, len(order), batch_rows)]):
        logits_BV = _last_logits(model, [prompts[n] for n in some], pad=pad)
        for n, logits_V in zip(some, logits_BV, strict=True):
            chosen[n] = int(logits_V[list(letters[n])].argmax())
    return chosen


def _last_logits(model, prompts: list[list[int]], *, pad: int) -> torch.Tensor:
    """(B, V) logits behind each prompt, fp32 on the CPU."""
    beat()
    width = max(map(len, prompts))
    ids_BT = torch.tensor([ids + [pad] * (width - len(ids)) for ids in prompts], device=model.device)
    last_B = torch.tensor([len(ids) - 1 for ids in prompts], device=model.device)
    with torch.no_grad():
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            kept_K, place_B = last_B.unique(return_inverse=True)  # Few: the prompts are sorted by length.
            logits_BKV = model(input_ids=ids_BT, use_cache=False, logits_to_keep=kept_K).logits
        else:
            logits_BKV, place_B = model(input_ids=ids_BT, use_cache=False).logits, last_B
        return logits_BKV[torch.arange(len(prompts), device=model.device), place_B].float().cpu()
