"""The console command of an installed Tandem: `tandem COMMAND ...` is `python -m pipeline. ...` by a
shorter name."""

import os
import runpy
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
STAGES = {
    "pretrain": "stage 1: train on raw text; starts a process for each GPU (NPROC=n for another number)",
    "sft": "stage 2: chat SFT of a pretrained model, started in the same way",
}
MODULES = {
    "init": ("pipeline.launch.init", "look at files of yours and write a commented recipe for them"),
    "chat": ("pipeline.chat", "talk to a run, a model folder or a Hub id; -p for one answer"),
    "evals": ("pipeline.evals", "score it: bits per byte, CORE, chat tasks, lm-evaluation-harness"),
    "report": ("pipeline.report", "write a run's report, show it while the run trains (--serve), or compare runs"),
    "plan": ("pipeline.plan", "hours, memory, disk and cost of a recipe before it is trained"),
    "sweep": ("pipeline.sweep", "try other values and seeds of a recipe: better, worse, or not shown"),
    "data": ("pipeline.data", "look at data, or prepare the rows of a recipe now"),
    "tokenizer": ("pipeline.tokenizer", "train the tokenizer of a recipe and judge it"),
    "hub": ("pipeline.hub", "push, pull, export"),
    "monitor": ("pipeline.monitor", "record GPUs beside any program"),
}
WRONG = 64  # of the command line, as RecipeError's: it is not imported, so that --help answers at once


def usage() -> str:
    help_texts = {"init": "", **STAGES, **{name: text for name, (_, text) in MODULES.items()}}  # init comes first
    lines = [
        "usage: tandem COMMAND ...",
        "",
        *(f"  {name:<10} {text}" for name, text in help_texts.items()),
        "",
        "`tandem COMMAND --help` says more. A recipe is a path or the name of a shipped one:",
        "",
        "  tandem pretrain quickstart_pretrain && tandem sft quickstart_sft",
    ]
    return "\n".join(lines)


def show(text: str) -> None:
    """Print the text; a reader that has left, such as `head`, is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes once more at its end


def main() -> int:
    command, *arguments = sys.argv[1:] or ["--help"]
    if command in ("-h", "--help", "help"):
        show(usage())
        return 0
    if command == "--version":
        try:
            show(version("tandem-llm"))
        except PackageNotFoundError:
            show("not installed")
        return 0
    if command not in STAGES and command not in MODULES:
        print(f"command line: {command} is no command of tandem.\n\n{usage()}", file=sys.stderr)
        return WRONG
    # Python processes started from here put the current folder on no path: a user's own pipeline.py would hide this
    # package.
    os.environ["PYTHONSAFEPATH"] = "1"
    sys.path[:] = [str(PACKAGE.parent), *(place for place in sys.path[1:] if place)]
    from pipeline.process.commands import CONSOLE

    os.environ[CONSOLE] = "tandem" if shutil.which("tandem") else os.path.relpath(sys.argv[0])
    if command in STAGES and {"-h", "--help"} & set(arguments):
        from pipeline.recipe import help_text

        show(help_text(command))
        return 0
    if command in STAGES:
        from pipeline.launch.launch import start

        start(str(PACKAGE / f"{command}.py"), f"quickstart_{command}", arguments)
    sys.argv = [f"tandem {command}", *arguments]
    runpy.run_module(MODULES[command][0], run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
