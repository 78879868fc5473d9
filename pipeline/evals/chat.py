"""Chat tasks scored: letters compared, answers generated, programs run, and the table."""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from pipeline.evals.bpb import evaluating
from pipeline.evals.chat_tasks import (
    BUILT_IN,
    ChatItem,
    ChatTask,
    LoadedTask,
    built_in_tasks,
    custom_task,
    load_chat_tasks,
)
from pipeline.evals.contamination import Findings, chat_texts, clean_mean, clean_scores, contamination_of, watched_chat
from pipeline.evals.core import forward_at
from pipeline.evals.intervals import mean_interval, share_interval
from pipeline.evals.sandbox import Isolation, choose_isolation, run_programs
from pipeline.evals.subject import code_of_command
from pipeline.evals.tasks import broadcast_bool, gathered_over_ranks
from pipeline.generation.texts import continuations, positions
from pipeline.hardware.processor import usable_cores
from pipeline.metrics import Protocol, digest
from pipeline.monitor.heartbeat import beat
from pipeline.process.errors import DataError, RecipeError
from pipeline.process.progress import progress
from pipeline.process.storage import cache_dir
from pipeline.recipe.schema import Recipe, Source
from pipeline.tokenizer.chat import prompt_ids
from pipeline.tokenizer.coverage import coverage

# Multiple choice by the logits of the letters alone: one forward pass a question, nothing is generated.

# Letters: B rows, T positions, K kept positions, V vocabulary.


