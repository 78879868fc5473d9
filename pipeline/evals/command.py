"""The command line of `python -m pipeline.evals`; nothing here imports torch."""

import argparse
from difflib import get_close_matches
from pathlib import Path

from pipeline.evals.core.bundle import TASKS as CORE_TASKS
from pipeline.process.commands import program
from pipeline.process.errors import RecipeError
from pipeline.process.user_code import COMMAND_TRUST, CodeFolder

BUILT_IN = ("bpb", "core", "chat", "samples")
EXAMPLES = {"core": "copa,piqa", "chat": "arc_easy,gsm8k", "lm_eval": "hellaswag,arc_easy"}
WITH_PARTS = tuple(EXAMPLES)  # core:copa,piqa: some of its tasks
DEFAULT = ("bpb", "samples")


# fmt: off
def read_arguments(argv: list[str]) -> argparse.Namespace:
    """Return the arguments; `tasks` by name, with the parts asked for (None: all). Raises RecipeError for an unknown one."""
    parser = argparse.ArgumentParser(
        prog=program("evals"),
        description="Score a run, a checkpoint, a local model folder or a Hub id. A run's results go to its report/evals.json.",
        epilog="On several devices: accelerate launch --module pipeline.evals RUN_OR_MODEL TASK ...",
    )
    parser.add_argument("model", metavar="RUN_OR_MODEL", help="of a run its model/ is scored, else its newest whole checkpoint")
    parser.add_argument("tasks", nargs="*", metavar="TASK", help="bpb (bits per byte), core (core:copa,piqa: some of it), chat (chat:gsm8k), samples (continuations of fixed prompts), lm_eval:TASK,TASK (lm-evaluation-harness), or your own as module:attr; default bpb and samples")
    parser.add_argument("--output", metavar="FILE", help="write the results there too, as JSON (a run's are kept in its report/evals.json)")
    parser.add_argument("--revision", help="branch, tag or commit of a Hub id")
    parser.add_argument("--trust-code", action="store_true", help="run what the run's recipe names as module:attr, code files that come with the model, and installed modules named here")
    parser.add_argument("--batch-rows", type=int, default=8, help="rows of one forward pass; does not change any figure (default %(default)s)")
    bpb = parser.add_argument_group("bpb")
    bpb.add_argument("--text", nargs="+", metavar="FILE", help="score these txt, jsonl or parquet files or globs instead of the run's validation")
    bpb.add_argument("--chat", nargs="+", metavar="FILE", help="score what the assistant says in these jsonl or parquet files of messages")
    bpb.add_argument("--max-bytes", type=int, default=4_000_000, help="of --text, in whole documents (default %(default)s)")
    bpb.add_argument("--max-conversations", type=int, default=500, help="of --chat (default %(default)s)")
    bpb.add_argument("--window", type=int, help="most tokens the model sees at once for --text and --chat (default its positions, at most 2048)")
    bpb.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="compute in it (default for a run's own validation what it was trained in, else float32)")
    tasks = parser.add_argument_group("core, chat and lm_eval")
    tasks.add_argument("--bundle", metavar="PATH", help="folder or zip of the eval_bundle (default: the published files, fetched once)")
    tasks.add_argument("--max-per-task", type=int, metavar="N", help="only the first N items of each task, in an order that never changes")
    tasks.add_argument("--long-prompts", choices=("fewer_shots", "crop"), help="core prompts beyond the model's positions: leave whole examples out, or keep the last tokens as nanochat does (default the recipe's, else fewer_shots)")
    tasks.add_argument("--search-text", action="store_true", help="core, chat: first look for their items in the text that the run, and those it comes from, trained on")
    chat = parser.add_argument_group("chat")
    chat.add_argument("--chat-data", nargs="+", metavar="PATH", help="folders or files in which the tasks' files are found by their names (default the recipe's, else the Hub's)")
    chat.add_argument("--own-task", action="append", default=[], metavar="NAME=FILE", help="score conversations of your own too, whose last message is the right answer; may be given again")
    chat.add_argument("--checker", default="exact", help="of --own-task: exact, contains, or module:attr of a function (messages, text) -> bool (default %(default)s)")
    chat.add_argument("--execute", action="store_true", help="run the programs that the model writes for humaneval, each in a sandbox")
    chat.add_argument("--unsafe-exec", action="store_true", help="with --execute: run them also where no sandbox is to be had")
    chat.add_argument("--max-new-tokens", type=int, metavar="N", help="longest answer (default the recipe's, else 512)")
    harness = parser.add_argument_group("lm_eval")
    harness.add_argument("--shots", type=int, metavar="N", help="examples in a prompt (default each task's own)")
    harness.add_argument("--include-path", metavar="FOLDER", help="a folder of task YAMLs of your own, which are code: with --trust-code")
    parser.add_argument_group("samples and lm_eval").add_argument("--as-chat", action="store_true", help="give the prompts as a user's message through the chat template; a chat run's are anyway")
    arguments = parser.parse_intermixed_args(argv)
    arguments.own_task = _own_tasks(arguments.own_task)
    arguments.defaults = not (arguments.tasks or arguments.own_task)
    arguments.tasks = _tasks(arguments.tasks or ([] if arguments.own_task else list(DEFAULT)))
    if arguments.own_task and "chat" not in arguments.tasks:
        arguments.tasks["chat"] = []
    if arguments.search_text and not {"core", "chat"} & arguments.tasks.keys():
        raise RecipeError(
            "command line: --search-text looks for the items of core and chat, and neither is asked for. Name one: core, chat:gsm8k."
        )
    if arguments.output and not Path(arguments.output).absolute().parent.is_dir():
        raise RecipeError(
            f"command line: --output {arguments.output} is in no folder that exists, so the results could not be kept. Make the folder first."
        )
    for name in ("batch_rows", "max_per_task", "max_new_tokens", "max_bytes", "max_conversations", "window"):
        if (number := getattr(arguments, name)) is not None and number < 1:
            raise RecipeError(
                f"command line: --{name.replace('_', '-')} {number} leaves nothing to score. Give at least 1."
            )
    return arguments
