"""The processes of this run: which of them are gone, and the error when one is."""

import os
import socket
import sys
import time

import psutil

from pipeline.process.errors import HangError
from pipeline.run_dir.failures import has_reported_error
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.training.distributed import from_every_rank

SETTLE_S = 3.0  # a connection breaks a moment before its process is seen to be gone


class Ranks:
    """All ranks of this start; every rank must make one."""

    def __init__(self) -> None:
        # Containers may share a host name and not their process numbers.
        namespace = os.readlink("/proc/self/ns/pid") if sys.platform == "linux" else ""
        machine = (socket.gethostname(), namespace)
        own = (machine, os.getpid())
        self.all: list[tuple[tuple[str, str], int]] = from_every_rank(own)
        self.own = self.all.index(own)
        self.on_other_hosts = any(of_rank != machine for of_rank, _ in self.all)
        # Of the other ranks on this machine; psutil tells a process from a later one of the same number.
        self.processes: dict[int, psutil.Process | None] = {}
        for rank, (of_rank, pid) in enumerate(self.all):
            if rank != self.own and of_rank == machine:
                try:
                    self.processes[rank] = psutil.Process(pid)
                except psutil.NoSuchProcess:
                    self.processes[rank] = None

    def gone(self) -> list[int]:
        """Return the ranks whose process is gone, as far as this machine can see."""
        return [rank for rank, process in self.processes.items() if _is_gone(process)]

    def found_gone(self) -> list[int]:
        """Return the same after an error in a collective, which comes a moment before."""
        ends = time.monotonic() + (SETTLE_S if len(self.all) > 1 else 0)
        while not (gone := self.gone()) and time.monotonic() < ends:
            time.sleep(0.05)
        return gone

    def lost(self, gone: list[int], run: RunDirectory, *, step: int) -> HangError:
        """Return the error of the ranks that are left. A rank that could report its own error has written it by now."""
        names = " and ".join(f"rank {n} (process {self.all[n][1]} on {self.all[n][0][0]})" for n in gone)
        if has_reported_error(run):
            return HangError(f"ended with {names}, whose error is reported above.")
        return HangError(
            f"{run.path}: {names} was lost at step {step}: it ended without a word, killed from outside or for lack "
            "of memory. Run the same command again to continue from the last checkpoint, which is whole."
        )


def _is_gone(process: psutil.Process | None) -> bool:
    try:
        return process is None or not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