def letter_ids(tokenizer, letters: Iterable[str]) -> dict[str, int]:
    """Return the id of each letter where the assistant's answer begins.

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
            f"the tokenizer: {what} where the assistant's answer begins, so the letters' logits say nothing. Take a "
            "tokenizer that has them, or leave out the tasks of letters."
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
    """Return, for each prompt, the index among its letters' ids of the highest logit behind the prompt.

    The same for any batch_rows: rows are padded on the right, where a causal model does not look. watched: what the
    batches go through.
    """
    chosen = [0] * len(prompts)
    for some in watched(_longest_first(prompts, batch_rows)):
        logits_BV = _last_logits(model, [prompts[n] for n in some], pad=pad)
        for n, logits_V in zip(some, logits_BV, strict=True):
            chosen[n] = int(logits_V[list(letters[n])].argmax())
    return chosen


def _longest_first(prompts: Sequence[list[int]], batch_rows: int) -> list[list[int]]:
    """Return the prompts' places in batches: what does not fit into memory is known at once, and a batch is padded
    little."""
    order = sorted(range(len(prompts)), key=lambda n: -len(prompts[n]))
    return [order[first : first + batch_rows] for first in range(0, len(order), batch_rows)]


def _last_logits(model, prompts: list[list[int]], *, pad: int) -> torch.Tensor:
    """Return (B, V) logits behind each prompt, fp32 on the CPU."""
    beat()
    width = max(map(len, prompts))
    ids_BT = torch.tensor([ids + [pad] * (width - len(ids)) for ids in prompts], device=model.device)
    last_B = torch.tensor([len(ids) - 1 for ids in prompts], device=model.device)
    kept_K, place_B = last_B.unique(return_inverse=True)  # Few: the prompts are sorted by length.
    with torch.no_grad():
        logits_BKV = forward_at(model, ids_BT, kept_K).logits
        return logits_BKV[torch.arange(len(prompts), device=model.device), place_B].float().cpu()


# One rank's share of a task: its questions put to the model, its answers judged.


@dataclass(kw_only=True)
class RankShare:
    """Results of one rank. correct: by the item's place in its task; the other fields as in TaskScore."""

    correct: dict[int, bool]
    too_long: int
    tokens_forwarded: int
    tokens_generated: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ChatScorer:
    """Model, tokenizer and limits that every question of every task is asked with.

    ids_of_letters: `letter_ids`. isolation: what programs are run in, by how many workers at once.
    """

    model: Any
    tokenizer: Any
    batch_rows: int
    watched: Callable[[Iterable], Iterable]
    ids_of_letters: Mapping[str, int]
    isolation: Any
    workers: int

    def share(self, task: ChatTask, items: Mapping[int, ChatItem]) -> RankShare:
        """Return the items' outcome. items: by their place in the task."""
        started = time.perf_counter()
        prompts = {n: prompt_ids(self.tokenizer, item.messages, tools=item.tools) for n, item in items.items()}
        # An answer needs a position of its own, but for a letter, which is read off the last one.
        limit = (positions(self.model) or math.inf) - (task.kind == "text")
        asked = {n: item for n, item in items.items() if len(prompts[n]) <= limit}
        share = RankShare(
            correct=dict.fromkeys(items, False),
            too_long=len(items) - len(asked),
            tokens_forwarded=sum(len(prompts[n]) for n in asked),
        )
        fitting = [prompts[n] for n in asked]
        if task.kind == "letters":
            right = self._right_letters(list(asked.values()), fitting)
        else:
            answers = self._written_answers(fitting, max_new_tokens=task.max_new_tokens)
            share.tokens_generated = sum(map(len, answers))
            right = self._right_texts(task, list(asked.values()), answers)
        share.correct |= dict(zip(asked, right, strict=True))
        share.seconds = time.perf_counter() - started
        return share

    def _right_letters(self, items: list[ChatItem], prompts: list[list[int]]) -> list[bool]:
        chosen = chosen_letters(
            self.model,
            prompts,
            [[self.ids_of_letters[letter] for letter in item.letters] for item in items],
            pad=self.tokenizer.pad_token_id or 0,
            batch_rows=self.batch_rows,
            watched=self.watched,
        )
        return [item.letters[place] == item.answer for item, place in zip(items, chosen, strict=True)]

    def _written_answers(self, prompts: list[list[int]], *, max_new_tokens: int) -> list[list[int]]:
        """Return the ids of each greedy answer, without the token that ended it; the calculator answers its tool
        calls."""
        answers: list[list[int]] = [[] for _ in prompts]
        settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "calculator": True, "watched": self.watched}
        for some in self.watched(_longest_first(prompts, self.batch_rows)):
            own = [prompts[n] for n in some]
            found = continuations(self.model, self.tokenizer, own, batch_size=len(own), **settings)
            for n, ids in zip(some, found, strict=True):
                answers[n] = ids
        return answers

    def _right_texts(self, task: ChatTask, items: list[ChatItem], answers: list[list[int]]) -> list[bool]:
        texts = [self.tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in answers]
        pairs = list(zip(items, texts, strict=True))
        if task.check is not None:
            return [task.check(item, text) for item, text in pairs]
        assert task.program is not None, f"{task.name} has neither check nor program"
        programs = [task.program(item, text) for item, text in pairs]
        right: list[bool] = []
        for first in range(0, len(programs), self.batch_rows):
            beat()
            done = run_programs(
                programs[first : first + self.batch_rows], workers=self.workers, isolation=self.isolation
            )
            right += [execution.passed for execution in done]
        return right


# Accuracy of a chat model on its tasks, and ChatCORE: the mean of what they are above guessing.

# Source: nanochat scripts/chat_eval.py. It once had a sixth task, SpellingBee, with questions of its own.
CHAT_CORE = ("arc_easy", "arc_challenge", "mmlu", "gsm8k", "humaneval")
MOST_SUBJECTS = 30
MEANS = {"chat/core": CHAT_CORE, "chat/core_spelling_bee": (*CHAT_CORE, "spelling_bee")}


