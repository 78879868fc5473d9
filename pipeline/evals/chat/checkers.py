"""Whether a written answer is right. Texts come as the model wrote them, its control tokens included."""

import re
from collections.abc import Callable
from typing import Any

from pipeline.artifacts.errors import RecipeError
from pipeline.artifacts.user_code import CodeFolder, import_attribute
from pipeline.evals.chat.items import ChatItem
from pipeline.sources.quickstart.spelling import NUMBERS

MessagesChecker = Callable[[list[dict], str], Any]  # (messages with the right answer last, text) -> right or not
NUMBER_WORDS = {word: str(number) for number, word in enumerate(NUMBERS)} | {"once": "1", "twice": "2", "zero": "0"}


def number_after_marks(text: str) -> str | None:
    """The number after the first ####, without commas; the official rule of GSM8K (grade_school_math/dataset.py)."""
    found = re.search(r"#### (\-?[0-9\.\,]+)", text)
    return found[1].replace(",", "") if found else None


def number_said(text: str) -> str | None:
    """The number after ####, else the last one in the text, in digits or in words up to twelve."""
    words = re.findall(rf"\b(?:\d+|{'|'.join(NUMBER_WORDS)})\b", text.lower())
    return number_after_marks(text) or (NUMBER_WORDS.get(words[-1], words[-1]) if words else None)


def gsm8k_correct(item: ChatItem, text: str) -> bool:
    """Whether the text's number after #### is the answer's, as text: 18 is not 18.0."""
    return number_after_marks(text) == item.answer


def spelling_correct(item: ChatItem, text: str) -> bool:
    """A count: the number said. A spelling: somewhere exactly the word's letters in a row, between commas, dashes or spaces."""
    if item.answer.isdecimal():
        return number_said(text) == item.answer
    runs = re.findall(r"(?<![a-z])[a-z](?:[ ,.-]{1,2}[a-z])+(?![a-z])", text.lower())
    return item.answer in (re.sub(r"[^a-z]", "", run) for run in runs)


def humaneval_program(item: ChatItem, text: str) -> str:
    """The program to run: the prompt's imports, the completion, the test, the call of it. It passes by ending without error.

    The completion is the first code block of the text, else all of it. Source of the rules: nanochat tasks/humaneval.py.
    """
    block = re.search(r"```(?:python)?\s*\n(.*?)\n```", text, re.DOTALL)
    completion = (block[1] if block else text).strip()
    imports = "\n".join(_leading_imports(item.messages[-1]["content"]))
    return f"{imports}\n\n{completion}\n\n{item.row['test']}\ncheck({item.row['entry_point']})"


def _leading_imports(program: str) -> list[str]:
    """The import lines before the first line that is neither one, nor blank, nor a comment."""
    found = []
    for line in map(str.strip, program.split("\n")):
        if line.startswith(("import ", "from ")):
            found.append(line)
        elif line and not line.startswith("#"):
            break
    return found


def exact(messages: list[dict], text: str) -> bool:
    """Whether the text is the last message's, but for white space around it."""
    return text.strip() == (messages[-1].get("content") or "").strip()


def contains(messages: list[dict], text: str) -> bool:
    """Whether the last message's text, without white space around it, stands somewhere in the text."""
    return (messages[-1].get("content") or "").strip() in text


def checker_of(checker: str | MessagesChecker, *, folder: CodeFolder | str | None, where: str) -> MessagesChecker:
    """The function that `exact`, `contains` or `module:attr` names; RecipeError when there is none."""
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
        f"{where}: {what}, so nothing can be judged. Write exact, contains, or module:attr of a function (messages, text) -> bool."
    )
