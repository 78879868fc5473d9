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
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from pipeline.process.errors import TandemError

# Where each kind is made; a kind is an instance of Kind.
KINDS = {
    "recipes": "tests.hostile.generated_recipes:RECIPES",
    "overrides": "tests.hostile.generated_recipes:OVERRIDES",
}
LIMIT_S = 20  # of processor time for one input; ten times as long on the clock, since the machine may be busy
CHUNK = 500  # inputs of one strategy's run: hypothesis remembers all of a run


@dataclass(frozen=True)
class Kind:
    """One kind of input. prepare: what lies in the folder, once. put_in: an input through the program, the folder being the working
    folder; it raises TandemError for what is refused."""

    inputs: SearchStrategy
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


def generate(kind: Kind, *, count: int, number: int, folder: Path, outcome: Outcome | None = None) -> Outcome:
    """Put `count` inputs in and return how they ended. number: the seed of the first chunk."""
    outcome = outcome or Outcome()
    kind.prepare(folder)
    for first in range(0, count, CHUNK):

        @seed(number + first)
        @settings(max_examples=min(CHUNK, count - first), deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))  # fmt: skip
        @given(kind.inputs)
        def chunk(given: Any) -> None:
            put_in(kind, given, folder, outcome)

        chunk()
    return outcome


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
    asked = parser.parse_args(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    failed = False
    for name in KINDS if asked.kind == "all" else [asked.kind]:
        started, outcome = time.monotonic(), Outcome()
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TANDEM_CACHE"] = str(Path(folder, "cache"))
            generate(kind_of(name), count=asked.count, number=asked.seed, folder=Path(folder), outcome=outcome)
        ended = ", ".join(f"{number:,} {how}" for how, number in outcome.ended.most_common())
        print(f"{name}: {outcome.ended.total():,} in {time.monotonic() - started:.0f} s: {ended}")
        for place, (example, text) in outcome.defects.items():
            print(f"\n--- {place}, for example by\n{example}\n{text}")
        failed = failed or bool(outcome.defects)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
