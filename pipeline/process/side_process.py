"""Processes that work beside a training: how each is started, what it inherits and when it ends.

The preparation of data and its workers, the writer of checkpoints, the sampler of GPUs, the publisher, the mirror and Trackio's
writer are such processes. Each

- has a session of its own: Ctrl-C at the terminal and a signal for the training are the training's;
- does not hold the training's standard output, for whose end a reader of it would wait;
- finds this package wherever the run was started, and is no rank of the run;
- ends when its input is closed, when its work is done, or with its parent (`end_with`).
"""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

from pipeline.process.storage import close_leases

ROOT = Path(__file__).parents[2]
OF_A_RANK = ("TANDEM_STATUS", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
ONE_THREAD = dict.fromkeys(("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def python_path() -> str:
    """Return the PYTHONPATH under which another interpreter finds this package, and what this one was given."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def environment(**changes: str) -> dict[str, str]:
    """Return the environment of a process that is no rank of the run and whose status is not the run's."""
    kept = {name: value for name, value in os.environ.items() if name not in OF_A_RANK}
    return kept | {"PYTHONPATH": python_path()} | changes


def start(*arguments: str | Path, log: IO | None = None, **popen: Any) -> subprocess.Popen:
    """Start the interpreter with these arguments, and return the process.

    log: the file that takes what it prints; it then has no input. Without one, input and errors are pipes and the rest is
    dropped. popen: what is to be otherwise, as subprocess.Popen takes it.
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
        close_leases()
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def yield_to_training() -> None:
    """Lower the priority of this process, on Linux of this thread: training goes first, and when it waits, the processor is free anyway."""
    if hasattr(os, "nice"):
        os.nice(5)  # A quarter of a shared core. 19 were a seventieth, for the same work: a push took minutes.
