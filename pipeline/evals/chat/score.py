"""Accuracy of a chat model on its tasks, and ChatCORE: the mean of what they are above guessing."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pipeline.artifacts.errors import DataError, RecipeError
from pipeline.evals.chat.files import LoadedTask
from pipeline.evals.chat.letters import letter_ids
from pipeline.evals.chat.share import Examiner, Share
from pipeline.evals.chat.tasks import BUILT_IN, ChatTask
from pipeline.evals.intervals import mean_interval, share_interval
from pipeline.evals.sandbox.choose import choose_isolation
from pipeline.evals.sandbox.run import Isolation
from pipeline.evals.together import first_ranks_word, gathered_over_ranks
from pipeline.generation.stream import positions
from pipeline.hardware.cpu import usable_cores

# Source: nanochat scripts/chat_eval.py. It once had a sixth task, SpellingBee, with questions of its own.
CHAT_CORE = ("arc_easy", "arc_challenge", "mmlu", "gsm8k", "humaneval")
MEANS = {"chat/core": CHAT_CORE, "chat/core_spelling_bee": (*CHAT_CORE, "spelling_bee")}


@dataclass(frozen=True, kw_only=True)
class TaskScore:
    """One task's result over all ranks.

    n: items scored, the first of the `of` that its files hold. complete: whether they are the whole official test set.
    centred: 0 for guessing, 1 for all right. interval: of the accuracy, 95 %. correct: by item, in their order.
    too_long: items whose question has more tokens than the model's positions; they count as wrong. seconds: of the slowest
    rank. tokens_forwarded: of the questions, without padding; tokens_generated: of the answers. isolation: what the
    programs of the task were run in, None where there are none. window: the model's positions, None for any number.
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
    window: int | None = None


