"""What the assistant writes to each prompt: greedy, in batches, up to the end of its turn."""

from collections.abc import Callable, Iterable, Sequence

from pipeline.generation.texts import continue_together


def written_answers(
    model,
    tokenizer,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    batch_rows: int,
    watched: Callable[[Iterable], Iterable] = iter,
) -> list[list[int]]:
    """The ids of each answer, without the token that ended it. watched: what the batches go through."""
    order = sorted(range(len(prompts)), key=lambda n: -len(prompts[n]))
    answers: list[list[int]] = [[] for _ in prompts]
    for some in watched([order[first : first + batch_rows] for first in range(0, len(order), batch_rows)]):
        found = _answer_batch(model, tokenizer, [prompts[n] for n in some], max_new_tokens=max_new_tokens)
        for n, ids in zip(some, found, strict=True):
            answers[n] = ids
    return answers


def _answer_batch(model, tokenizer, prompts: list[list[int]], *, max_new_tokens: int) -> list[list[int]]:
    return continue_together(model, tokenizer, prompts, max_new_tokens=max_new_tokens)
