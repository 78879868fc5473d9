"""Chat tasks: their files, items, prompts and checkers."""

import re
import string
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pipeline.process.errors import DataError, InputMissingError, RecipeError, TandemError, raise_errors
from pipeline.process.storage import cache_dir, sha256_file
from pipeline.process.user_code import CodeFolder, import_attribute
from pipeline.recipe.schema import Source
from pipeline.sources.built_in import built_in_files
from pipeline.sources.files import SourceFile
from pipeline.sources.formats import Format, format_of
from pipeline.sources.patterns import local_files
from pipeline.sources.raw_rows import BadRow, read_blocks
from pipeline.sources.verify import check_file, row_name


@dataclass(frozen=True, kw_only=True)
class ChatItem:
    """One question. messages: what the assistant answers to. answer: the right letter, or what a checker compares
    with.

    letters: what may be answered, for multiple choice. subject: what a score can be split by. row: further texts that
    a checker needs; of multiple choice the bare question and the right choice. tools: definitions that the prompt is
    given.
    """

    messages: list[dict]
    answer: str
    letters: tuple[str, ...] = ()
    subject: str | None = None
    row: dict[str, str] = field(default_factory=dict)
    tools: list[dict] | None = None


# Whether a written answer is right: texts come as the model wrote them, its control tokens included.
MessagesChecker = Callable[[list[dict], str], Any]  # (messages with the right answer last, text) -> right or not
NUMBERS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
NUMBER_WORDS = {word: str(number) for number, word in enumerate(NUMBERS)}
NUMBER_WORDS |= {"once": "1", "twice": "2", "zero": "0"}


def number_after_marks(text: str) -> str | None:
    """Return the number after the first ####, without commas; the official rule of GSM8K
    (grade_school_math/dataset.py)."""
    found = re.search(r"#### (\-?[0-9\.\,]+)", text)
    return found[1].replace(",", "") if found else None


def number_said(text: str) -> str | None:
    """Return the number after ####, else the last one in the text, in digits or in words up to twelve."""
    marked = number_after_marks(text)
    words = re.findall(rf"\b(?:\d+|{'|'.join(NUMBER_WORDS)})\b", text.lower())
    if marked or not words:
        return marked
    return NUMBER_WORDS.get(words[-1], words[-1])


def gsm8k_correct(item: ChatItem, text: str) -> bool:
    """Return whether the text's number after #### is the answer's, as text: 18 is not 18.0."""
    return number_after_marks(text) == item.answer


def spelling_correct(item: ChatItem, text: str) -> bool:
    """Check a count: the number in the answer. A spelling: somewhere exactly the word's letters in a row, between
    commas, dashes or spaces."""
    if item.answer.isdecimal():
        return number_said(text) == item.answer
    # "p-a-r-k" or "p, a, r, k": letters with one or two of ,.- or blank between them.
    runs = re.findall(r"(?<![a-z])[a-z](?:[ ,.-]{1,2}[a-z])+(?![a-z])", text.lower())
    return item.answer in (re.sub(r"[^a-z]", "", run) for run in runs)


def exact(messages: list[dict], text: str) -> bool:
    """Return whether the text is the last message's, but for white space around it."""
    return text.strip() == (messages[-1].get("content") or "").strip()


def contains(messages: list[dict], text: str) -> bool:
    """Return whether the last message's text, without white space around it, is somewhere in the text."""
    return (messages[-1].get("content") or "").strip() in text


def checker_of(checker: str | MessagesChecker, *, folder: CodeFolder | str | None, where: str) -> MessagesChecker:
    """Return the function that `exact`, `contains` or `module:attr` names; RecipeError when there is none."""
    if callable(checker):
        return checker
    if checker in ("exact", "contains"):
        return {"exact": exact, "contains": contains}[checker]
    what = f"there is no checker {checker!r}"
    if ":" in checker:
        found = import_attribute(checker, folder, where=f"{where}: the checker")
        if callable(found):
            return found
        what = f"the checker {checker} is no function"
    raise RecipeError(
        f"{where}: {what}, so nothing can be judged. Write exact, contains, or module:attr of a function (messages, "
        "text) -> bool."
    )


