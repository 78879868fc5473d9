"""The chat tasks by name: where their rows come from, how they are asked and judged, what guessing scores."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from pipeline.artifacts.errors import DataError, RecipeError
from pipeline.artifacts.user_code import CodeFolder
from pipeline.evals.chat.checkers import (
    MessagesChecker,
    checker_of,
    gsm8k_correct,
    humaneval_program,
    spelling_correct,
)
from pipeline.evals.chat.items import ChatItem
from pipeline.evals.chat.rows import (
    ReadRow,
    arc_item,
    gsm8k_item,
    humaneval_item,
    mmlu_item,
    spelling_item,
)
from pipeline.recipe.schema import Source
from pipeline.sources.formats import format_of


@dataclass(frozen=True, kw_only=True)
class ChatTask:
    """One task. kind letters: the likeliest of the item's letters is the answer. kind text: an answer is generated.

    A text is judged by `check`, or by running the `program` made of it. checker: of a task of one's own, its name. baseline: the accuracy of guessing. rows: of the
    official test set, None where there is none. local_name: a regular expression that the task's file in a folder matches.
    """

    name: str
    kind: Literal["letters", "text"]
    source: Source
    read_row: ReadRow
    baseline: float = 0.0
    rows: int | None = None
    local_name: str | None = None
    check: Callable[[ChatItem, str], bool] | None = None
    checker: str | None = None
    program: Callable[[ChatItem, str], str] | None = None
    max_new_tokens: int = 512

    def centred(self, accuracy: float) -> float:
        """0 at guessing, 1 when all is right."""
        return (accuracy - self.baseline) / (1 - self.baseline)


# Figures beside those of tasks: chat/core, chat/eval_s ...
RESERVED = ("core", "core_part", "core_spelling_bee", "core_spelling_bee_part", "eval_s")
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
            name="humaneval",
            kind="text",
            source=Source(id="openai/openai_humaneval", config="openai_humaneval", split="test"),
            read_row=humaneval_item,
            program=humaneval_program,
            rows=164,
            local_name=r"human[-_ ]?eval",
        ),
        ChatTask(
            name="spelling_bee",
            kind="text",
            source=Source(id="tandem:spelling", split="validation"),
            read_row=spelling_item,
            check=spelling_correct,
            local_name=r"^words",
        ),
    )
}


def built_in_tasks(names: list[str], *, where: str) -> list[ChatTask]:
    """The tasks of that name; RecipeError for one that there is not."""
    unknown = [name for name in names if name not in BUILT_IN]
    if unknown:
        raise RecipeError(
            f"{where}: there is no chat task called {', '.join(unknown)}, so nothing was scored. There are {', '.join(BUILT_IN)}."
        )
    return [BUILT_IN[name] for name in dict.fromkeys(names)]


def custom_task(
    name: str,
    *,
    source: Source,
    checker: str | MessagesChecker,
    folder: CodeFolder | str | None = None,
    max_new_tokens: int = 512,
    where: str = "chat tasks",
) -> ChatTask:
    """A task of any conversations: the last message must be the assistant's and is the right answer, those before are asked.

    checker: `exact`, `contains`, or a function (messages, text) -> bool, itself or as module:attr of a module in folder.
    Raises RecipeError for a name that is taken, a checker or a format that there is not.
    """
    if name in BUILT_IN or name in RESERVED or not re.fullmatch(r"[\w.-]+", name):
        why = (
            "is a built-in task"
            if name in BUILT_IN
            else "is the name of another figure"
            if name in RESERVED
            else "is no name"
        )
        raise RecipeError(f"{where}: {name} {why}. Give your own task another, of letters, digits, dots, dashes.")
    checks = checker_of(checker, folder=folder, where=f"{where}: {name}")
    read = format_of(source, kind="chat", where=f"{where}: {name}", folder=folder).reader()

    def read_row(row: Any) -> ChatItem:
        messages: Any = read(row)
        if not messages or messages[-1]["role"] != "assistant" or not messages[-1].get("content"):
            raise ValueError("does not end with an assistant message of text, so there is nothing to compare with")
        return ChatItem(messages=messages[:-1], answer=messages[-1]["content"])

    def check(item: ChatItem, text: str) -> bool:
        try:
            return bool(checks([*item.messages, {"role": "assistant", "content": item.answer}], text))
        except Exception as error:  # it is the user's, and may raise anything
            raise DataError(
                f"{where}: the checker of {name} raised {type(error).__name__}: {error}, at the answer {text[:80]!r}. Correct it."
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
