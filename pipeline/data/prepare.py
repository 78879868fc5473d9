"""Preparation that runs ahead of training in a child process, and how the ranks wait for it.

One process calls `start_preparation`; what `description()` gives is broadcast, and the other ranks `attach`.
There are two kinds of locks, which the kernel drops when their holder dies: the preparation's own, by which waiting ranks
see that it lives, and one per sequence, so that two runs never write the same shards.
"""

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from pipeline.artifacts import errors
from pipeline.artifacts.atomic import read_json, remove_file
from pipeline.artifacts.errors import DataError
from pipeline.artifacts.locks import file_lock, is_stand_in, lock
from pipeline.artifacts.retries import retries_in
from pipeline.data.plan import digest, folders_of, make_plan
from pipeline.data.prune import note_user
from pipeline.data.shards import damaged_seals
from pipeline.data.work import Workshop, damaged_shards, next_shard, streams_of
from pipeline.monitor.heartbeat import beat

RETRIES = "retries"  # a file of the preparation's folder
POLL_S = 0.05
LINE_EVERY_S = 10.0
START_GRACE_S = 120.0  # in which a rank that attached believes that the process which prepares is still being started


def start_preparation(
    recipe: Any,
    tokenizer: Any,
    *,
    sources: tuple[list, list],
    from_step: int = 0,
    watchlist: str | Path | None = None,
    run: Path | None = None,
) -> "Preparation":
    """Prepare the recipe's rows in a child process, unless they all are there; returns at once.

    sources: (train, validation) as open_sources gives them. from_step: where training goes on, which decides what is made
    first when data.keep_shards is set. run: the directory for which `--prune` keeps the shards. watchlist: a saved Watchlist for which the training text is searched on the way; shards
    that are sealed already are not read again for it (`prepare_now` does that). Raises what make_plan raises.
    """
    plan = make_plan(recipe, tokenizer, sources=sources, watchlist=watchlist)
    note_user(plan, run)
    discard_damaged(plan)
    if damaged := damaged_shards(plan, streams_of(plan), verify=False):
        print(f"data: {len(damaged)} prepared shards are damaged and made again first", file=sys.stderr, flush=True)
        with locks(plan):
            for _ in Workshop(plan, tokenizer, sources=sources).repair(verify=False):
                pass
    preparation = Preparation(plan)
    if plan["keep_shards"] or next_shard(streams_of(plan)) is not None:
        preparation.start({"plan": plan, "recipe": recipe, "tokenizer": tokenizer, "from_step": from_step})
    return preparation


def prepare_now(
    recipe: Any,
    tokenizer: Any,
    *,
    sources: tuple[list, list],
    verify: bool = False,
    report: Callable | None = None,
    watchlist: str | Path | None = None,
) -> "Preparation":
    """Prepare everything in this process; report(role, source, stream) is called after each shard.

    watchlist: a saved Watchlist for which all the training text is searched, that of sealed shards too.
    """
    plan = make_plan(recipe, tokenizer, sources=sources, watchlist=watchlist)
    note_user(plan, None)
    discard_damaged(plan)
    with locks(plan):
        workshop = Workshop(plan, tokenizer, sources=sources)
        for made in chain(workshop.repair(verify=verify), workshop.prepare(), workshop.look_again()):
            if report is not None:
                report(*made)
    return Preparation(plan)


def discard_damaged(plan: dict) -> None:
    """Delete damaged seals of the plan's shards, said in a line each, so that these shards are made again."""
    for folder in folders_of(plan):
        if not damaged_seals(folder):
            continue  # without the lock: another run may be at work there for hours
        with file_lock(folder / ".lock"):
            for path in damaged_seals(folder):
                remove_file(path)
                print(
                    f"data: {path}: is not as it was written; made again from the source", file=sys.stderr, flush=True
                )


@contextmanager
def locks(plan: dict) -> Iterator[None]:
    """Hold the locks of all sequences of a plan, always taken in the same order."""
    with ExitStack() as stack:
        for folder in folders_of(plan):
            stack.enter_context(file_lock(folder / ".lock"))
        yield