# One function a format, which raises ValueError with the reason for a row it cannot read.
ReadRow = Callable[[Any], ChatItem]


def multiple_choice(question: str, letters: Sequence[str], choices: Sequence[str]) -> str:
    """Return the user's message. No space before a letter: the answer's token is then the one that follows."""
    options = "".join(f"- {choice}={letter}\n" for letter, choice in zip(letters, choices, strict=True))
    return f"Multiple Choice question: {question}\n{options}\nRespond only with the letter of the correct answer."


def arc_item(row: Any) -> ChatItem:
    """Return an item of ARC as on the Hub (question, choices {text, label}, answerKey), or as in the CORE bundle
    (query, choices, gold)."""
    if isinstance(row, dict) and ("query" in row or "gold" in row):
        choices = _texts(column(row, "choices", list), "choices")
        question = column(row, "query", str).removeprefix("Question: ")
        return _lettered(question, string.ascii_uppercase[: len(choices)], choices, index=column(row, "gold", int))
    choices = column(row, "choices", dict)
    texts = _texts(column(choices, "text", list), "choices.text")
    labels = _texts(column(choices, "label", list), "choices.label")
    key = column(row, "answerKey", str)
    if len(texts) != len(labels) or len(set(labels)) != len(labels):
        raise ValueError(f"has {len(texts)} choices under the labels {', '.join(labels)}")
    if key not in labels:
        raise ValueError(f"has the answerKey {key!r}, which is none of its choices {', '.join(labels)}")
    return _lettered(column(row, "question", str), labels, texts, index=labels.index(key))


def mmlu_item(row: Any) -> ChatItem:
    """Return an item of MMLU: question, choices, answer (the index of a choice), subject."""
    choices = _texts(column(row, "choices", list), "choices")
    return _lettered(
        column(row, "question", str),
        string.ascii_uppercase[: len(choices)],
        choices,
        index=column(row, "answer", int),
        subject=row.get("subject"),
    )


def gsm8k_item(row: Any) -> ChatItem:
    """Return an item of GSM8K: question and a worked answer, whose number follows ####."""
    number = number_after_marks(column(row, "answer", str))
    if number is None:
        raise ValueError("has an answer without a number after ####")
    return ChatItem(messages=user_message(column(row, "question", str)), answer=number)


def spelling_item(row: Any) -> ChatItem:
    """Return the first question of a conversation of `tandem:spelling`. answer: the word to be spelled, or a
    number."""
    first, second = column(row, "messages", list)[:2]
    asked, answered = column(first, "content", str), column(second, "content", str)
    spelled = re.fullmatch(r"([a-z]+): [a-z](?:, [a-z])*\.", answered)
    answer = spelled[1] if spelled else number_said(answered)
    if answer is None:
        raise ValueError(f"has the answer {answered!r}, which neither spells nor counts")
    return ChatItem(messages=user_message(asked), answer=answer)


def _lettered(
    question: str, letters: Sequence[str], choices: list[str], *, index: int, subject: str | None = None
) -> ChatItem:
    if not 2 <= len(choices) == len(letters):
        raise ValueError(f"has {len(choices)} choices")
    if not 0 <= index < len(choices):
        raise ValueError(f"has the answer {index}, outside its {len(choices)} choices (counted from 0)")
    return ChatItem(
        messages=user_message(multiple_choice(question, letters, choices)),
        answer=letters[index],
        letters=tuple(letters),
        subject=subject,
        row={"question": question, "choice": choices[index]},
    )


