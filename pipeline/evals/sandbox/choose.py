"""Which walls this machine grants, found by putting them up, and whether a program may be executed behind them."""

import os
import sys
import tempfile
from functools import cache

from pipeline.artifacts.errors import RecipeError
from pipeline.evals.sandbox.run import ENVIRONMENT, INHERITED, Isolation, NotIsolated, run_program

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
    """The walls that stand here, each tried in a process of its own, and all together by acts that they must refuse."""
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
    """The walls that this machine lets a process put up, whether or not they hold."""
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
    """The best isolation to be had. RecipeError where it is not safe, unless the user takes that upon themselves.

    where: names the request in the message, as Recipe.where does.
    """
    isolation = available_isolation()
    if not isolation.safe and not unsafe_exec:
        raise RecipeError(
            f"{where}: the programs that the model writes cannot be locked in here ({'; '.join(isolation.missing)}), and are not executed. "
            "Run it where Linux grants seccomp and either Landlock or user namespaces, or write evals.unsafe_exec: true to execute them with all the rights that you have."
        )
    return isolation
