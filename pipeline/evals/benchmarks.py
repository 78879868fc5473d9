"""CORE and the chat tasks as a recipe asks for them while training, opened and read through before step 1."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

from pipeline.evals.chat.score import chat_results, require_execution, require_ready, score_chat_tasks
from pipeline.evals.chat.tasks import ChatTask, LoadedTask, built_in_tasks, custom_task, load_chat_tasks
from pipeline.evals.contamination import Findings, watched_bundle, watched_chat
from pipeline.evals.core.bundle import open_bundle
from pipeline.evals.core.score import core_results, score_core
from pipeline.process.errors import RecipeError
from pipeline.process.storage import cache_dir
from pipeline.recipe.schema import Recipe, Source


class CoreBenchmark:
    """CORE as evals.core says."""

    name, generates = "core", False

    def __init__(self, recipe: Recipe):
        self.settings = recipe.evals.core
        self.every_steps, self.at_start = self.settings.every_steps, False
        self.bundle = open_bundle(self.settings.bundle, cache=recipe.data.cache_dir)

    def require_ready(self, tokenizer: Any) -> None:
        """Do nothing: every run's tokenizer will do."""

    def watched_texts(self) -> dict[str, list[str]]:
        """Return what the training text is searched for."""
        return watched_bundle(self.bundle)

    def score(
        self, model: Any, tokenizer: Any, *, findings: Findings | None = None, **where: Any
    ) -> list[dict[str, Any]]:
        """Return rows for evals.json; their values are the same on every rank. findings: of the run's training text, on the rank
        that writes. where: device, rank ... as score_core takes them."""
        settings = self.settings
        return core_results(
            score_core(
                self.bundle,
                model,
                tokenizer,
                max_per_task=settings.max_per_task,
                max_s=settings.max_s,
                long_prompts=settings.long_prompts,
                **where,
            ),
            findings,
        )


class ChatBenchmark:
    """The chat tasks as evals.chat says."""

    name, generates = "chat", True

    def __init__(self, recipe: Recipe):
        self.settings = recipe.evals.chat
        self.every_steps, self.at_start = self.settings.every_steps, self.settings.at_start
        self.where = recipe.where("evals.chat")
        self.programs: dict[str, Any] = {"execute": self.settings.execute, "unsafe_exec": recipe.evals.unsafe_exec}
        tasks = [
            dataclasses.replace(task, max_new_tokens=self.settings.max_new_tokens)
            for task in (*built_in_tasks(self.settings.tasks, where=self.where), *_own_tasks(recipe, where=self.where))
        ]
        require_execution(tasks, where=self.where, **self.programs)
        data = self.settings.data
        self.tasks: list[LoadedTask] = load_chat_tasks(
            tasks,
            places=None if data is None else [data],
            folder=str(Path(recipe.path).parent) if recipe.path else None,
            cache=cache_dir(recipe.data.cache_dir),
            where=self.where,
        )

    def require_ready(self, tokenizer: Any) -> None:
        """Raise DataError for a tokenizer that cannot put a question."""
        require_ready(self.tasks, tokenizer, where=self.where, **self.programs)

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
        """Return rows for evals.json; their values are the same on every rank. findings: of the run's training text, on the rank
        that writes."""
        scores = score_chat_tasks(
            self.tasks,
            model,
            tokenizer,
            max_per_task=self.settings.max_per_task,
            max_s=self.settings.max_s,
            rank=rank,
            world_size=world_size,
            watched=watched,
            where=self.where,
            **self.programs,
        )
        left_out = [loaded.task.name for loaded in self.tasks[len(scores) :]]
        if left_out and rank == 0:
            print(
                f"chat: {', '.join(left_out)} not begun within evals.chat.max_s ({self.settings.max_s:g} s)",
                file=sys.stderr,
                flush=True,
            )
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
                f"{where}: a task of evals.chat.own lacks {'files or id' if own.name else 'a name'}, so it cannot be scored. Write {{name: mine, files: mine.jsonl, checker: exact}}."
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