def user_message(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def column(row: Any, name: str, kind: type) -> Any:
    if not isinstance(row, dict):
        raise ValueError(f"is {type(row).__name__}, not a mapping of columns")
    if name not in row:
        raise ValueError(f"has no column {name!r}; found: {', '.join(map(str, row)) or 'none'}")
    if not isinstance(row[name], kind) or isinstance(row[name], bool):
        raise ValueError(f"has {type(row[name]).__name__} in the column {name!r}, not {kind.__name__}")
    return row[name]


def _texts(values: list, name: str) -> list[str]:
    if not all(isinstance(value, str) for value in values):
        raise ValueError(f"has {name} that are not all texts")
    return values


@dataclass(frozen=True, kw_only=True)
class ChatTask:
    """One task. kind letters: the likeliest of the item's letters is the answer. kind text: an answer is generated.

    check: whether a text is right; checker: of a user's own task, the name of that function. baseline: the accuracy of
    guessing. rows: of the official test set, None where there is none. local_name: a regular expression that the task's
    file in a folder matches. isolation: what programs of the model are run in, None where there are none.
    """

    name: str
    kind: Literal["letters", "text"]
    source: Source
    read_row: ReadRow | None = None
    baseline: float = 0.0
    rows: int | None = None
    local_name: str | None = None
    check: Callable[[ChatItem, str], bool] | None = None
    checker: str | None = None
    isolation: str | None = None
    max_new_tokens: int = 512

    def centred(self, accuracy: float) -> float:
        """Return 0 at guessing, 1 when all is right."""
        return (accuracy - self.baseline) / (1 - self.baseline)


RESERVED = ("core", "core_part", "eval_s")  # chat/core and other numbers that are no task's
HUMANEVAL = "humaneval"
# Baselines, splits and 512 tokens are those of nanochat (scripts/chat_eval.py).
BUILT_IN = {
    task.name: task
    for task in (
        ChatTask(
            name="arc_easy",
            kind="letters",
            source=Source(id="allenai/ai2_arc", config="ARC-Easy", split="test"),
            read_row=arc_item,
            baseline=0.25,
            rows=2376,
            local_name=r"arc[-_ ]?easy",
        ),
        ChatTask(
            name="arc_challenge",
            kind="letters",
            source=Source(id="allenai/ai2_arc", config="ARC-Challenge", split="test"),
            read_row=arc_item,
            baseline=0.25,
            rows=1172,
            local_name=r"arc[-_ ]?challenge",
        ),
        ChatTask(
            name="mmlu",
            kind="letters",
            source=Source(id="cais/mmlu", config="all", split="test"),
            read_row=mmlu_item,
            baseline=0.25,
            rows=14042,
            local_name=r"mmlu",
        ),
        ChatTask(
            name="gsm8k",
            kind="text",
            source=Source(id="openai/gsm8k", config="main", split="test"),
            read_row=gsm8k_item,
            check=gsm8k_correct,
            rows=1319,
            local_name=r"gsm8k",
        ),
        ChatTask(
            name=HUMANEVAL,  # read and checked by contrib/humaneval.py
            kind="text",
            source=Source(id="openai/openai_humaneval", config="openai_humaneval", split="test"),
            rows=164,
            local_name=r"human[-_ ]?eval",
        ),
        ChatTask(
            name="spelling_bee",
            kind="text",
            source=Source(id="tandem:spelling", split="validation"),
            read_row=spelling_item,
            check=spelling_correct,
        ),
    )
}


def built_in_tasks(names: list[str], *, execute: bool, unsafe_exec: bool, where: str) -> list[ChatTask]:
    """Return the tasks of that name; RecipeError for one that there is not, or whose programs may not be executed."""
    unknown = [name for name in names if name not in BUILT_IN]
    if unknown:
        raise RecipeError(
            f"{where}: there is no chat task called {', '.join(unknown)}, so nothing was scored. There are "
            f"{', '.join(BUILT_IN)}."
        )
    tasks = {name: BUILT_IN[name] for name in names}
    if HUMANEVAL in tasks:
        from pipeline.contrib.humaneval import in_sandbox

        tasks[HUMANEVAL] = in_sandbox(tasks[HUMANEVAL], execute=execute, unsafe_exec=unsafe_exec, where=where)
    return list(tasks.values())


def custom_task(
    name: str,
    *,
    source: Source,
    checker: str | MessagesChecker,
    folder: CodeFolder | str | None = None,
    max_new_tokens: int = 512,
    where: str = "chat tasks",
) -> ChatTask:
    """Return a task of any conversations: the last message must be the assistant's and is the right answer, those
    before are asked.

    checker: `exact`, `contains`, or a function (messages, text) -> bool, itself or as module:attr of a module in
    folder. A column `subject` of texts splits the score. Raises RecipeError for a name that is taken, a checker or a
    format that there is not.
    """
    if name in BUILT_IN or name in RESERVED or not re.fullmatch(r"[\w.-]+", name):
        raise RecipeError(
            f"{where}: {name} cannot be the name of your own task: it is taken, or has other characters than letters, "
            "digits, dots and dashes. Take another."
        )
    checks = checker_of(checker, folder=folder, where=f"{where}: {name}")
    read = format_of(source, kind="chat", where=f"{where}: {name}", folder=folder).reader()

    def read_row(row: Any) -> ChatItem:
        messages: Any = read(row)
        if not messages or messages[-1]["role"] != "assistant" or not messages[-1].get("content"):
            raise ValueError("does not end with an assistant message of text, so there is nothing to compare with")
        subject = row.get("subject") if isinstance(row, dict) else None
        return ChatItem(
            messages=messages[:-1],
            answer=messages[-1]["content"],
            subject=subject if isinstance(subject, str) else None,
            tools=messages.tools,
        )

    def check(item: ChatItem, text: str) -> bool:
        try:
            return bool(checks([*item.messages, {"role": "assistant", "content": item.answer}], text))
        except Exception as error:  # it is the user's, and may raise anything
            raise DataError(
                f"{where}: the checker of {name} raised {type(error).__name__}: {error}, at the answer {text[:80]!r}. "
                "Correct it."
            ) from error

    return ChatTask(
        name=name,
        kind="text",
        source=source,
        read_row=read_row,
        check=check,
        checker=checker if isinstance(checker, str) else f"{checker.__module__}:{checker.__qualname__}",
        max_new_tokens=max_new_tokens,
    )


SHOWN = 10  # Bad rows of a file that a message lists.


@dataclass(frozen=True, kw_only=True)
class LoadedTask:
    """A task and its items in the order in which they are asked; the first n are the same for every n.

    files: label, sha256 and bytes of each. revision: the commit of a Hub dataset.
    """

    task: ChatTask
    items: list[ChatItem]
    files: list[dict[str, Any]]
    revision: str | None = None


def load_chat_tasks(
    tasks: list[ChatTask],
    *,
    places: list[str] | None = None,
    folder: str | None = None,
    cache: Path | None = None,
    where: str = "chat tasks",
) -> list[LoadedTask]:
    """Return the items of all tasks, shuffled as nanochat does (`datasets.Dataset.shuffle(seed=42)`).

    Every file is read to its end. places: local files and folders in which a built-in task's file is found by its name
    (arc_easy.jsonl, mmlu_test.jsonl, HumanEval.jsonl.gz ...); without them they come from the Hub. folder:
    of the relative files of a user's own task. All problems are raised at once.
    """
    loaded, problems = [], []
    for task in tasks:
        at = f"{where}: {task.name}"
        try:
            revision, files = _files_of(task, places, folder, cache or cache_dir(), at)
            loaded.append(_load(task, files, revision, at))
        except TandemError as error:
            problems.append(error)
    raise_errors(problems)
    return loaded


def _load(task: ChatTask, files: list[SourceFile], revision: str | None, where: str) -> LoadedTask:
    problems, items, recorded = [], [], []
    for file in files:
        path = file.local_path()
        found = check_file(path, _AnyRows("any", "chat", None), column_key="").problems
        kept, bad = _items(task, path) if not found else ([], found)
        items += kept
        problems += bad
        label = file.label if revision else path.name
        recorded.append({"label": label, "sha256": sha256_file(path), "bytes": path.stat().st_size})
    if problems:
        raise DataError("\n".join(f"{where}: {problem}" for problem in problems))
    if not items:
        names = ", ".join(file.label for file in files)
        raise DataError(f"{where}: {names} has no rows, so nothing can be scored. Download it again, or name another.")
    # The permutation of datasets.Dataset.shuffle(seed=42), which nanochat asks in.
    order = np.random.default_rng(42).permutation(len(items))
    return LoadedTask(task=task, items=[items[index] for index in order], files=recorded, revision=revision)


def _files_of(
    task: ChatTask, places: list[str] | None, folder: str | None, cache: Path, where: str
) -> tuple[str | None, list[SourceFile]]:
    spec = task.source
    # 1. Among the files that the user has; 2. the user's own task; 3. made here; 4. the Hub.
    if places is not None and task.local_name is not None:
        return None, _recognised(task, local_files(places, where=where, folder=folder), places, where)
    if spec.id is None:
        return None, local_files(spec.files or [], where=where, folder=folder)
    if spec.id.startswith("tandem:"):
        return None, built_in_files(spec, kind="chat", where=where, cache=cache)
    from pipeline.sources.hub_files import dataset_files

    return dataset_files(spec, where=where, cache=cache, folder=folder)


def _split_in(label: str) -> str | None:
    """Return the split that the file's name gives, else one of its folders; None when none does."""
    from datasets.data_files import NON_WORDS_CHARS, SPLIT_KEYWORDS

    for part in reversed(Path(label).parts):
        words = re.split(f"[{NON_WORDS_CHARS}]+", part.lower())
        for split, keywords in SPLIT_KEYWORDS.items():
            if set(words) & set(keywords):
                return str(split)
    return None


def _recognised(task: ChatTask, files: list[SourceFile], places: list[str], where: str) -> list[SourceFile]:
    """Return the task's file, or its shards, among others: by its own name, else by its folders'. Other splits are not
    taken."""
    expression = re.compile(task.local_name or "", re.IGNORECASE)
    named = [file for file in files if expression.search(file.local_path().name)]
    if not named:
        named = [file for file in files if expression.search("/".join(file.local_path().parts[-3:]))]
    found = [file for file in named if _split_in(file.label) in (None, "test")]
    looked = ", ".join(places)
    if not found:
        others = ""
        if named:
            others = f" {', '.join(file.label for file in named)} is of another split."
        raise InputMissingError(
            f"{where}: no file of it in {looked}, so it cannot be scored.{others} Its name must match "
            f"{task.local_name} (in any case)."
        )
    if len({re.sub(r"\d+-of-", "", str(file.local_path())) for file in found}) > 1:
        labels = ", ".join(file.label for file in found)
        raise RecipeError(f"{where}: {labels} in {looked} could all be it. Name the one that is meant.")
    return found


class _AnyRows(Format):
    """Rows as they are: the file is verified here, its rows are read by the task."""

    def reader(self):
        return lambda row: []

    def identity(self) -> str:
        return "any rows"


def _items(task: ChatTask, path: Path) -> tuple[list[ChatItem], list[str]]:
    """Return the items of one file, and what is wrong with it, as `file:row: reason`."""
    assert task.read_row is not None, task.name
    items, bad = [], []
    try:
        for _, row, value in chain.from_iterable(read_blocks(path)):
            try:
                if isinstance(value, BadRow):
                    raise ValueError(value.reason)
                item = task.read_row(value)
                _must_be_characters(item)
                items.append(item)
            except ValueError as error:
                bad.append((row_name(path, row), str(error)))
    except (EOFError, zlib.error, OSError) as error:
        return [], [f"{path} is truncated or damaged: {error}. Download it again."]
    # Every row bad for one reason: it is another kind of file, and one line says so.
    reasons = {reason for _, reason in bad}
    if bad and not items and len(reasons) == 1:
        return [], [f"{path}: every row {reasons.pop()}. It is no file of {task.name}: name another."]
    shown = [f"{name}: {reason}" for name, reason in bad[:SHOWN]]
    if len(bad) > SHOWN:
        shown.append(f"{path}: {len(bad) - SHOWN} more rows like these")
    return items, shown


def _must_be_characters(item: ChatItem) -> None:
    """Raise ValueError for half of a character, which a JSON escape can make and no tokenizer can read."""
    said = [message.get("content") or "" for message in item.messages]
    for text in (item.answer, *item.row.values(), *said):
        text.encode("utf-8")