@dataclass(frozen=True, kw_only=True)
class TaskScore:
    """One task's result over all ranks.

    n: items scored, the first of the `of` that its files hold. complete: whether they are the whole official test set.
    centred: 0 for guessing, 1 for all right. interval: of the accuracy, 95 %. correct: by item, in their order.
    too_long: items whose question has more tokens than the model's positions; they count as wrong. seconds: of the
    slowest rank. tokens_forwarded: of the questions, without padding; tokens_generated: of the answers. isolation:
    what the programs of the task were run in, None where there are none. window: the model's positions, None for any
    number. coverage: of the text of questions and right answers, by the model's tokenizer. subjects: (right, items) of
    each subject of a task of one's own.
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
    coverage: float = 1.0
    subjects: dict[str, tuple[int, int]] = field(default_factory=dict)


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
    """Return the scores of the tasks in their order, the same on every rank and for any batch_rows.

    max_per_task: only the first items of each. max_s: no further task is begun after so many seconds. Items are dealt
    out to the ranks, each of which needs a whole model; they meet after each task, and an error on one is raised on
    all. execute: programs that the model writes may be run, in the sandbox unless unsafe_exec. watched: what the
    batches of a task go through (a list, for each task anew) and, where answers are generated, the steps of each
    batch; it may raise EvaluationInterrupted. report: called with each task's score as soon as it is there. Raises
    what `require_ready` raises before anything is scored; DataError when a checker fails.
    """
    assert max_per_task is None or max_per_task > 0, max_per_task
    started = time.monotonic()
    isolation = require_ready(tasks, tokenizer, execute=execute, unsafe_exec=unsafe_exec, where=where)
    scorer = ChatScorer(
        model=model,
        tokenizer=tokenizer,
        batch_rows=batch_rows,
        watched=watched,
        ids_of_letters=_ids_of_letters(tasks, tokenizer),
        isolation=isolation,
        workers=max(1, usable_cores() // world_size),
    )
    scores: list[TaskScore] = []
    with evaluating(model):
        for loaded in tasks:
            items = dict(list(enumerate(loaded.items[:max_per_task]))[rank::world_size])
            share, error = None, None
            try:
                share = scorer.share(loaded.task, items)
            except Exception as problem:  # raised below, on every rank
                error = problem
            shares = gathered_over_ranks(share, world_size=world_size, error=error)
            name = isolation.name if isolation and loaded.task.program else None
            scores.append(_task_score(loaded, shares, name, positions(model), tokenizer))
            if report is not None:
                report(scores[-1])
            if max_s is not None and broadcast_bool(time.monotonic() - started > max_s, model.device):
                break
    return scores


def chat_numbers(scores: list[TaskScore]) -> dict[str, float]:
    """Return chat/<task>, the accuracy, and chat/core: the mean centred accuracy of nanochat's five tasks, when all
    are complete.

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
    tasks: list[LoadedTask], tokenizer, *, execute: bool, unsafe_exec: bool, where: str
) -> Isolation | None:
    """Return what isolates the model's programs, where a task has any.

    Raises all that would stop the scoring later: RecipeError for programs that may not be run, DataError for a
    tokenizer without chat template or without the letters as tokens.
    """
    isolation = require_execution(
        [loaded.task for loaded in tasks], execute=execute, unsafe_exec=unsafe_exec, where=where
    )
    if not tokenizer.chat_template:
        raise DataError(
            f"{where}: the tokenizer has no chat template, so questions cannot be put to the model. Score a model "
            "tuned for chat."
        )
    _ids_of_letters(tasks, tokenizer)
    return isolation


def require_execution(tasks: list[ChatTask], *, execute: bool, unsafe_exec: bool, where: str) -> Isolation | None:
    """Return what isolates the model's programs, where a task has any; RecipeError where they may not be run."""
    programs = [task.name for task in tasks if task.program]
    if not programs:
        return None
    if not execute:
        raise RecipeError(
            f"{where}: {', '.join(programs)} runs programs that the model wrote, and that was not asked for. Allow it "
            "with --execute or evals.chat.execute: true (they run in a sandbox), or leave the task out."
        )
    return choose_isolation(unsafe_exec, where=where)


def _ids_of_letters(tasks: list[LoadedTask], tokenizer) -> dict[str, int]:
    letters = {letter for loaded in tasks for item in loaded.items for letter in item.letters}
    return letter_ids(tokenizer, sorted(letters))


def _texts(item: ChatItem) -> Iterator[str]:
    yield from (message.get("content") or "" for message in item.messages)
    yield item.answer


def _task_score(
    loaded: LoadedTask, shares: list[RankShare], isolation: str | None, window: int | None, tokenizer
) -> TaskScore:
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
        coverage=coverage(tokenizer, (text for item in loaded.items[:n] for text in _texts(item))),
        subjects=_by_subject(loaded, correct),
    )


