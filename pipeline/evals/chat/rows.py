"""From a dataset's row to a question: one function a format, which raises ValueError with the reason for a row it cannot read.

The wording of multiple choice is nanochat's protocol (tasks/common.py), so that scores compare item by item.
"""

import re
import string
from collections.abc import Callable, Sequence
from typing import Any

from pipeline.evals.chat.checkers import number_after_marks, number_said
from pipeline.evals.chat.items import ChatItem

ReadRow = Callable[[Any], ChatItem]


def multiple_choice(question: str, letters: Sequence[str], choices: Sequence[str]) -> str:
    """The user's message. No space before a letter: the answer's token is then the one that stands here."""
    options = "".join(f"- {choice}={letter}\n" for letter, choice in zip(letters, choices, strict=True))
    return f"Multiple Choice question: {question}\n{options}\nRespond only with the letter of the correct answer."


def arc_item(row: Any) -> ChatItem:
    """ARC as on the Hub (question, choices {text, label}, answerKey), or as in the CORE bundle (query, choices, gold)."""
    if isinstance(row, dict) and ("query" in row or "gold" in row):
        choices = _texts(_column(row, "choices", list), "choices")
        question = _column(row, "query", str).removeprefix("Question: ")
        return _lettered(question, string.ascii_uppercase[: len(choices)], choices, index=_column(row, "gold", int))
    choices = _column(row, "choices", dict)
    texts, labels = (_texts(_column(choices, name, list), f"choices.{name}") for name in ("text", "label"))
    key = _column(row, "answerKey", str)
    if len(texts) != len(labels) or len(set(labels)) != len(labels):
        raise ValueError(f"has {len(texts)} choices under the labels {', '.join(labels)}")
    if key not in labels:
        raise ValueError(f"has the answerKey {key!r}, which is none of its choices {', '.join(labels)}")
    return _lettered(_column(row, "question", str), labels, texts, index=labels.index(key))


def mmlu_item(row: Any) -> ChatItem:
    """MMLU: question, choices, answer (the index of a choice), subject."""
    choices = _texts(_column(row, "choices", list), "choices")
    return _lettered(
        _column(row, "question", str),
        string.ascii_uppercase[: len(choices)],
        choices,
        index=_column(row, "answer", int),
        subject=row.get("subject"),
    )


def gsm8k_item(row: Any) -> ChatItem:
    """GSM8K: question and a worked answer, whose number stands after ####."""
    number = number_after_marks(_column(row, "answer", str))
    if number is None:
        raise ValueError("has an answer without a number after ####")
    return ChatItem(messages=_asked(_column(row, "question", str)), answer=number)


def humaneval_item(row: Any) -> ChatItem:
    """HumanEval: the beginning of a program as the user's message; its test and entry_point are kept for the check."""
    kept = {name: _column(row, name, str) for name in ("test", "entry_point")}
    prompt = _column(row, "prompt", str)
    return ChatItem(messages=_asked(prompt), answer=prompt + _column(row, "canonical_solution", str), row=kept)


def spelling_item(row: Any) -> ChatItem:
    """The first question of a conversation of `tandem:spelling`. answer: the word to be spelled, or a number."""
    asked, answered = (_column(message, "content", str) for message in _column(row, "messages", list)[:2])
    spelled = re.fullmatch(r"([a-z]+): [a-z](?:, [a-z])*\.", answered)
    answer = spelled[1] if spelled else number_said(answered)
    if answer is None:
        raise ValueError(f"has the answer {answered!r}, which neither spells nor counts")
    return ChatItem(messages=_asked(asked), answer=answer)


def _lettered(
    question: str, letters: Sequence[str], choices: list[str], *, index: int, subject: str | None = None
) -> ChatItem:
    if not 2 <= len(choices) == len(letters):
        raise ValueError(f"has {len(choices)} choices")
    if not 0 <= index < len(choices):
        raise ValueError(f"has the answer {index}, outside its {len(choices)} choices (counted from 0)")
    return ChatItem(
        messages=_asked(multiple_choice(question, letters, choices)),
        answer=letters[index],
        letters=tuple(letters),
        subject=subject,
        row={"question": question, "choice": choices[index]},
    )


def _asked(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def _column(row: Any, name: str, kind: type) -> Any:
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
