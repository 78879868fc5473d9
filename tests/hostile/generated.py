"""Generated inputs: whatever comes in, the answer is a result or a sentence, never a traceback.

`python -m tests.hostile.generated --kind recipes --count 40000` makes many; test_generated.py makes a few of each kind.
"""

import argparse
import contextlib
import importlib
import io
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from pipeline.process.errors import TandemError
from tests.hostile.random_inputs import Strategy, in_processes

# Where each kind is made; a kind is an instance of Kind.
KINDS = {
    "recipes": "tests.hostile.generated_recipes:RECIPES",
    "overrides": "tests.hostile.generated_recipes:OVERRIDES",
}
LIMIT_S = 20  # of processor time for one input; ten times as long on the clock, since the machine may be busy


@dataclass(frozen=True)
class Kind:
    """One kind of input. prepare: what lies in the folder, once. put_in: an input through the program, the folder being the working
    folder; it raises TandemError for what is refused."""

    inputs: Strategy
    put_in: Callable[[Any], None]
    prepare: Callable[[Path], None] = lambda folder: None


@dataclass
class Outcome:
    """How many inputs ended how, and of each defect (the error and the place that raised it) the shortest input."""

    ended: Counter = field(default_factory=Counter)
    defects: dict[str, tuple[Any, str]] = field(default_factory=dict)


class TooLongError(BaseException):
    """An input that was not answered in LIMIT_S; no `except Exception` takes it."""


def kind_of(name: str) -> Kind:
    module, _, attribute = KINDS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def generate(kind: Kind, *, count: int, number: int, folder: Path) -> Outcome:
    """Put `count` inputs in and return how they ended. number: the seed."""
    outcome, random = Outcome(), Random(number)
    kind.prepare(folder)
    for _ in range(count):
        put_in(kind, kind.inputs.draw(random), folder, outcome)
    return outcome


def share(name: str, count: int, number: int) -> Outcome:
    """Generate in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        return generate(kind_of(name), count=count, number=number, folder=Path(folder))


def put_in(kind: Kind, given: Any, folder: Path, outcome: Outcome) -> None:
    """Note how one input ends."""
    try:
        with contextlib.chdir(folder), _quiet(), _time_limit():
            kind.put_in(given)
        outcome.ended["taken"] += 1
    except TandemError as error:
        outcome.ended[f"refused with {error.status}"] += 1
    except (Exception, SystemExit, TooLongError) as error:
        outcome.ended["defect"] += 1
        name = f"{type(error).__name__} at {_place(error)}"
        if name not in outcome.defects or len(str(given)) < len(str(outcome.defects[name][0])):
            outcome.defects[name] = (given, "".join(traceback.format_exception(error)))


def _place(error: BaseException) -> str:
    """The innermost line of ours."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/pipeline/" in frame.filename] or frames
    return f"{ours[-1].filename.rpartition('/pipeline/')[2]}:{ours[-1].lineno}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def end(signum: int, frame: Any) -> None:
        raise TooLongError

    clocks = ((signal.SIGPROF, signal.ITIMER_PROF, LIMIT_S), (signal.SIGALRM, signal.ITIMER_REAL, 10 * LIMIT_S))
    before = [signal.signal(number, end) for number, _, _ in clocks]
    for _, timer, seconds in clocks:
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for (number, timer, _), handler in zip(clocks, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile.generated", description=__doc__)
    parser.add_argument("--kind", choices=[*KINDS, "all"], default="all")
    parser.add_argument("--count", type=int, default=1000, help="inputs of each kind")
    parser.add_argument("--seed", type=int, default=0, help="another one makes other inputs")
    parser.add_argument("--processes", type=int, default=1)
    asked = parser.parse_args(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TANDEM_CACHE"] = cache  # one for all: the built-in data take a minute to make
        return max([_report(name, asked) for name in (KINDS if asked.kind == "all" else [asked.kind])])


def _report(name: str, asked: argparse.Namespace) -> int:
    """Print how the inputs of one kind ended, and return the exit status."""
    started, outcome = time.monotonic(), Outcome()
    shares = [(name, asked.count // asked.processes, asked.seed * 1000 + part) for part in range(asked.processes)]
    for part in in_processes(share, shares):
        outcome.ended.update(part.ended)
        outcome.defects |= part.defects
    ended = ", ".join(f"{number:,} {how}" for how, number in outcome.ended.most_common())
    seconds = time.monotonic() - started
    print(
        f"{name}: {outcome.ended.total():,} in {seconds:.0f} s, {outcome.ended.total() / seconds:.0f} a second: {ended}"
    )
    for place, (example, text) in outcome.defects.items():
        print(f"\n--- {place}, for example by\n{example}\n{text}")
    return int(bool(outcome.defects))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
