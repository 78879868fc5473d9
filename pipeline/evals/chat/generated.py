"""What the assistant writes to each prompt: greedy, in batches, up to the end of its turn."""

from collections.abc import Callable, Iterable, Sequence

from pipeline.generation.texts import continuations


def written_answers(
    model,
    tokenizer,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    batch_rows: int,
    watched: Callable[[Iterable], Iterable] = iter,
) -> list[list[int]]:
    """The ids of each answer, without the token that ended it; the calculator answers its tool calls.

    watched: what the batches, a list, and the steps of each go through.
    """
    # Longest first: what does not fit into memory is known at once, and a batch is padded little.
    order = sorted(range(len(prompts)), key=lambda n: -len(prompts[n]))
    answers: list[list[int]] = [[] for _ in prompts]
    for some in watched([order[first : first + batch_rows] for first in range(0, len(order), batch_rows)]):
        found = continuations(
            model,
            tokenizer,
            [prompts[n] for n in some],
            batch_size=batch_rows,
            watched=watched,
            max_new_tokens=max_new_tokens,
            calculator=True,
        )
        for n, ids in zip(some, found, strict=True):
            answers[n] = ids
    return answers