def score_chat_tasks(
    tasks: list[LoadedTask],
    model,
    tokenizer,
    *,
    max_per_task: int | None = None,
    max_s: float | None = None,
    batch_rows: int = 8,
    rank: int = 0,
    world_size: int = 1,
    execute: bool = False,
    unsafe_exec: bool = False,
    watched: Callable[[Iterable], Iterable] = iter,
    report: Callable[[TaskScore], None] | None = None,
    where: str = "chat tasks",
) -> list[TaskScore]:
    """The scores of the tasks in their order, the same on every rank and for any batch_rows.

    max_per_task: only the first items of each. max_s: no further task is begun after so many seconds. Items are dealt out
    to the ranks, each of which needs a whole model; they meet after each task, and an error on one is raised on all.
    execute: programs that the model writes may be run, in the sandbox unless unsafe_exec. watched: what the batches of a
    task go through (a list, for each task anew) and, where answers are generated, the steps of each batch; it may raise
    LeftEarly. report: called with each task's score as soon as it is there. Raises what `require_ready` raises before
    anything is scored; DataError when a checker fails.
    """
    assert max_per_task is None or max_per_task > 0, max_per_task
    started = time.monotonic()
    isolation = require_ready(tasks, tokenizer, execute=execute, unsafe_exec=unsafe_exec, where=where)
    examiner = Examiner(
        model=model,
        tokenizer=tokenizer,
        batch_rows=batch_rows,
        watched=watched,
        ids_of_letters=_ids_of_letters(tasks, tokenizer),
        isolation=isolation,
        workers=max(1, usable_cores() // world_size),
    )
    scores: list[TaskScore] = []
    training = model.training
    model.eval()
    try:
        for loaded in tasks:
            items = dict(list(enumerate(loaded.items[:max_per_task]))[rank::world_size])
            share, error = None, None
            try:
                share = examiner.share(loaded.task, items)
            except Exception as problem:  # told below, on every rank
                error = problem
            shares = gathered_over_ranks(share, world_size=world_size, error=error)
            name = isolation.name if isolation and loaded.task.program else None
            scores.append(_task_score(loaded, shares, name, positions(model)))
            if report is not None:
                report(scores[-1])
            if max_s is not None and first_ranks_word(time.monotonic() - started > max_s, model.device):
                break
    finally:
        model.train(training)
    return scores


def chat_numbers(scores: list[TaskScore]) -> dict[str, float]:
    """chat/<task>: accuracy. chat/core: the mean centred accuracy of nanochat's five tasks, when all are complete.

    chat/core_part: the same where not all of their items were asked. chat/core_spelling_bee: over the five and
    spelling_bee. Another selection of tasks has no figure of its own.
    """
    numbers = {f"chat/{score.name}": score.accuracy for score in scores}
    by_name = {score.name: score for score in scores}
    for name, tasks in MEANS.items():
        if set(tasks) <= set(by_name):
            chosen = [by_name[task] for task in tasks]
            part = "" if all(score.complete for score in chosen) else "_part"
            numbers[name + part] = math.fsum(score.centred for score in chosen) / len(chosen)
    return numbers


def chat_interval(scores: list[TaskScore], name: str, value: float) -> tuple[float, float]:
    """Return the 95 % interval of a mean of `chat_numbers`, given its value."""
    chosen = [score for score in scores if score.name in MEANS[name.removesuffix("_part")]]
    shares = [(round(score.accuracy * score.n), score.n) for score in chosen]
    slopes = [1 / (1 - BUILT_IN[score.name].baseline) for score in chosen]
    return mean_interval(shares, slopes=slopes, value=value)


def require_ready(
    tasks: list[LoadedTask],
    tokenizer,
    *,
    execute: bool,
    unsafe_exec: bool,
    where: str = "chat tasks",
) -> Isolation | None:
    """What isolates the model's programs, where a task has any.

    Raises all that would stop the scoring later: RecipeError for programs that may not be run, DataError for a tokenizer
    without chat template or without the letters as tokens.
    """
    isolation = require_execution([loaded.task for loaded in tasks], execute, unsafe_exec, where=where)
    if not tokenizer.chat_template:
        raise DataError(
            f"{where}: the tokenizer has no chat template, so questions cannot be put to the model. Score a model tuned for chat."
        )
    _ids_of_letters(tasks, tokenizer)
    return isolation


def require_execution(tasks: list[ChatTask], execute: bool, unsafe_exec: bool, *, where: str) -> Isolation | None:
    """What isolates the model's programs, where a task has any; RecipeError where they may not be run."""
    programs = [task.name for task in tasks if task.program]
    if not programs:
        return None
    if not execute:
        raise RecipeError(
            f"{where}: {', '.join(programs)} runs programs that the model wrote, and that was not asked for. Allow it with --execute or evals.chat.execute: true (they run in a sandbox), or leave the task out."
        )
    return choose_isolation(unsafe_exec, where=where)


def _ids_of_letters(tasks: list[LoadedTask], tokenizer) -> dict[str, int]:
    return letter_ids(
        tokenizer, sorted({letter for loaded in tasks for item in loaded.items for letter in item.letters})
    )


def _task_score(loaded: LoadedTask, shares: list[Share], isolation: str | None, window: int | None) -> TaskScore:
    correct = {n: right for share in shares for n, right in share.correct.items()}
    right, n, of = sum(correct.values()), len(correct), len(loaded.items)
    return TaskScore(
        name=loaded.task.name,
        n=n,
        of=of,
        complete=n == of and of == (loaded.task.rows or of),
        accuracy=right / n,
        centred=loaded.task.centred(right / n),
        interval=share_interval(right, n),
        correct=[correct[number] for number in range(n)],
        too_long=sum(share.too_long for share in shares),
        seconds=max(share.seconds for share in shares),
        tokens_forwarded=sum(share.tokens_forwarded for share in shares),
        tokens_generated=sum(share.tokens_generated for share in shares),
        isolation=isolation,
        window=window,
    )
