"""What is looked for in training text: each evaluation item as its question and right answer, without examples or wording."""

from pathlib import Path
from typing import Any

from pipeline.data.watchlist import Watchlist
from pipeline.evals.chat.files import LoadedTask
from pipeline.evals.chat.items import ChatItem
from pipeline.evals.core.bundle import Bundle
from pipeline.evals.core.tasks import TASKS, CoreTask


def core_texts(task: CoreTask, items: list[dict]) -> list[str]:
    """The text of each item, in the order given: the question and the right option, or the text and how it goes on."""
    return [_core_text(task, item) for item in items]


def _core_text(task: CoreTask, item: dict) -> str:
    if task.kind == "multiple_choice":
        # The bundle's wording, without which a short question could only be found where somebody copied the file.
        return f"{item['query'].removeprefix('Question: ')} {item['choices'][item['gold']]}"
    if task.kind == "schema":
        return f"{item['context_options'][item['gold']]} {item['continuation']}"
    return f"{item['context']} {item['continuation']}"


def chat_texts(loaded: LoadedTask) -> list[str]:
    """The text of each of the task's items, in their order: the question and the right answer, of letters the choice's text."""
    return [_chat_text(item) for item in loaded.items]


def _chat_text(item: ChatItem) -> str:
    if item.letters:
        return f"{item.row['question']} {item.row['choice']}"
    asked = "\n".join(message.get("content") or "" for message in item.messages)
    # A program's answer begins with what was asked.
    return item.answer if item.answer.startswith(asked) else f"{asked}\n{item.answer}"


def watched_bundle(bundle: Bundle) -> dict[str, list[str]]:
    """The texts of every item of every task that the bundle has, in the order of its file, by the name of the metric."""
    scored = [task for task in TASKS if task.name not in bundle.missing]
    return {f"core/{task.name}": core_texts(task, bundle.items[task.file]) for task in scored}


def watched_chat(tasks: list[LoadedTask]) -> dict[str, list[str]]:
    """The texts of every item of every task, in the order of asking, by the name of the metric."""
    return {f"chat/{loaded.task.name}": chat_texts(loaded) for loaded in tasks}


def watched_tasks(benchmarks: list[Any]) -> dict[str, list[str]]:
    """The texts of all items of all benchmarks, by the name of the task's metric."""
    return {name: texts for benchmark in benchmarks for name, texts in benchmark.watched_texts().items()}


def save_watchlist(benchmarks: list[Any], *, cache: Path) -> Path | None:
    """The file of what a run's training text is searched for; None when it is not scored on anything."""
    return Watchlist.of(watched_tasks(benchmarks)).save(cache / "watchlists") if benchmarks else None
