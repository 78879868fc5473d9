"""Accuracy of a chat model on its tasks, and ChatCORE: the mean of what they are above guessing."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from pipeline.artifacts.errors import DataError, RecipeError, TandemError
from pipeline.evals.chat.files import LoadedTask
from pipeline.evals.chat.letters import letter_ids
from pipeline.evals.chat.share import Examiner, Share
from pipeline.hardware.cpu import usable_cores

# Source: nanochat scripts/chat_eval.py. It once had a sixth task, SpellingBee, with questions of its own.
CHAT_CORE = ("arc_easy", "arc_challenge", "mmlu", "gsm8k", "humaneval")


@dataclass(frozen=True, kw_only=True)
class TaskScore:
    """One task's result over all ranks.

    n: items scored, the first of the `of` that its files hold. complete: whether they are the whole official test set.
    centred: 0 for guessing, 1 for all right. interval: of the accuracy, 95 % (Wilson). correct: by item, in their order.
    too_long: items whose question has more tokens than the model's positions; they count as wrong. seconds: of the slowest
    rank. tokens_forwarded: of the questions, without padding; tokens_generated: of the answers. isolation: what the
    programs of the task were run in, None where there are none.
    """

    name: str
    n: int
    of: int
    complete: bool
    accuracy: float
    centred: float
    interval: tuple[float, float]
    correct: list[bool]
    too_long: int
    seconds: float
    tokens_forwarded: int
    tokens_generated: int
    isolation: str | None = None


def score_chat_tasks(
    tasks: list[LoadedTask],
    model,
    tokenizer,
    *,
    max_per_task: int | None = None,
    batch_rows: int = 8,
    rank: int = 0,
    world_size: int = 1,
    execute: bool = False,
    unsafe_exec: bool = False,
    watched: Callable[[Iterable], Iterable] = iter,
    where: str = "chat tasks",
) -> list[TaskScore]:
    """The scores of all tasks, the same on every rank and for any batch_rows.

    max_per_task: only the first items of each. Items are dealt out to the ranks, which meet once, at the end: each needs a
    whole model. execute: programs that the model writes may be run, in the sandbox unless unsafe_exec. watched: what the
    batches of a task go through (a list, for each task anew). Before anything is scored raises DataError for a tokenizer
    without chat template or letters, RecipeError for programs that may not be run; DataError when a checker fails.
    """
    assert max_per_task is None or max_per_task > 0, max_per_task
    ids_of_letters, isolation = _ready(tasks, tokenizer, execute=execute, unsafe_exec=unsafe_exec, where=where)
    examiner = Examiner(
        model=model,
        tokenizer=tokenizer,
        batch_rows=batch_rows,
        watched=watched,
        ids_of_letters=ids_of_letters,
        isolation=isolation,
        workers=max(1, usable_cores() // world_size),
    )
    shares: list[Share] = []
    problem: TandemError | None = None
    training = model.training
    model.eval()
    try:
        for loaded in tasks:
            items = dict(list(enumerate(loaded.items[:max_per_task]))[rank::world_size])
            shares.append(examiner.share(loaded.task, items))
    except TandemError as error:
        problem = error  # Raised by all ranks, after they have met.
    finally:
        model.train(training)
    found = _gathered((shares, problem), world_size)
    for _, raised in found:
        if raised is not None:
            raise raised
    return [
        _task_score(loaded, [of_rank[n] for of_rank, _ in found], isolation.name if loaded.task.program else None)
        for n, loaded in enumerate(tasks)
    ]


def chat_numbers(scores: list[TaskScore]) -> dict[str, float]:
    """chat/<task>: accuracy. chat/core: the mean centred accuracy of nanochat's five tasks, when all are complete.

    chat/core_part: the same where not all of their items were asked. chat/core_spelling_bee: over the five and
    spelling_bee. Another selection of tasks has no figure of its own.
    """
    numbers = {f"chat/{score.name}": score.accuracy for score in scores}
    by_name = {score.name: score for score in scores}
    for name, tasks in (("chat/core", CHAT_CORE), ("chat/core_spelling_bee", (*CHAT_CORE, "spelling_bee"))):
        if set(tasks) <= set(by_name):
            chosen = [by_name[task] for task in tasks]
            part = "" if all(score.complete for score in chosen) else "_part"
            numbers[name + part] = math.fsum(score.centred for score in chosen) / len(chosen)
    return numbers


def wilson_interval(right: int, n: int) -> tuple[float, float]:
    """The 95 % confidence interval of a share of right out of n (Wilson 1927)."""
    z = 1.959963984540054
    middle = (right + z * z / 2) / (n + z * z)
    half = z / (n + z * z) * math.sqrt(right * (n - right) / n + z * z / 4)
    # At the ends the two differ by rounding alone.
    return middle - half if right else 0.0, middle + half if right < n else 1.0


def _ready(
    tasks: list[LoadedTask], tokenizer, *, execute: bool, unsafe_exec: bool, where: str
) -> tuple[dict[str, int], Any]:
    """The letters' ids, and what isolates programs if there will be any; raises all that would stop the scoring later."""
    programs = [loaded.task.name for loaded in tasks if loaded.task.program]
    if programs and not execute:
        raise RecipeError(
            f"{where}: {', '.join(programs)} runs programs that the model wrote, and that was not asked for. Allow it (they run in a sandbox), or leave the task out."
        )
    if not tokenizer.chat_template:
        raise DataError(
            f"{where}: the tokenizer has no chat template, so questions cannot be put to the model. Score a model tuned for chat."
        )
    letters = {letter for loaded in tasks for item in loaded.items for letter in item.letters}
    ids_of_letters = letter_ids(tokenizer, sorted(letters))
    if not programs:
        return ids_of_letters, None
    from pipeline.evals.sandbox.choose import choose_isolation

    return ids_of_letters, choose_isolation(unsafe_exec, where=where)


def _gathered(mine: Any, world_size: int) -> list[Any]:
    if world_size == 1:
        return [mine]
    everyones: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(everyones, mine)
    return everyones


def _task_score(loaded: LoadedTask, shares: list[Share], isolation: str | None) -> TaskScore:
    correct = {n: right for share in shares for n, right in share.correct.items()}
    right, n, of = sum(correct.values()), len(correct), len(loaded.items)
    baseline = loaded.task.baseline
    return TaskScore(
        name=loaded.task.name,
        n=n,
        of=of,
        complete=n == of and of == (loaded.task.rows or of),
        accuracy=right / n,
        centred=(right / n - baseline) / (1 - baseline),
        interval=wilson_interval(right, n),
        correct=[correct[number] for number in range(n)],
        too_long=sum(share.too_long for share in shares),
        seconds=max(share.seconds for share in shares),
        tokens_forwarded=sum(share.tokens_forwarded for share in shares),
        tokens_generated=sum(share.tokens_generated for share in shares),
        isolation=isolation,
    )
