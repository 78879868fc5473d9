"""The processes of this run: who they are, which are gone, and what it means when one is."""

import os
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from pipeline.artifacts.errors import HangError
from pipeline.artifacts.failures import has_been_told
from pipeline.artifacts.run_directory import RunDirectory
from pipeline.training.agreement import from_every_rank

SETTLE_S = 3.0  # a connection breaks a moment before its process is seen to be gone


@dataclass(frozen=True)
class Process:
    machine: tuple[str, str]
    host: str
    pid: int
    began: str

    @classmethod
    def this(cls) -> "Process":
        # Containers may share a host name and not their process numbers.
        namespace = os.readlink("/proc/self/ns/pid") if sys.platform == "linux" else ""
        host, pid = socket.gethostname(), os.getpid()
        return cls((host, namespace), host, pid, _state_and_beginning(pid)[1])

    def is_gone(self) -> bool:
        try:
            state, began = _state_and_beginning(self.pid)
        except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            return True
        return began != self.began or state in ("Z", psutil.STATUS_ZOMBIE)


def _state_and_beginning(pid: int) -> tuple[str, str]:
    """When a process began tells it from another one of its number. Not psutil's create_time on Linux: that moves when the
    system's clock is set, and a rank would look lost."""
    if sys.platform == "linux":
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # proc(5): the name may hold spaces
        return fields[0], fields[19]
    process = psutil.Process(pid)
    return process.status(), str(process.create_time())


class Ranks:
    """All ranks of this start; every rank must make one."""

    def __init__(self) -> None:
        self.processes: list[Process] = from_every_rank(Process.this())
        self.own = next(n for n, process in enumerate(self.processes) if process == Process.this())

    def gone(self) -> list[int]:
        """Ranks whose process is gone, as far as this machine can see."""
        own = self.processes[self.own]
        return [
            n
            for n, process in enumerate(self.processes)
            if n != self.own and process.machine == own.machine and process.is_gone()
        ]

    def found_gone(self) -> list[int]:
        """The same after an error in a collective, which comes a moment before."""
        ends = time.monotonic() + (SETTLE_S if len(self.processes) > 1 else 0)
        while not (gone := self.gone()) and time.monotonic() < ends:
            time.sleep(0.05)
        return gone

    def lost(self, gone: list[int], run: RunDirectory, *, step: int) -> HangError:
        """What the ranks that are left say. A rank that could tell its own error has written it by now."""
        names = " and ".join(f"rank {n} (process {self.processes[n].pid} on {self.processes[n].host})" for n in gone)
        if has_been_told(run):
            return HangError(f"ended with {names}, whose error is told above.")
        return HangError(
            f"{run.path}: {names} was lost at step {step}: it ended without a word, killed from outside or for lack of memory. "
            "The last checkpoint is whole. Run the same command again to go on from it."
        )
