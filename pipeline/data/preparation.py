"""The process that prepares shards ahead of the training that reads them, and how the ranks wait for it."""

import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.data.references import add_reference
from pipeline.data.row_plan import KEY_LENGTH, damaged_shards, discard_damaged, next_shard, streams_of
from pipeline.metrics import digest
from pipeline.monitor.heartbeat import beat
from pipeline.process import commands, errors
from pipeline.process.errors import DataError, HangError, Preempted
from pipeline.process.network import retries_in
from pipeline.process.progress import short_count, waiting
from pipeline.process.storage import lock, machine, read_json, remove_file, require_writable

RETRIES = "retries"  # a file of the preparation's folder
POLL_S = 0.05
START_GRACE_S = 120.0  # in which a rank that attached believes that the preparing process is being started, also again


def start_preparation(
    plan: dict, tokenizer: Any, *, sources: tuple[list, list], run: Path | None = None
) -> "Preparation":
    """Prepare a plan's rows in a child process, unless they all are there; returns at once, or when damaged shards
    are made again.

    sources: (train, validation), opened and verified; the child reads them as they are. run: the directory for which
    `--prune` keeps the shards.
    """
    add_reference(plan, run)
    discard_damaged(plan)
    damaged = damaged_shards(streams_of(plan), verify=False)
    preparation = Preparation(plan)
    if damaged or next_shard(streams_of(plan)) is not None:
        preparation.start({"plan": plan, "sources": sources, "tokenizer": tokenizer})
    if damaged:
        print(f"data: {len(damaged)} prepared shards are damaged and made again first", file=sys.stderr, flush=True)
        preparation.wait_until(lambda: not damaged_shards(streams_of(plan), verify=False), what="what is made again")
    return preparation


class Preparation:
    """A plan, and the process that prepares it. waited_s: seconds this rank has waited for shards."""

    def __init__(self, plan: dict):
        self.plan, self.waited_s = plan, 0.0
        self.folder = Path(plan["cache_dir"]) / "preparations" / digest(plan, KEY_LENGTH)
        self.child: subprocess.Popen | None = None
        self.task: dict | None = None
        self.seen = time.monotonic()  # when the process that prepares was last seen to run
        self.killed = False  # whether it was killed before, and started again
        self.elsewhere = False  # whether the process that prepares is one of another machine

    def description(self) -> dict:
        """Return what another rank needs to attach; JSON."""
        return {"plan": self.plan, "machine": machine(self.plan["cache_dir"])}

    @classmethod
    def attach(cls, description: dict) -> "Preparation":
        attached = cls(description["plan"])
        attached.elsewhere = machine(attached.plan["cache_dir"]) != description["machine"]
        return attached

    def start(self, task: dict) -> None:
        """Start the child with its task; if another one works on this very plan, it is left to it."""
        self.task = task
        require_writable(self.folder, lacks="some rows of this recipe are")
        self.folder.mkdir(parents=True, exist_ok=True)
        # Waiting ranks hold it for an instant to probe it: hence the second.
        held = lock(self.folder / ".lock", wait_s=1.0)
        if held is None:
            return
        try:
            remove_file(self.folder / "failure.json")
            remove_file(self.folder / RETRIES)
            with open(self.folder / "log.txt", "wb") as log:
                self.child = commands.start(
                    "-m",
                    "pipeline.data",
                    "--ahead",
                    self.folder,
                    log=log,
                    stdin=subprocess.PIPE,
                    env=commands.environment(TOKENIZERS_PARALLELISM="true"),
                )
            assert self.child.stdin is not None
            with suppress(BrokenPipeError), self.child.stdin as pipe:  # that it ended is seen by who waits for rows
                pickle.dump(task, pipe)
        finally:
            held.release()  # the child takes it

    def is_running(self) -> bool:
        """Return whether some process is preparing this plan."""
        if self.child is not None:
            return self.child.poll() is None
        self.folder.mkdir(parents=True, exist_ok=True)
        held = lock(self.folder / ".lock")
        if held is None:
            return True
        held.release()
        # That no lock is seen here says nothing of a process on another machine; its run ends with it.
        unseen = self.elsewhere and self.task is None
        return unseen and not (self.folder / "failure.json").exists()

    def wait_until(self, there: Callable[[], bool], *, what: str) -> None:
        """Wait until `there()` is true. Raises what the preparing process failed with; HangError when it was killed
        twice."""
        if there():
            return
        started = time.monotonic()
        with waiting(f"data: preparing {what}", detail=self.progress, after_s=1.0):
            while not there():
                time.sleep(POLL_S)
                if self.is_running():
                    self.seen = time.monotonic()
                    beat()  # it may fetch a large file for long; this rank does not hang
                elif not there():
                    self._go_on_or_raise(what)
        self.waited_s += time.monotonic() - started

    def num_retries(self) -> int:
        """Return how often the preparing process has read something again since it was started."""
        return retries_in(self.folder / RETRIES)

    def progress(self) -> str:
        """Return how far each training source is."""
        stream = streams_of(self.plan)["train"]
        return ", ".join(
            f"{about['name']}: {short_count(dataset.rows * self.plan['row_tokens'])} tokens are ready"
            for about, dataset in zip(self.plan["train"]["sequences"], stream.datasets, strict=True)
        )

    def _go_on_or_raise(self, what: str) -> None:
        # 1. It failed, and left why.
        path = self.folder / "failure.json"
        if path.exists():
            failure = read_json(path)
            raise getattr(errors, failure["class"], DataError)(failure["message"])
        # 2. It was another run's child, and ended with that run.
        if self.child is None and self.task is not None:
            self.start(self.task)
            return
        # 3. Of another rank's child nothing is known but its lock: it may be about to start.
        if self.child is None and time.monotonic() - self.seen < START_GRACE_S:
            return
        # 4. It ended since another process had the lock.
        if self.child is not None and self.child.returncode == 0:
            ended, self.child = self.child, None
            if self.is_running():  # another run took up this very plan
                return
            self.child = ended
        # 5. It was killed: started again, once. A second time, or for a status of its own, the run ends.
        status = self.child.returncode if self.child is not None else 0
        ended_by_itself = status > 0 and status != Preempted.status  # 0 and 75: by SIGTERM
        if self.child is not None and not ended_by_itself and not self.killed:
            print(
                f"data: the process that prepares the data was killed (status {status}), often for memory; it is "
                "started again",
                file=sys.stderr,
                flush=True,
            )
            self.child, self.killed = None, True
            return
        kind = DataError if ended_by_itself else HangError
        raise kind(
            f"{self.folder}: the process that prepares the data ended before it had made {what}; its last words are "
            "in log.txt there. Run the same command again: preparation goes on where it stopped."
        )

    def close(self) -> None:
        """End the child, if there is one; what is sealed stays."""
        if self.child is not None and self.child.poll() is None:
            self.child.terminate()
            self.child.wait()
