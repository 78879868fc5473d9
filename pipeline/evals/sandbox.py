"""Executing programs that a model wrote, each in a process of its own behind walls.

A program reads Python's library and nothing else, writes nothing, starts no process or thread, signals and reaches
nobody, and has bounded time, memory and a line of output. What it sees of the machine: names and sizes of files by
stat(2) where only Landlock hides files, the kernel's version, the clock.

Passing means that the program ran to its end without an exception: leaving early, killing itself or changing Python's
own names is no pass. Not covered: a program made to cheat. It shares its interpreter with the check it is to pass, so
it can return objects that equal everything, define the names that the check uses, or look for this sandbox's pipes and
answer for itself. It wins a wrong score by that, and no access.
"""

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

from pipeline.process.errors import RecipeError

PACKAGE_ROOT = Path(__file__).parents[2]
START = "import sys; sys.path.append(sys.argv[1]); from pipeline.evals.sandbox_child import main; main()"
# All that the program sees of an environment. A fixed hash seed: sets are walked in one order, a score can be
# repeated.
ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "TZ": "UTC"}
INHERITED = ("LD_LIBRARY_PATH",)  # without it the Python of many a cluster does not start
GRACE_S = 60.0  # for starting and ending the child on a busy machine
TIMEOUT_S, MEMORY_BYTES = 5.0, 512 << 20


@dataclass(frozen=True)
class Isolation:
    """The walls to put up, and why others are missing here."""

    mechanisms: tuple[str, ...]  # of namespaces, landlock, seccomp
    missing: list[str] = field(default_factory=list)

    @property
    def safe(self) -> bool:
        """Return whether they suffice: seccomp against everything but reading, and one of the others against that."""
        return "seccomp" in self.mechanisms and len(self.mechanisms) > 1

    @property
    def name(self) -> str:
        """Return the name for the record of results."""
        return ("" if self.safe else "unsafe: ") + ("+".join(self.mechanisms) or "child process only")


@dataclass(frozen=True)
class Execution:
    """reason: passed, or `wrong|time|memory|forbidden: what happened`; seconds: wall time of the program alone."""

    passed: bool
    reason: str
    seconds: float


class NotIsolated(Exception):
    """A wall could not be put up; the program was not executed."""


def run_program(
    program: str, *, timeout_s: float = TIMEOUT_S, memory_bytes: int = MEMORY_BYTES, isolation: Isolation
) -> Execution:
    """Execute the source as `__main__` with Python's library, without standard input and output.

    timeout_s: wall seconds of the program; its CPU time is limited to a little more. memory_bytes: of address space,
    the interpreter's about 30 MB included. The program's failures are in the result; NotIsolated is raised where a
    wall cannot be put up, RuntimeError or subprocess.TimeoutExpired where the sandbox itself does not start or end.
    """
    request = {
        "mechanisms": isolation.mechanisms,
        "timeout_s": timeout_s,
        "memory_bytes": memory_bytes,
        "parent": os.getpid(),
    }
    # -S: no site-packages and none of the user's files; -P: no module from the current folder.
    command = [sys.executable, "-s", "-S", "-P", "-c", START, str(PACKAGE_ROOT)]
    message = json.dumps(request).encode() + b"\n" + program.encode("utf-8", "surrogatepass")
    environment = {**{name: os.environ[name] for name in INHERITED if name in os.environ}, **ENVIRONMENT}
    # A program that can write gets a folder for it.
    scratch = nullcontext("/") if isolation.safe else tempfile.TemporaryDirectory(prefix="tandem-program-")
    with scratch as folder:
        process = subprocess.run(
            command, input=message, capture_output=True, env=environment, cwd=folder, timeout=timeout_s + GRACE_S
        )
    if process.returncode != 0:
        raise RuntimeError(
            f"the sandbox ended with status {process.returncode}:\n{process.stderr.decode(errors='replace')}"
        )
    answer = json.loads(process.stdout)
    if "failed" in answer:
        raise NotIsolated(answer["failed"])
    return Execution(answer["reason"] == "passed", answer["reason"], answer["seconds"])


def run_programs(
    programs: list[str], *, workers: int, timeout_s: float = TIMEOUT_S, isolation: Isolation
) -> list[Execution]:
    """Return one result per program, in their order; `workers` of them run at a time, each within run_program's
    limits."""
    run = partial(run_program, timeout_s=timeout_s, isolation=isolation)
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(run, programs))


# Which walls this machine grants, found by putting them up, and whether a program may be executed behind them.

MECHANISMS = ("namespaces", "landlock", "seccomp")
# What must be refused to every program; a machine on which one of these works is not taken for a safe one.
TRIALS = """
import os, socket, subprocess, threading
import collections, functools, hashlib, itertools, math, random, re, string, typing

def refused(act, *arguments):
    try:
        act(*arguments)
    except (OSError, RuntimeError):
        return
    raise AssertionError(f"{{act.__name__}} is not refused")

refused(open, {path!r})
refused(open, {path!r}, "a")
refused(open, "/dev/shm/tandem-trial", "w")
refused(os.listdir, {folder!r})
refused(os.unlink, {path!r})
refused(open, "/proc/self/environ")
refused(open, "/proc/{parent}/environ")
refused(os.kill, {parent}, 0)
refused(socket.socket)
refused(socket.socket, socket.AF_UNIX)
refused(os.fork)
refused(threading.Thread(target=print).start)
refused(subprocess.run, ["true"])
assert set(os.environ) <= {environment!r}, "the environment is seen"
"""


@cache
def available_isolation() -> Isolation:
    """Return the walls that are here, each tried in a process of its own, and all together by acts that they must
    refuse."""
    isolation = granted_isolation()
    if not isolation.safe:
        return isolation
    with tempfile.NamedTemporaryFile() as file:
        trials = TRIALS.format(
            path=file.name,
            folder=os.path.dirname(file.name),
            parent=os.getpid(),
            environment={*ENVIRONMENT, *INHERITED, "LC_CTYPE"},  # the last one Python sets itself
        )
        tried = run_program(trials, timeout_s=30.0, isolation=isolation)
    if tried.passed:
        return isolation
    return Isolation((), [*isolation.missing, f"{isolation.name} do not hold: {tried.reason}"])


def granted_isolation() -> Isolation:
    """Return the walls that this machine lets a process put up, whether or not they hold."""
    if sys.platform != "linux":
        return Isolation((), [f"namespaces, Landlock and seccomp are of Linux, and this is {sys.platform}"])
    granted, missing = [], []
    for mechanism in MECHANISMS:
        try:
            run_program("", isolation=Isolation((mechanism,)))
            granted.append(mechanism)
        except NotIsolated as error:
            missing.append(f"{mechanism}: {error}")
    return Isolation(tuple(granted), missing)


def choose_isolation(unsafe_exec: bool, *, where: str) -> Isolation:
    """Return the best isolation to be had. RecipeError where it is not safe, unless the user takes that upon
    themselves.

    where: names the request in the message, as Recipe.where does.
    """
    isolation = available_isolation()
    if not isolation.safe and not unsafe_exec:
        raise RecipeError(
            f"{where}: the programs that the model writes cannot be locked in here ({'; '.join(isolation.missing)}), "
            "and are not executed. Run it where Linux grants seccomp and either Landlock or user namespaces, or write "
            "evals.unsafe_exec: true to execute them with all the rights that you have."
        )
    return isolation
