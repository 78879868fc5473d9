"""Commands: processes that work next to a training, how each is started, what it inherits and when it ends; command
lines as a person types them where this process was started from; and the numbers that their environment sets.

The preparation of data and its workers, the writer of checkpoints, the publisher and the mirror are such processes.
Each

- has its own session: Ctrl-C at the terminal and a signal for the training are the training's;
- does not hold the training's standard output, for whose end a reader of it would wait;
- finds this package wherever the run was started, and is no rank of the run;
- ends when its input is closed, when its work is done, or with its parent (`end_with`).
"""

import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from pipeline.process.errors import RecipeError

ROOT = Path(__file__).parents[2]
OF_A_RANK = ("TANDEM_STATUS", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def python_path() -> str:
    """Return the PYTHONPATH under which another interpreter finds this package, and what this one was given."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def environment(**changes: str) -> dict[str, str]:
    """Return the environment of a process that is no rank of the run and whose status is not the run's."""
    kept = {name: value for name, value in os.environ.items() if name not in OF_A_RANK}
    return kept | {"PYTHONPATH": python_path()} | changes


def start(*arguments: str | Path, log: IO | None = None, **popen: Any) -> subprocess.Popen:
    """Start the interpreter with these arguments, and return the process.

    log: the file that takes what it prints; it then has no input. Without one, input and errors are pipes and the rest
    is dropped. popen: what is to be otherwise, as subprocess.Popen takes it.
    """
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    if log is not None:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)], **{"env": environment(), "start_new_session": True, **pipes, **popen}
    )


def end_with(parent: int) -> None:
    """End this process as soon as the one that started it is gone, whatever it is doing then."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def yield_to_training() -> None:
    """Lower the priority of this process, on Linux of this thread: training goes first, and when it waits, the
    processor is free anyway."""
    if hasattr(os, "nice"):
        os.nice(5)  # A quarter of a shared core. 19 were a seventieth, for the same work: a push took minutes.


CONSOLE = "TANDEM_COMMAND"  # how the console command was called; set by it for all that it starts
MODULES = {"plan": "preflight", "init": "launch.init"}  # of the console's names those that the package calls otherwise
STAGES = ("pretrain", "sft")


def command(name: str, *arguments: str | Path) -> str:
    """Return a command line of the console's command `name`: through `tandem` where that started this process, else
    `python -m pipeline. ...` or the script of a stage."""
    # 1. As it was typed, `tandem`; 2. a stage by the script of a clone; 3. a module of the package.
    console = os.environ.get(CONSOLE)
    if console:
        words = [console, name]
    elif name in STAGES and (script := ROOT / f"run_{name}.sh").is_file():
        words = ["bash", _near(script)]
    elif name in STAGES:
        words = ["tandem", name]
    else:
        words = [_python(), "-m", f"pipeline.{MODULES.get(name, name)}"]
    return " ".join([*words, *(_quoted(str(argument)) for argument in arguments)])


def program(name: str) -> str:
    """Return what --help calls the program: `tandem chat`, or `python -m pipeline.chat`."""
    console = os.environ.get(CONSOLE)
    return f"{console} {name}" if console else f"python -m pipeline.{MODULES.get(name, name)}"


def stage_command(recipe_path: str, stage: str, settings: Sequence[str] = ()) -> str:
    """Return the command that trains a shipped recipe; the scripts are given its path, which a reader can open."""
    path = Path("recipes", f"{recipe_path}.yaml")
    if not os.environ.get(CONSOLE) and (ROOT / path).is_file():
        recipe_path = _near(ROOT / path)
    return command(stage, recipe_path, *settings)


def _python() -> str:
    """Return `python` where that is this environment's, else its path: the scripts make one without activating it."""
    found = shutil.which("python")
    if found and Path(found).parent == Path(sys.executable).parent:
        return "python"
    return shlex.quote(_near(Path(sys.executable)))


def _near(path: Path) -> str:
    """Return the path from the current folder, where that is not far away."""
    near = os.path.relpath(path)
    return str(path) if near.startswith(os.path.join("..", "..")) else near


def _quoted(argument: str) -> str:
    """Return the argument as a shell takes it, in double quotes where those do: sentences have apostrophes."""
    if shlex.quote(argument) == argument:
        return argument
    plain = not any(letter in argument for letter in '"$`\\!\n')
    return f'"{argument}"' if plain else shlex.quote(argument)


def whole_number(environ: Mapping[str, str], name: str, default: int, *, least: int) -> int:
    """Return a whole number of the environment."""
    text = environ.get(name, str(default))
    if not (text.isdecimal() and int(text) >= least):
        raise RecipeError(
            f"{name} is {text!r}; it must be a whole number, {least} or more. Unset it or write a number."
        )
    return int(text)
