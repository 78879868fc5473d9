"""Execute programs that a model wrote, each in a process of its own that the kernel locks in (Landlock, seccomp).

A program reads Python's library and nothing else, writes nothing, starts no process or thread, signals and reaches
nobody, and has bounded time, memory and a line of output. What it sees of the machine: names and sizes of files by
stat(2), the kernel's version, the clock.

It passes when it ends without an exception: leaving early or killing itself is no pass. Not covered: a program made to
cheat. It shares its interpreter with the check that it should pass, so it can return objects that equal everything,
change Python's own names, or write the answer itself. It wins a wrong score by that, and no access.
"""

import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.process.errors import RecipeError

PACKAGE_ROOT = Path(__file__).parents[2]
START = "import sys; sys.path.append(sys.argv[1]); from pipeline.contrib.sandbox_child import main; main()"
# All that the program sees of an environment. A fixed hash seed: sets are walked in one order, so scores repeat.
ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "TZ": "UTC"}
INHERITED = ("LD_LIBRARY_PATH",)  # without it the Python of many a cluster does not start
TIMEOUT_S, MEMORY_BYTES = 5.0, 512 << 20
MOST_BYTES = 4096  # of an answer


@dataclass(frozen=True)
class Isolation:
    """Locks around a program. safe: the kernel grants Landlock and seccomp, and they hold; missing: why it does not."""

    safe: bool
    missing: str = ""

    @property
    def name(self) -> str:
        """Return the name for the record of results."""
        return "landlock+seccomp" if self.safe else "unsafe: child process only"


@dataclass(frozen=True)
class Execution:
    """reason: passed, or `wrong|time|memory|forbidden: what happened`; seconds: wall time of the program alone."""

    passed: bool
    reason: str
    seconds: float


class NotIsolated(Exception):
    """The kernel refused a lock; the program was not executed."""


def run_program(
    program: str, *, timeout_s: float = TIMEOUT_S, memory_bytes: int = MEMORY_BYTES, isolation: Isolation
) -> Execution:
    """Execute the source as `__main__` with Python's library, without standard input and output.

    timeout_s: wall seconds of the program; its CPU time is limited to a little more. memory_bytes: of address space,
    the interpreter's about 30 MB included. Raises NotIsolated where the process cannot be locked in.
    """
    request = {"cpu_s": math.ceil(timeout_s) + 1, "memory_bytes": memory_bytes, "safe": isolation.safe}
    # -S: no site-packages and none of the user's files; -P: no module from the current folder.
    command = [sys.executable, "-s", "-S", "-P", "-c", START, str(PACKAGE_ROOT)]
    environment = dict(ENVIRONMENT)
    for name in INHERITED:
        if name in os.environ:
            environment[name] = os.environ[name]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
    # A program that can write gets a folder for it.
    scratch = nullcontext("/") if isolation.safe else tempfile.TemporaryDirectory(prefix="tandem-program-")
    with (
        scratch as folder,
        subprocess.Popen(command, env=environment, cwd=folder, start_new_session=True, **pipes) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with process.stdin:
                process.stdin.write(json.dumps(request).encode() + b"\n" + program.encode("utf-8", "replace"))
            ready = process.stdout.readline().decode(errors="replace").strip()
            if ready != "ready":
                raise NotIsolated(ready or "the child process ended before the program")
            began = time.monotonic()
            reason = _outcome(process, timeout_s)
            seconds = time.monotonic() - began
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return Execution(reason == "passed", reason, seconds)


def _outcome(process: Any, timeout_s: float) -> str:
    """Return the answer of the child process, or how it ended without one."""
    until = time.monotonic() + timeout_s
    answered, _, _ = select.select([process.stdout], [], [], timeout_s)
    answer = os.read(process.stdout.fileno(), MOST_BYTES) if answered else b""
    if answer:
        line = answer.partition(b"\n")[0].decode(errors="replace")[:300]
        return "".join([letter if letter.isprintable() else " " for letter in line])  # no commands to a terminal
    try:
        status = process.wait(max(until - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        return f"time: more than {timeout_s:g} s"
    if status >= 0:
        return f"wrong: it left before its end (exit status {status})"
    if status == -signal.SIGKILL:
        return "memory: the kernel killed it"
    return f"wrong: it crashed ({signal.Signals(-status).name})"


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
"""


@cache
def available_isolation() -> Isolation:
    """Return whether programs can be locked in here, tried by acts that must be refused."""
    if sys.platform != "linux":
        return Isolation(False, f"Landlock and seccomp are of Linux, and this is {sys.platform}")
    with tempfile.NamedTemporaryFile() as file:
        trials = TRIALS.format(path=file.name, folder=os.path.dirname(file.name), parent=os.getpid())
        try:
            tried = run_program(trials, timeout_s=30.0, isolation=Isolation(True))
        except NotIsolated as error:
            return Isolation(False, str(error))
    if not tried.passed:
        return Isolation(False, f"Landlock and seccomp do not hold: {tried.reason}")
    return Isolation(True)


def choose_isolation(unsafe_exec: bool, *, where: str) -> Isolation:
    """Return the isolation of this machine. RecipeError where programs cannot be locked in, unless unsafe_exec.

    where: names the request in the message, as Recipe.where does.
    """
    isolation = available_isolation()
    if not isolation.safe and not unsafe_exec:
        raise RecipeError(
            f"{where}: programs that the model writes cannot be locked in here ({isolation.missing}), and are not "
            "executed. Use Linux with Landlock and seccomp, or run them with your rights: evals.unsafe_exec: true."
        )
    return isolation
