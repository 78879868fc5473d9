"""HumanEval: programs that the model writes, executed in a sandbox. The rules are nanochat's (tasks/humaneval.py)."""

import re
from dataclasses import replace
from typing import Any

from pipeline.contrib.sandbox import Isolation, choose_isolation, run_program
from pipeline.evals.chat_tasks import ChatItem, ChatTask, column, user_message
from pipeline.process.errors import RecipeError


def in_sandbox(task: ChatTask, *, execute: bool, unsafe_exec: bool, where: str) -> ChatTask:
    """Return the task with its check. RecipeError without execute, or where programs cannot be locked in without
    unsafe_exec."""
    if not execute:
        raise RecipeError(
            f"{where}: {task.name} runs programs that the model wrote. Allow it with --execute or "
            "evals.chat.execute: true (they run in a sandbox), or leave the task out."
        )
    isolation = choose_isolation(unsafe_exec, where=where)

    def check(item: ChatItem, text: str) -> bool:
        return passes(item, text, isolation=isolation)

    return replace(task, read_row=humaneval_item, check=check, isolation=isolation.name)


def humaneval_item(row: Any) -> ChatItem:
    """Return an item: the beginning of a program is the user's message; test and entry_point are kept for the check."""
    prompt, solution = column(row, "prompt", str), column(row, "canonical_solution", str)
    kept = {name: column(row, name, str) for name in ("test", "entry_point")}
    return ChatItem(messages=user_message(prompt), answer=prompt + solution, row=kept)


def passes(item: ChatItem, text: str, *, isolation: Isolation) -> bool:
    """Return whether the program made of the answer ends without an error."""
    return run_program(humaneval_program(item, text), isolation=isolation).passed


def humaneval_program(item: ChatItem, text: str) -> str:
    """Return the program to run: the prompt's imports, the completion, the test, the call of it.

    The completion is the first code block of the text, else all of it.
    """
    block = re.search(r"```(?:python)?\s*\n(.*?)\n```", text, re.DOTALL)
    completion = (block[1] if block else text).strip()
    imports = "\n".join(_leading_imports(item.messages[-1]["content"]))
    return f"{imports}\n\n{completion}\n\n{item.row['test']}\ncheck({item.row['entry_point']})"


def _leading_imports(program: str) -> list[str]:
    """Return the import lines before the first line that is neither one, nor blank, nor a comment."""
    found = []
    for line in map(str.strip, program.split("\n")):
        if line.startswith(("import ", "from ")):
            found.append(line)
        elif line and not line.startswith("#"):
            break
    return found