# fmt: on


def code_of_command(arguments: argparse.Namespace) -> CodeFolder:
    """Return where module:attr of the command line points: to modules in the working folder."""
    return CodeFolder(str(Path.cwd()), trusted=arguments.trust_code, trust_with=COMMAND_TRUST)


def _own_tasks(texts: list[str]) -> dict[str, str]:
    named = [_own_task(text) for text in texts]
    if len(dict(named)) < len(named):
        raise RecipeError("command line: two of --own-task have the same name. Give each a name of its own.")
    return dict(named)


def _own_task(text: str) -> tuple[str, str]:
    name, _, file = text.partition("=")
    if not (name and file):
        raise RecipeError(f"command line: --own-task {text} names no file, so it cannot be scored. Write NAME=FILE.")
    return name, file


def _tasks(names: list[str]) -> dict[str, list[str] | None]:
    """Return by evaluation the parts requested by all words that name it; None: all of it."""
    found: dict[str, list[str] | None] = {}
    for name in names:
        head, colon, listed = name.partition(":")
        if name in BUILT_IN:
            found[name] = None
        elif head in WITH_PARTS:
            parts = [part.strip() for part in listed.split(",")]
            if not all(parts):
                raise RecipeError(
                    f"command line: {name} names no task, so nothing was scored. Write {head}:{EXAMPLES[head]}."
                )
            before = found.get(head, [])
            found[head] = None if before is None else list(dict.fromkeys([*before, *parts]))
        elif colon and listed and head not in BUILT_IN:
            found[name] = None
        else:
            near = get_close_matches(name, BUILT_IN, n=1)
            raise RecipeError(
                f"command line: there is no evaluation called {name}, so nothing was scored. "
                + (f"Did you mean {near[0]}? " if near else "")
                + f"Use {', '.join(BUILT_IN)}, lm_eval:TASKS or module:attr."
            )
    known = [task.name for task in CORE_TASKS]
    if unknown := [part for part in found.get("core") or [] if part not in known]:
        raise RecipeError(
            f"command line: CORE has no task called {', '.join(unknown)}, so nothing was scored. Its tasks: {', '.join(known)}."
        )
    return found