class Preparation:
    """A plan, and the process that carries it out. waited_s: seconds this rank has waited for shards."""

    def __init__(self, plan: dict):
        self.plan, self.waited_s = plan, 0.0
        self.folder = Path(plan["cache_dir"]) / "preparations" / digest(plan)
        self.child: subprocess.Popen | None = None
        self.task: dict | None = None
        self.opened = time.monotonic()

    def description(self) -> dict:
        """What another rank needs to attach; JSON."""
        return self.plan

    @classmethod
    def attach(cls, description: dict) -> "Preparation":
        return cls(description)

    def start(self, task: dict) -> None:
        """Start the child with its task (run_ahead.py); if another one works on this very plan, it is left to it."""
        self.task = task
        self.folder.mkdir(parents=True, exist_ok=True)
        # Waiting ranks hold it for an instant to probe it: hence the second.
        held = lock(self.folder / ".lock", wait_s=1.0)
        if held is None:
            return
        with held:
            remove_file(self.folder / "failure.json")
            remove_file(self.folder / RETRIES)
            paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TOKENIZERS_PARALLELISM": "true"}
            environment.pop("TANDEM_STATUS", None)  # the run's own, in which the first to end has the word
            # The child inherits the lock: it is held without a gap from here until the child ends, however it ends.
            with open(self.folder / "log.txt", "wb") as log:
                self.child = subprocess.Popen(
                    [sys.executable, "-m", "pipeline.data", "--ahead", str(self.folder)],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    pass_fds=[held.fileno()],
                    start_new_session=True,  # Ctrl-C is for the training, which then still gets its last rows.
                )
            assert self.child.stdin is not None
            with self.child.stdin as pipe:  # by pipe: the child runs this very recipe, not one read from a file again
                pickle.dump(task, pipe)

    def is_running(self) -> bool:
        """Whether some process is preparing this plan."""
        if self.child is not None:
            return self.child.poll() is None
        self.folder.mkdir(parents=True, exist_ok=True)
        held = lock(self.folder / ".lock")
        if held is None:
            return True
        held.close()
        # Of a lock that only this machine knows nothing can be said of a process on another one; its run ends with it.
        return is_stand_in(held) and self.task is None and not (self.folder / "failure.json").exists()

    def wait_until(self, there: Callable[[], bool], *, what: str) -> None:
        """Wait until `there()` is true. Raises what the preparing process failed with, or DataError when it is gone."""
        started = said = time.monotonic()
        while not there():
            time.sleep(POLL_S)
            now = time.monotonic()
            if now - said >= LINE_EVERY_S and int(os.environ.get("RANK", 0)) == 0:
                said = now
                print(f"data: waited {now - started:.0f} s for {what}; {self.progress()}", file=sys.stderr, flush=True)
            if self.is_running():
                beat()  # it may fetch a large file for long; this rank does not hang
            elif not there():
                self._go_on_or_raise(what)
        self.waited_s += time.monotonic() - started

    def num_retries(self) -> int:
        """How often the preparing process has read something again since it was started."""
        return retries_in(self.folder / RETRIES)

    def progress(self) -> str:
        """How far each training source is."""
        stream = streams_of(self.plan)["train"]
        return ", ".join(
            f"{about['name']}: {short_count(sequence.rows * self.plan['row_tokens'])} tokens prepared"
            for about, sequence in zip(self.plan["train"]["sequences"], stream.sequences, strict=True)
        )

    def _go_on_or_raise(self, what: str) -> None:
        path = self.folder / "failure.json"
        if path.exists():
            failure = read_json(path)
            raise getattr(errors, failure["class"], DataError)(failure["message"])
        if self.child is None and self.task is not None:
            self.start(self.task)  # It was another run's child, and ended with that run.
            return
        if self.child is None and time.monotonic() - self.opened < START_GRACE_S:
            return
        raise DataError(
            f"{self.folder}: the process that prepares the data ended before {what} was ready; its last words are in log.txt "
            "there. Run the same command again: preparation goes on where it stopped."
        )

    def close(self) -> None:
        """End the child, if there is one; what is sealed stays."""
        if self.child is not None and self.child.poll() is None:
            self.child.terminate()
            self.child.wait()


def short_count(count: float) -> str:
    """The count in the unit that shows it: 950, 12.3K, 1.2M, 10.5B."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= 0.99995 * size:  # 999,960 is 1,000.0K, which is 1.0M
            return f"{count / size:,.1f}{unit}"
    return f"{count:.0f}"