def _by_subject(loaded: LoadedTask, correct: dict[int, bool]) -> dict[str, tuple[int, int]]:
    """Return (right, items) by subject in the order of their names; nothing where a task has none, or has too many to
    be read."""
    found: dict[str, list[bool]] = {}
    if loaded.task.checker:
        for number, right in sorted(correct.items()):
            if subject := loaded.items[number].subject:
                found.setdefault(subject, []).append(right)
    return (
        {name: (sum(found[name]), len(found[name])) for name in sorted(found)} if len(found) <= MOST_SUBJECTS else {}
    )


# Chat scores as rows for evals.json, as metrics by name, and as a table for the terminal.

RULE = 1  # raise it when the same items under the same window give other answers


def chat_results(
    tasks: list[LoadedTask], scores: list[TaskScore], findings: Findings | None = None
) -> list[dict[str, Any]]:
    """Return a row for each mean that the tasks give, then one for each task: its accuracy, and what it was measured
    on.

    tasks: those that were to be scored; scores may be of the first ones only. findings: of the training text of the
    run that is scored; rows then tell of contaminated items too.
    """
    loaded_by_name = {loaded.task.name: loaded for loaded in tasks}
    numbers = chat_numbers(scores)
    scored = ((f"chat/{s.name}", chat_texts(loaded_by_name[s.name]), s.correct) for s in scores)
    cleaned = clean_scores(findings, scored)
    protocols = {score.name: chat_protocol(loaded_by_name[score.name], score) for score in scores}
    rows = []
    for score in scores:
        loaded, (low, high) = loaded_by_name[score.name], score.interval
        rows.append(
            {
                "name": f"chat/{score.name}",
                "value": numbers.pop(f"chat/{score.name}"),
                "low": low,
                "high": high,
                **protocols[score.name].row(),
                "centred": score.centred,
                "items": score.n,
                "of": score.of,
                "complete": score.complete,
                "too_long": score.too_long,
                "seconds": score.seconds,
                "tokens_forwarded": score.tokens_forwarded,
                "tokens_generated": score.tokens_generated,
                "files": loaded.files,
                "revision": loaded.revision,
                "isolation": score.isolation,
                "checker": loaded.task.checker,
                **contamination_of(cleaned.get(score.name)),
            }
        )
        rows += _subject_rows(score, rows[-1])
    means = []
    for name, value in numbers.items():
        tasks_of_mean = MEANS[name.removesuffix("_part")]  # others that were scored beside them change nothing
        together = Protocol({"score": "chat", "tasks": {task: dict(protocols[task].parts) for task in tasks_of_mean}})
        accuracies = {score.name: score.accuracy for score in scores if score.name in tasks_of_mean}
        found = clean_mean(accuracies, cleaned, lambda task, accuracy: loaded_by_name[task].task.centred(accuracy))
        low, high = chat_interval(scores, name, value)
        about = {
            "name": name,
            "value": value,
            "low": low,
            "high": high,
            **together.row(),
            "tasks": list(tasks_of_mean),
        }
        means.append(about | contamination_of(found))
    return means + rows


