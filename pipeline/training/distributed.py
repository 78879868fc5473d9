"""Distributed training: collectives over ranks, errors that all of them raise, and random states."""

import os
import random
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import torch
import torch.distributed as dist

from pipeline.process.errors import CannotWriteError, HangError, TandemError
from pipeline.process.storage import remove_file
from pipeline.run_dir.failures import has_reported_error
from pipeline.run_dir.run_directory import RunDirectory

# Ranks that agree: values shared, votes, and failures of one rank that all must know.

Decision = TypeVar("Decision")


def num_ranks() -> int:
    """Return the number of processes that train together; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def on_rank_0(decide: Callable[[], Decision]) -> Decision:
    """Call `decide` on rank 0 only and give every rank its result; its TandemError or OSError is raised on every rank.

    Without it the other ranks would wait in their next collective for a rank that has left.
    """
    if num_ranks() == 1:
        return decide()
    outcome: list = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome = [decide(), None]
        except (TandemError, OSError) as error:
            outcome = [None, error]
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        outcome[1].of_all_ranks = True
        raise outcome[1]
    return outcome[0]


def on_every_rank(act: Callable[[], Decision]) -> list[Decision]:
    """Call `act` on every rank and give every rank all results, in rank order; a TandemError or OSError of one is
    raised on all."""
    result, error = None, None
    try:
        result = act()
    except (TandemError, OSError) as raised:
        error = raised
    outcomes = from_every_rank((result, error))
    if (found := next((e for _, e in outcomes if e is not None), None)) is not None:
        found.of_all_ranks = True
        raise found
    return [value for value, _ in outcomes]


def from_every_rank(value: Any) -> list:
    """Return what every rank has to say, in rank order; every rank must call this."""
    if num_ranks() == 1:
        return [value]
    values: list = [None] * num_ranks()
    dist.all_gather_object(values, value)
    return values


def numbers_of_every_rank(numbers: dict[str, float], device: torch.device) -> list[dict[str, float]]:
    """Return the numbers of every rank, which all have the same names, by one gather on the device."""
    if num_ranks() == 1:
        return [numbers]
    own_1N = torch.tensor([list(numbers.values())], dtype=torch.float64, device=device)
    every_RN = own_1N.new_empty(num_ranks(), len(numbers))
    dist.all_gather_into_tensor(every_RN, own_1N)
    return [dict(zip(numbers, rank, strict=True)) for rank in every_RN.tolist()]


def store_of_ranks() -> Any:
    """Return where a rank leaves word for the others without waiting for them; None for one rank alone."""
    if num_ranks() == 1:
        return None
    store: Any = dist.PrefixStore("tandem", dist.distributed_c10d._get_default_store())
    # A connection of its own: the other one is held for as long as somebody waits for a key on it.
    return store.clone()


# Several machines of one run share its directory and its prepared data: proven before anything is written there.


def refuse_unshared(folder: Path, *, key: str = "run.directory") -> None:
    """Raise CannotWriteError on every rank when a machine of this run sees another folder under that path, or cannot
    write there.

    key: what sets the folder. A file that rank 0 makes must be there for all, and each must be able to make one beside
    it. On a single machine there is nothing to prove.
    """
    if num_ranks() in (1, int(os.environ.get("LOCAL_WORLD_SIZE", 1))):
        return
    mark = folder / f".shared-{from_every_rank(secrets.token_hex(8))[0]}"
    first = dist.get_rank() == 0
    refusal = _refusal(mark, keep=True) if first else ""
    dist.barrier()
    there = not first and _is_there(mark)
    refusal = refusal or (_refusal(mark.with_name(f"{mark.name}-{dist.get_rank()}")) if there else "")
    seen = from_every_rank((socket.gethostname(), first or there, refusal))
    if first and not refusal:
        remove_file(mark)
    hosts = {host: reason for host, _, reason in seen if reason}
    blind = sorted({host for host, sees, _ in seen if not sees})
    if hosts:
        listed = "; ".join(f"{host} ({reason})" for host, reason in sorted(hosts.items()))
        raise CannotWriteError(
            f"{folder}: cannot be written by {listed}, and every machine of a run writes there. Set {key} to a folder "
            "that all of them can write."
        )
    if blind:
        raise CannotWriteError(
            f"{folder}: {', '.join(blind)} cannot see what {seen[0][0]} writes there, and all machines of a run share "
            f"it. Set {key} to a folder that all of them share."
        )


def _refusal(file: Path, *, keep: bool = False) -> str:
    """Return why the file cannot be made here; empty when it can. Raises nothing: the other ranks wait for this one's
    word."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        if not keep:
            remove_file(file)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _is_there(mark: Path) -> bool:
    """Return whether the file exists now: network file systems remember for a while that it did not, until its folder
    is listed."""
    try:
        return mark.name in os.listdir(mark.parent)
    except OSError:  # absent, or not for this user: the other ranks wait for this one's word
        return False


# The processes of this run: who they are, which are gone, and what it means when one is.

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
    """Return a process's state and start time, which tells it from a later one of the same number. Not psutil's
    create_time on Linux: that moves when the system's clock is set, and a rank would look lost."""
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
        """Return the ranks whose process is gone, as far as this machine can see."""
        own = self.processes[self.own]
        return [
            n
            for n, process in enumerate(self.processes)
            if n != self.own and process.machine == own.machine and process.is_gone()
        ]

    def on_other_hosts(self) -> bool:
        return any(process.machine != self.processes[self.own].machine for process in self.processes)

    def found_gone(self) -> list[int]:
        """Return the same after an error in a collective, which comes a moment before."""
        ends = time.monotonic() + (SETTLE_S if len(self.processes) > 1 else 0)
        while not (gone := self.gone()) and time.monotonic() < ends:
            time.sleep(0.05)
        return gone

    def lost(self, gone: list[int], run: RunDirectory, *, step: int) -> HangError:
        """Return what the ranks that are left say. A rank that could tell its own error has written it by now."""
        names = " and ".join(f"rank {n} (process {self.processes[n].pid} on {self.processes[n].host})" for n in gone)
        if has_reported_error(run):
            return HangError(f"ended with {names}, whose error is reported above.")
        return HangError(
            f"{run.path}: {names} was lost at step {step}: it ended without a word, killed from outside or for lack "
            "of memory. The last checkpoint is whole. Run the same command again to go on from it."
        )


# The random state of a process, as tensors: python, numpy, torch and the accelerator.


def get_rng_state() -> dict[str, torch.Tensor]:
    """Return the state of every generator that training may draw from; safetensors holds all of it."""
    version, python, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()
    state = {
        "python": torch.tensor([version, *python], dtype=torch.int64),
        "python_gauss": torch.tensor([float("nan") if gauss is None else gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "numpy_position": torch.tensor([position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.accelerator.is_available():
        state["accelerator"] = torch.get_device_module().get_rng_state()
    return state


def set_rng_state(state: dict[str, torch.Tensor]) -> None:
    """Put back what get_rng_state gave."""
    version, *python = state["python"].tolist()
    gauss = state["python_gauss"].item()
    random.setstate((version, tuple(python), None if np.isnan(gauss) else gauss))
    position, has_gauss = state["numpy_position"].tolist()
    keys = state["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, position, has_gauss, state["numpy_gauss"].item()))
    torch.set_rng_state(state["torch"])
    if "accelerator" in state and torch.accelerator.is_available():
        torch.get_device_module().set_rng_state(state["accelerator"])


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Preserve the random state around evaluations and samples: training draws the same numbers as if they had not
    happened."""
    state = get_rng_state()
    try:
        yield
    finally:
        set_rng_state(state)
