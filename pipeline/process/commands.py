"""Commands: as a person types them where this process was started from, and the numbers that their environment sets."""

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.process.errors import RecipeError
from pipeline.process.side_process import ROOT

CONSOLE = "TANDEM_COMMAND"  # how the console command was called; set by it for all that it starts
MODULES = {"plan": "preflight", "init": "launch.init"}  # of the console's names those that the package calls otherwise
STAGES = ("pretrain", "sft")


def command(name: str, *arguments: str | Path) -> str:
    """Return a command line of the console's command `name`: through `tandem` where that started this process, else
    `python -m pipeline. ...` or the script of a stage."""
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


def stage_command(recipe: str, stage: str, settings: Sequence[str] = ()) -> str:
    """Return the command that trains a shipped recipe; the scripts are given its path, which a reader can open."""
    path = Path("recipes", f"{recipe}.yaml")
    if not os.environ.get(CONSOLE) and (ROOT / path).is_file():
        recipe = _near(ROOT / path)
    return command(stage, recipe, *settings)


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