def _subject_rows(score: TaskScore, row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each subject of a task, under the task's protocol."""
    found = []
    for name, (right, n) in score.subjects.items():
        low, high = share_interval(right, n)
        about: dict[str, Any] = {key: row[key] for key in ("protocol", "protocol_parts")}
        about |= {"name": f"{row['name']}/{name}", "value": right / n, "low": low, "high": high, "items": n}
        found.append(about)
    return found


def chat_protocol(loaded: LoadedTask, score: TaskScore) -> Protocol:
    """Return the protocol of a task: the first so many items of its files, its longest answer and checker."""
    task = loaded.task
    return Protocol(
        {
            "score": "chat",
            "task": task.name,
            "texts": digest([file["sha256"] for file in loaded.files]),
            "items": "all" if score.n == len(loaded.items) else score.n,
            **({"max_new_tokens": task.max_new_tokens} if task.kind == "text" else {}),
            **({"checker": task.checker} if task.checker else {}),
            # A question that fits may still leave a written answer too few positions.
            "window": (score.window or "any") if score.too_long or task.kind == "text" else "whole prompts",
            "bos": "as the template",
            "coverage": score.coverage,
            "rule": RULE,
        }
    )


def heading() -> str:
    return f"{'task':<20} {'items':>7} {'accuracy':>9}  {'95 %':<11}  {'centred':>8} {'tokens':>10} {'seconds':>8}"


def task_line(score: TaskScore) -> str:
    low, high = score.interval
    notes = [f"of {score.of:,}"] if score.n < score.of else []
    if score.too_long:
        notes.append(f"{score.too_long:,} questions longer than the model's positions, which count as wrong")
    if score.isolation is not None:
        notes.append(f"programs run behind {score.isolation}")
    return (
        f"{score.name:<20} {score.n:>7,} {score.accuracy:>9.4f}  {low:.3f}-{high:.3f}  {score.centred:>8.4f} "
        f"{score.tokens_forwarded + score.tokens_generated:>10,} {score.seconds:>8.1f}"
        + "".join(f"  {n}" for n in notes)
        + "".join(f"\n  {name:<18} {n:>7,} {right / n:>9.4f}" for name, (right, n) in score.subjects.items())
    )


def closing_lines(scores: list[TaskScore]) -> list[str]:
    """Return the means over tasks, or which tasks they would take."""
    means = {name: value for name, value in chat_numbers(scores).items() if name.startswith("chat/core")}
    if not means:
        missing = [name for name in CHAT_CORE if name not in {score.name for score in scores}]
        return [f"no ChatCORE without {', '.join(missing)}"]
    lines = []
    for name, value in means.items():
        low, high = chat_interval(scores, name, value)
        lines.append(f"{name}: {value:.6f}  (95 % {low:.4f} to {high:.4f})")
    return lines


# `python -m pipeline.evals RUN_OR_MODEL chat`: the chat tasks that a command line asks for.

WHERE = "command line: chat"


@dataclass(frozen=True)
class ChatCommand:
    """Tasks with their items, and how they are to be scored."""

    tasks: list[LoadedTask]
    arguments: argparse.Namespace
    programs: dict[str, Any]  # whether they may be run, and who asks

    def require_ready(self, tokenizer: Any) -> None:
        """Raise what would stop the scoring later: no chat template, no letters, programs that may not be run."""
        require_ready(self.tasks, tokenizer, **self.programs)

    def score(
        self, model: Any, tokenizer: Any, *, findings: Findings | None, rank: int, world_size: int
    ) -> list[dict[str, Any]]:
        """Return rows for evals.json, printed as they come. findings: of the training text of the run that is
        scored."""
        print(heading())
        scores = score_chat_tasks(
            self.tasks,
            model,
            tokenizer,
            max_per_task=self.arguments.max_per_task,
            batch_rows=self.arguments.batch_rows,
            rank=rank,
            world_size=world_size,
            watched=lambda batches: progress(batches, name="chat", shown=rank == 0),
            report=lambda score: print(task_line(score), flush=True),
            **self.programs,
        )
        print("\n".join(closing_lines(scores)))
        if self.arguments.tasks["chat"] is None and not self.arguments.execute:
            print(
                "humaneval was left out: it runs programs that the model writes. Add --execute to run them in a "
                "sandbox."
            )
        return chat_results(self.tasks, scores, findings)


def open_chat(
    names: list[str] | None, arguments: argparse.Namespace, *, settings: dict[str, Any], cache: str | None
) -> ChatCommand:
    """Return the tasks by name (None: ChatCORE's five and spelling_bee; without --execute not humaneval) and those of
    --own-task.

    settings: evals.chat of the run's recipe, for its data and max_new_tokens. cache: its data.cache_dir. Raises what
    load_chat_tasks raises, and RecipeError for tasks that there are not, or that run programs without --execute.
    """
    if names is None:
        names = [name for name in (*CHAT_CORE, "spelling_bee") if name != "humaneval" or arguments.execute]
    longest = arguments.max_new_tokens or settings.get("max_new_tokens") or 512
    tasks = [replace(task, max_new_tokens=longest) for task in built_in_tasks(names, where=WHERE)]
    for name, file in arguments.own_task.items():
        tasks.append(
            custom_task(
                name,
                source=Source(id=file, split="test") if file.startswith("tandem:") else Source(files=file),
                checker=arguments.checker,
                folder=code_of_command(arguments),
                max_new_tokens=longest,
                where=WHERE,
            )
        )
    programs = {"execute": arguments.execute, "unsafe_exec": arguments.unsafe_exec, "where": WHERE}
    require_execution(tasks, **programs)
    places = arguments.chat_data or ([settings["data"]] if settings.get("data") else None)
    loaded = load_chat_tasks(tasks, places=places, folder=str(Path.cwd()), cache=cache_dir(cache), where=WHERE)
    return ChatCommand(loaded, arguments, programs)


class ChatBenchmark:
    """The chat tasks as evals.chat says."""

    name, generates = "chat", True

    def __init__(self, recipe: Recipe):
        self.settings = recipe.evals.chat
        self.every_steps, self.at_start = self.settings.every_steps, self.settings.at_start
        execute, data, where = self.settings.execute, self.settings.data, recipe.where("evals.chat")
        self.programs: dict[str, Any] = {"execute": execute, "unsafe_exec": recipe.evals.unsafe_exec, "where": where}
        tasks = [
            replace(task, max_new_tokens=self.settings.max_new_tokens)
            for task in (*built_in_tasks(self.settings.tasks, where=where), *_own_tasks(recipe, where=where))
        ]
        require_execution(tasks, **self.programs)
        self.tasks: list[LoadedTask] = load_chat_tasks(
            tasks,
            places=None if data is None else [data],
            folder=str(Path(recipe.path).parent) if recipe.path else None,
            cache=cache_dir(recipe.data.cache_dir),
            where=where,
        )

    def require_ready(self, tokenizer: Any) -> None:
        """Raise DataError for a tokenizer that cannot put a question."""
        require_ready(self.tasks, tokenizer, **self.programs)

    def watched_texts(self) -> dict[str, list[str]]:
        """Return what the training text is searched for."""
        return watched_chat(self.tasks)

    def score(
        self,
        model: Any,
        tokenizer: Any,
        *,
        findings: Findings | None = None,
        device: Any,
        rank: int,
        world_size: int,
        watched: Any,
    ) -> list[dict[str, Any]]:
        """Return rows for evals.json; their values are the same on every rank. findings: of the run's training text,
        on the rank that writes."""
        scores = score_chat_tasks(
            self.tasks,
            model,
            tokenizer,
            max_per_task=self.settings.max_per_task,
            max_s=self.settings.max_s,
            rank=rank,
            world_size=world_size,
            watched=watched,
            **self.programs,
        )
        left_out = [loaded.task.name for loaded in self.tasks[len(scores) :]]
        if left_out and rank == 0:
            late = f"chat: {', '.join(left_out)} not begun within evals.chat.max_s ({self.settings.max_s:g} s)"
            print(late, file=sys.stderr, flush=True)
        return chat_results(self.tasks, scores, findings)


def _own_tasks(recipe: Recipe, *, where: str) -> list[ChatTask]:
    tasks: list[ChatTask] = []
    for own in recipe.evals.chat.own:
        if own.name in [task.name for task in tasks]:
            raise RecipeError(
                f"{where}: two tasks of evals.chat.own are called {own.name}. Give each a name of its own."
            )
        if not own.name or not (own.id or own.files):
            raise RecipeError(
                f"{where}: a task of evals.chat.own lacks {'files or id' if own.name else 'a name'}, so it cannot be "
                "scored. Write {name: mine, files: mine.jsonl, checker: exact}."
            )
        source = Source(
            files=own.files,
            id=own.id,
            config=own.config,
            split=own.split,
            revision=own.revision,
            format=own.format or (None if (own.id or "").startswith("tandem:") else "messages"),
        )
        tasks.append(custom_task(own.name, source=source, checker=own.checker, folder=recipe.code, where=where))
    return tasks
