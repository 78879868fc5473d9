"""`python -m pipeline.evals RUN_OR_MODEL chat`: the chat tasks that a command line asks for."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from pipeline.artifacts.cache import cache_dir
from pipeline.evals.chat.files import LoadedTask, load_chat_tasks
from pipeline.evals.chat.results import chat_results, closing_lines, heading, task_line
from pipeline.evals.chat.score import CHAT_CORE, require_execution, require_ready, score_chat_tasks
from pipeline.evals.chat.tasks import built_in_tasks, custom_task
from pipeline.evals.command import code_of_command
from pipeline.evals.contamination import Findings
from pipeline.evals.progress import progress_bar
from pipeline.recipe.schema import Source

WHERE = "command line: chat"


@dataclasses.dataclass(frozen=True)
class AskedChat:
    """Tasks with their items, and how they are to be scored."""

    tasks: list[LoadedTask]
    arguments: argparse.Namespace

    def require_ready(self, tokenizer: Any) -> None:
        """Raises what would stop the scoring later: no chat template, no letters, programs that may not be run."""
        require_ready(
            self.tasks,
            tokenizer,
            execute=self.arguments.execute,
            unsafe_exec=self.arguments.unsafe_exec,
            where=WHERE,
        )

    def score(
        self, model: Any, tokenizer: Any, *, findings: Findings | None, rank: int, world_size: int
    ) -> list[dict[str, Any]]:
        """Rows for evals.json, printed as they come. findings: of the training text of the run that is scored."""
        print(heading())
        scores = score_chat_tasks(
            self.tasks,
            model,
            tokenizer,
            max_per_task=self.arguments.max_per_task,
            batch_rows=self.arguments.batch_rows,
            rank=rank,
            world_size=world_size,
            execute=self.arguments.execute,
            unsafe_exec=self.arguments.unsafe_exec,
            watched=lambda batches: progress_bar(batches, name="chat", shown=rank == 0),
            report=lambda score: print(task_line(score), flush=True),
            where=WHERE,
        )
        print("\n".join(closing_lines(scores)))
        if self.arguments.tasks["chat"] is None and not self.arguments.execute:
            print(
                "humaneval was left out: it runs programs that the model writes. Add --execute to run them in a sandbox."
            )
        return chat_results(self.tasks, scores, findings)


def open_chat(
    names: list[str] | None, arguments: argparse.Namespace, *, settings: dict[str, Any], cache: str | None
) -> AskedChat:
    """The tasks by name (None: ChatCORE's five and spelling_bee; without --execute not humaneval) and those of --own-task.

    settings: evals.chat of the run's recipe, for its data and max_new_tokens. cache: its data.cache_dir. Raises what load_chat_tasks raises, and RecipeError for tasks that there are
    not, or that run programs without --execute.
    """
    if names is None:
        names = [name for name in (*CHAT_CORE, "spelling_bee") if name != "humaneval" or arguments.execute]
    longest = arguments.max_new_tokens or settings.get("max_new_tokens") or 512
    tasks = [dataclasses.replace(task, max_new_tokens=longest) for task in built_in_tasks(names, where=WHERE)]
    for name, file in arguments.own_task.items():
        tasks.append(
            custom_task(
                name,
                source=Source(files=file),
                checker=arguments.checker,
                folder=code_of_command(arguments),
                max_new_tokens=longest,
                where=WHERE,
            )
        )
    require_execution(tasks, arguments.execute, arguments.unsafe_exec, where=WHERE)
    places = arguments.chat_data or ([settings["data"]] if settings.get("data") else None)
    loaded = load_chat_tasks(tasks, places=places, folder=str(Path.cwd()), cache=cache_dir(cache), where=WHERE)
    return AskedChat(loaded, arguments)
