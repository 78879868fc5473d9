"""Chat tasks scored: letters compared, answers generated, programs run, and the table."""

import argparse
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from pipeline.evals.bpb import Watched, evaluating
from pipeline.evals.chat_tasks import (
    BUILT_IN,
    HUMANEVAL,
    ChatItem,
    ChatTask,
    LoadedTask,
    built_in_tasks,
    custom_task,
    load_chat_tasks,
)
from pipeline.evals.core import forward_at
from pipeline.evals.intervals import mean_interval, share_interval
from pipeline.evals.subject import code_of_command
from pipeline.evals.tasks import gathered_over_ranks
from pipeline.generation.texts import continuations, positions
from pipeline.metrics import Protocol, Results, digest
from pipeline.monitor.heartbeat import beat
from pipeline.process.errors import DataError, RecipeError
from pipeline.process.storage import cache_dir
from pipeline.process.user_code import CodeFolder
from pipeline.recipe.schema import ChatTasks, OwnTask, Source
from pipeline.tokenizer.chat import prompt_ids
from pipeline.tokenizer.coverage import coverage


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
        what = "two letters are the same token"
        if wrong:
            what = f"{', '.join(map(repr, wrong))} is not one token"
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
    watched: Watched = iter,
) -> list[int]:
    """Return, for each prompt, the index among its letters' ids of the highest logit behind the prompt.

    The same for any batch_rows: rows are padded on the right, where a causal model does not look. watched: wraps the
    batches.
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
    order = sorted(range(len(prompts)), key=lambda n: -len(prompts[n]))  # stable: equal ones stay in order
    return [order[first : first + batch_rows] for first in range(0, len(order), batch_rows)]


def _last_logits(model, prompts: list[list[int]], *, pad: int) -> torch.Tensor:
    """Return (B, V) logits behind each prompt, fp32 on the CPU."""
    beat()
    rows = [torch.tensor(ids) for ids in prompts]
    # Padded on the right, where a causal model does not look.
    ids_BT = pad_sequence(rows, batch_first=True, padding_value=pad).to(model.device)
    last_B = torch.tensor([len(ids) - 1 for ids in prompts], device=model.device)
    kept_K, place_B = last_B.unique(return_inverse=True)  # Few: the prompts are sorted by length.
    with torch.no_grad():
        logits_BKV = forward_at(model, ids_BT, kept_K).logits
        return logits_BKV[torch.arange(len(prompts), device=model.device), place_B].float().cpu()


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """Results of one rank. correct: by the item's place in its task; the other fields as in TaskScore."""

    correct: dict[int, bool]
    too_long: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class ChatScorer:
    """Model, tokenizer and limits that every question of every task is asked with. ids_of_letters: `letter_ids`."""

    model: Any
    tokenizer: Any
    batch_rows: int
    watched: Watched
    ids_of_letters: Mapping[str, int]

    def share(self, task: ChatTask, items: Mapping[int, ChatItem]) -> RankShare:
        """Return the items' outcome. items: by their place in the task."""
        started = time.perf_counter()
        limit = positions(self.model) or math.inf
        if task.kind == "text":
            limit -= 1  # for the answer; a letter is read off the prompt's last position
        fitting = {}
        for n, item in items.items():
            prompt = prompt_ids(self.tokenizer, item.messages, tools=item.tools)
            if len(prompt) <= limit:
                fitting[n] = prompt
        put = [items[n] for n in fitting]
        judge = self._right_letters if task.kind == "letters" else self._right_texts
        right = judge(task, put, list(fitting.values()))
        return RankShare(
            correct=dict.fromkeys(items, False) | dict(zip(fitting, right, strict=True)),
            too_long=len(items) - len(fitting),
            seconds=time.perf_counter() - started,
        )

    def _right_letters(self, task: ChatTask, items: list[ChatItem], prompts: list[list[int]]) -> list[bool]:
        letters = []
        for item in items:
            letters.append([self.ids_of_letters[letter] for letter in item.letters])
        chosen = chosen_letters(
            self.model,
            prompts,
            letters,
            pad=self.tokenizer.pad_token_id or 0,
            batch_rows=self.batch_rows,
            watched=self.watched,
        )
        return [item.letters[place] == item.answer for item, place in zip(items, chosen, strict=True)]

    def _right_texts(self, task: ChatTask, items: list[ChatItem], prompts: list[list[int]]) -> list[bool]:
        """Return whether each greedy answer is right; the calculator answers its tool calls."""
        assert task.check is not None, task.name
        right = [False] * len(items)
        for batch in self.watched(_longest_first(prompts, self.batch_rows)):
            answers = continuations(
                self.model,
                self.tokenizer,
                [prompts[n] for n in batch],
                batch_size=len(batch),
                max_new_tokens=task.max_new_tokens,
                calculator=True,
                watched=self.watched,
            )
            for n, ids in zip(batch, answers, strict=True):
                beat()
                right[n] = task.check(items[n], self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        return right


# ChatCORE: the mean of what these are above guessing. Source: nanochat scripts/chat_eval.py.
CHAT_CORE = ("arc_easy", "arc_challenge", "mmlu", "gsm8k", "humaneval")
MOST_SUBJECTS = 30


@dataclass(frozen=True, kw_only=True)
class TaskScore:
    """One task's result over all ranks.

    n: items scored, the first of the `of` that its files hold. complete: whether they are the whole official test set.
    centred: 0 for guessing, 1 for all right. interval: of the accuracy, 95 %. correct: by item, in their order.
    too_long: items whose question has more tokens than the model's positions; they count as wrong. seconds: of the
    slowest rank. window: the model's positions, None for any number. coverage: of the text of questions and right
    answers, by the model's tokenizer. subjects: (right, items) of each subject of a user's own task.
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
    window: int | None = None
    coverage: float = 1.0
    subjects: dict[str, tuple[int, int]] = field(default_factory=dict)


def score_chat_tasks(
    tasks: list[LoadedTask],
    model,
    tokenizer,
    *,
    max_per_task: int | None = None,
    batch_rows: int = 8,
    rank: int = 0,
    world_size: int = 1,
    watched: Watched = iter,
    report: Callable[[LoadedTask, TaskScore], None] | None = None,
) -> list[TaskScore]:
    """Return the scores of the tasks in their order, the same on every rank and for any batch_rows.

    max_per_task: only the first items of each. Items are dealt out to the ranks, each of which needs a whole model;
    they meet after each task, and an error on one is raised on all. watched: wraps the batches of a task (a list, for
    each task anew) and, where answers are generated, the steps of each batch; it may raise EvaluationInterrupted.
    report: called with each task's score as soon as it is there. Raises what `require_ready` raises before anything is
    scored; DataError when a checker fails.
    """
    assert max_per_task is None or max_per_task > 0, max_per_task
    scorer = ChatScorer(
        model=model,
        tokenizer=tokenizer,
        batch_rows=batch_rows,
        watched=watched,
        ids_of_letters=require_ready(tasks, tokenizer),
    )
    scores: list[TaskScore] = []
    with evaluating(model):
        for loaded in tasks:
            # 1. This rank's items, every world_size-th one. An error is kept: the others wait for this rank.
            items = dict(list(enumerate(loaded.items[:max_per_task]))[rank::world_size])
            share, error = None, None
            try:
                share = scorer.share(loaded.task, items)
            except Exception as problem:  # raised below, on every rank
                error = problem
            # 2. The items of all ranks, as one score.
            shares = gathered_over_ranks(share, world_size=world_size, error=error)
            scores.append(_task_score(loaded, shares, positions(model), tokenizer))
            if report is not None:
                report(loaded, scores[-1])
    return scores


def chat_core(scores: list[TaskScore]) -> dict[str, Any] | None:
    """Return name, value and 95 % interval of the mean centred accuracy of ChatCORE's five tasks; None without one of
    them. The name is chat/core_part where not all of their items were asked."""
    by_name = {score.name: score for score in scores}
    if not set(CHAT_CORE) <= set(by_name):
        return None
    chosen = [by_name[task] for task in CHAT_CORE]
    # The mean of (accuracy - baseline) / (1 - baseline): an accuracy's interval counts 1 / (1 - baseline) times in it.
    complete = all(score.complete for score in chosen)
    value = math.fsum(score.centred for score in chosen) / len(chosen)
    shares = [(round(score.accuracy * score.n), score.n) for score in chosen]
    slopes = [1 / (1 - BUILT_IN[score.name].baseline) for score in chosen]
    low, high = mean_interval(shares, slopes=slopes, value=value)
    return {"name": "chat/core" if complete else "chat/core_part", "value": value, "low": low, "high": high}


def require_ready(tasks: list[LoadedTask], tokenizer) -> dict[str, int]:
    """Return the ids of the tasks' letters. DataError for a tokenizer without chat template or without the letters as
    tokens."""
    if not tokenizer.chat_template:
        raise DataError(
            "the tokenizer has no chat template, so questions cannot be put to the model. Score a model tuned for chat."
        )
    letters: set[str] = set()
    for loaded in tasks:
        for item in loaded.items:
            letters.update(item.letters)
    return letter_ids(tokenizer, sorted(letters))


def _texts(item: ChatItem) -> Iterator[str]:
    for message in item.messages:
        yield message.get("content") or ""
    yield item.answer


def _task_score(loaded: LoadedTask, shares: list[RankShare], window: int | None, tokenizer) -> TaskScore:
    correct: dict[int, bool] = {}
    for share in shares:
        correct |= share.correct
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
        window=window,
        coverage=coverage(tokenizer, chain.from_iterable(map(_texts, loaded.items[:n]))),
        subjects=_by_subject(loaded, correct),
    )


def _by_subject(loaded: LoadedTask, correct: dict[int, bool]) -> dict[str, tuple[int, int]]:
    """Return (right, items) by subject of a user's own task; nothing where there are too many to be read."""
    found: dict[str, list[bool]] = {}
    if loaded.task.checker:
        for number, right in sorted(correct.items()):
            if subject := loaded.items[number].subject:
                found.setdefault(subject, []).append(right)
    if len(found) > MOST_SUBJECTS:
        return {}
    return {name: (sum(found[name]), len(found[name])) for name in sorted(found)}


RULE = 1  # raise it when the same items under the same window give other answers


def chat_results(tasks: list[LoadedTask], scores: list[TaskScore], findings: dict[str, Any] | None = None) -> Results:
    """Return rows for evals.json: ChatCORE where there is one, then each task and its subjects.

    findings: of the training text of the run that is scored; rows then have the contaminated items too.
    """
    loaded_by_name = {loaded.task.name: loaded for loaded in tasks}
    protocols = {score.name: chat_protocol(loaded_by_name[score.name], score) for score in scores}
    rows: Results = []
    mean = chat_core(scores)
    if mean:
        parts = {task: dict(protocols[task].parts) for task in CHAT_CORE}
        rows.append(mean | Protocol({"score": "chat", "tasks": parts}).row() | {"tasks": list(CHAT_CORE)})
    for score in scores:
        loaded, (low, high) = loaded_by_name[score.name], score.interval
        rows.append(
            {
                "name": f"chat/{score.name}",
                "value": score.accuracy,
                "low": low,
                "high": high,
                **protocols[score.name].row(),
                "centred": score.centred,
                "items": score.n,
                "of": score.of,
                "complete": score.complete,
                "too_long": score.too_long,
                "seconds": score.seconds,
                "files": loaded.files,
                "revision": loaded.revision,
                "isolation": loaded.task.isolation,
                "checker": loaded.task.checker,
            }
        )
        rows += _subject_rows(score, rows[-1])
    if findings:
        from pipeline.contrib.contaminated_items import add_clean_scores, texts_of_chat_tasks

        correct = {f"chat/{score.name}": score.correct for score in scores}
        add_clean_scores(rows, findings, texts_of_chat_tasks(tasks), correct)
    return rows


def _subject_rows(score: TaskScore, row: dict[str, Any]) -> Results:
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
    parts: dict[str, Any] = {
        "score": "chat",
        "task": task.name,
        "texts": digest([file["sha256"] for file in loaded.files]),
        "items": "all" if score.n == len(loaded.items) else score.n,
    }
    if task.kind == "text":
        parts["max_new_tokens"] = task.max_new_tokens
    if task.checker:
        parts["checker"] = task.checker
    window: Any = "whole prompts"
    if score.too_long or task.kind == "text":  # a question that fits may leave a written answer too few positions
        window = score.window or "any"
    return Protocol({**parts, "window": window, "bos": "as the template", "coverage": score.coverage, "rule": RULE})


def task_line(loaded: LoadedTask, score: TaskScore) -> str:
    low, high = score.interval
    line = (
        f"{score.name:<20} {score.n:>7,} {score.accuracy:>9.4f}  {low:.3f}-{high:.3f}  {score.centred:>8.4f} "
        f"{score.seconds:>8.1f}"
    )
    if score.n < score.of:
        line += f"  of {score.of:,}"
    if score.too_long:
        line += f"  {score.too_long:,} questions longer than the model's positions, which count as wrong"
    if loaded.task.isolation is not None:
        line += f"  programs run behind {loaded.task.isolation}"
    for name, (right, n) in score.subjects.items():
        line += f"\n  {name:<18} {n:>7,} {right / n:>9.4f}"
    return line


def print_task(loaded: LoadedTask, score: TaskScore) -> None:
    print(task_line(loaded, score), flush=True)


def heading() -> str:
    return f"{'task':<20} {'items':>7} {'accuracy':>9}  {'95 %':<11}  {'centred':>8} {'seconds':>8}"


def closing_line(scores: list[TaskScore]) -> str:
    """Return ChatCORE, or which tasks it would take."""
    mean = chat_core(scores)
    if mean is None:
        missing = [name for name in CHAT_CORE if name not in {score.name for score in scores}]
        return f"no ChatCORE without {', '.join(missing)}"
    return f"{mean['name']}: {mean['value']:.6f}  (95 % {mean['low']:.4f} to {mean['high']:.4f})"


class ChatBenchmark:
    """Chat tasks with their items, and how they are scored."""

    name, generates = "chat", True

    def __init__(
        self,
        tasks: list[LoadedTask],
        *,
        max_per_task: int | None,
        batch_rows: int = 8,
        every_steps: int | None = None,
        at_start: bool = False,
        shown: bool = False,
    ):
        """shown: whether the scores are printed as they come."""
        self.tasks, self.max_per_task, self.batch_rows = tasks, max_per_task, batch_rows
        self.every_steps, self.at_start, self.shown = every_steps, at_start, shown

    def require_ready(self, tokenizer: Any) -> None:
        """Raise DataError for a tokenizer that cannot put a question."""
        require_ready(self.tasks, tokenizer)

    def watched_texts(self) -> dict[str, list[str]]:
        """Return the texts of all items, by metric, that the training text is searched for."""
        from pipeline.contrib.contaminated_items import texts_of_chat_tasks

        return texts_of_chat_tasks(self.tasks)

    def score(
        self,
        model: Any,
        tokenizer: Any,
        *,
        findings: dict[str, Any] | None = None,
        device: Any = None,
        rank: int,
        world_size: int,
        watched: Watched,
    ) -> Results:
        """Return rows for evals.json; their values are the same on every rank.

        findings: of the run's training text, on the rank that writes. device: the model's, unused.
        """
        if self.shown:
            print(heading())
        scores = score_chat_tasks(
            self.tasks,
            model,
            tokenizer,
            max_per_task=self.max_per_task,
            batch_rows=self.batch_rows,
            rank=rank,
            world_size=world_size,
            watched=watched,
            report=print_task if self.shown else None,
        )
        if self.shown:
            print(closing_line(scores))
        return chat_results(self.tasks, scores, findings)


def benchmark_of_recipe(
    settings: ChatTasks, *, unsafe_exec: bool, code: CodeFolder, folder: str | None, cache: str | None, where: str
) -> ChatBenchmark:
    """Return the chat tasks of evals.chat. folder: the recipe's. cache: data.cache_dir."""
    tasks = built_in_tasks(settings.tasks, execute=settings.execute, unsafe_exec=unsafe_exec, where=where)
    tasks += _own_tasks(settings.own, code=code, where=where)
    loaded = load_chat_tasks(
        [replace(task, max_new_tokens=settings.max_new_tokens) for task in tasks],
        places=None if settings.data is None else [settings.data],
        folder=folder,
        cache=cache_dir(cache),
        where=where,
    )
    return ChatBenchmark(
        loaded,
        max_per_task=settings.max_per_task,
        every_steps=settings.every_steps,
        at_start=settings.at_start,
    )


def benchmark_of_command(
    names: list[str] | None, arguments: argparse.Namespace, *, settings: dict[str, Any], cache: str | None
) -> ChatBenchmark:
    """Return the tasks by name (None: ChatCORE's five and spelling_bee; humaneval with --execute alone) and those of
    --own-task.

    settings: evals.chat of the run's recipe, for its data and max_new_tokens. cache: its data.cache_dir.
    """
    where = "command line: chat"
    if names is None:
        names = [name for name in (*CHAT_CORE, "spelling_bee") if name != HUMANEVAL or arguments.execute]
        if not arguments.execute:
            print("humaneval is left out: it runs programs that the model writes. --execute runs them in a sandbox.")
    tasks = built_in_tasks(names, execute=arguments.execute, unsafe_exec=arguments.unsafe_exec, where=where)
    for name, file in arguments.own_task.items():
        source = Source(id=file, split="test") if file.startswith("tandem:") else Source(files=file)
        folder = code_of_command(arguments)
        tasks.append(custom_task(name, source=source, checker=arguments.checker, folder=folder, where=where))
    longest = arguments.max_new_tokens or settings.get("max_new_tokens") or 512
    places = arguments.chat_data
    if not places and settings.get("data"):
        places = [settings["data"]]
    loaded = load_chat_tasks(
        [replace(task, max_new_tokens=longest) for task in tasks],
        places=places,
        folder=str(Path.cwd()),
        cache=cache_dir(cache),
        where=where,
    )
    return ChatBenchmark(loaded, max_per_task=arguments.max_per_task, batch_rows=arguments.batch_rows, shown=True)


def _own_tasks(entries: list[OwnTask], *, code: CodeFolder, where: str) -> list[ChatTask]:
    tasks: list[ChatTask] = []
    for own in entries:
        if own.name in [task.name for task in tasks]:
            raise RecipeError(f"{where}: two tasks of evals.chat.own are called {own.name}. Name them apart.")
        if not own.name or not (own.id or own.files):
            raise RecipeError(
                f"{where}: a task of evals.chat.own needs a name, and files or an id. Write "
                "{name: mine, files: mine.jsonl, checker: exact}."
            )
        form = own.format
        if form is None and not (own.id or "").startswith("tandem:"):
            form = "messages"
        source = Source(
            files=own.files, id=own.id, config=own.config, split=own.split, revision=own.revision, format=form
        )
        tasks.append(custom_task(own.name, source=source, checker=own.checker, folder=code, where=where))
    return tasks
