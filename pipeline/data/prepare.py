"""Preparation that runs ahead of training in a child process, and how the ranks wait for it.

One process of a node calls `start_preparation`; what `description()` gives is broadcast, and the other ranks `attach`.
The child holds two kinds of locks, which the kernel drops when it dies: the preparation's own, by which waiting ranks see
that it lives, and one per sequence, so that two runs never write the same shards.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

from pipeline.artifacts import errors
from pipeline.artifacts.atomic import read_json, write_json, write_text
from pipeline.artifacts.cache import file_lock
from pipeline.artifacts.errors import DataError, TandemError
from pipeline.data.plan import digest, make_plan, sequence_folder
from pipeline.data.work import ROLES, Workshop, damaged_shards, next_shard, streams_of

POLL_S = 0.05
LINE_EVERY_S = 10.0
START_GRACE_S = 120.0  # until a child that was started must have taken its lock


def start_preparation(recipe: Any, tokenizer: Any, *, sources: tuple[list, list]) -> "Preparation":
    """Prepare the recipe's rows in a child process, unless they all are there; returns at once.

    sources: (train, validation) as open_sources gives them. Raises what make_plan raises.
    """
    plan = make_plan(recipe, tokenizer, sources=sources)
    preparation = Preparation(plan)
    if damaged := damaged_shards(streams_of(plan), verify=False):
        print(f"data: {len(damaged)} prepared shards are damaged and made again first", file=sys.stderr, flush=True)
        with locks(plan):
            for _ in Workshop(plan, tokenizer, sources=sources).repair(verify=False):
                pass
    if next_shard(streams_of(plan)) is not None:
        preparation.start(recipe, tokenizer)
    return preparation


def prepare_now(
    recipe: Any, tokenizer: Any, *, sources: tuple[list, list], verify: bool = False, report=None
) -> "Preparation":
    """Prepare everything in this process; report(role, source, stream) is called after each shard."""
    plan = make_plan(recipe, tokenizer, sources=sources)
    with locks(plan):
        workshop = Workshop(plan, tokenizer, sources=sources)
        for made in chain(workshop.repair(verify=verify), workshop.prepare()):
            if report is not None:
                report(*made)
    return Preparation(plan)


def locks(plan: dict) -> ExitStack:
    """The locks of all sequences of a plan, always taken in the same order."""
    stack = ExitStack()
    folders = {sequence_folder(plan, s) for role in ROLES if plan[role] for s in plan[role]["sequences"]}
    for folder in sorted(folders):
        folder.mkdir(parents=True, exist_ok=True)
        stack.enter_context(file_lock(folder / ".lock"))
    return stack


class Preparation:
    """A plan, and the process that carries it out. waited_s: seconds this rank has waited for shards."""

    def __init__(self, plan: dict):
        self.plan, self.waited_s = plan, 0.0
        self.folder = Path(plan["cache_dir"]) / "preparations" / digest(plan)
        self.child: subprocess.Popen | None = None
        self.opened = time.monotonic()

    def description(self) -> dict:
        """What another rank needs to attach; JSON."""
        return self.plan

    @classmethod
    def attach(cls, description: dict) -> "Preparation":
        return cls(description)

    def start(self, recipe: Any, tokenizer: Any) -> None:
        """Start the child; if one already prepares this very plan, it is left to it."""
        from pipeline.recipe import dump_recipe

        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / ".lock", "a+") as lock:
            # Waiting ranks take the lock for an instant to see whether it is held: try for longer than that.
            if not any(_take(lock) or time.sleep(POLL_S) for _ in range(20)):
                return
            for name in ("failure.json", "log.txt"):
                (self.folder / name).unlink(missing_ok=True)
            write_text(self.folder / "recipe.yaml", dump_recipe(recipe))
            tokenizer.save_pretrained(self.folder / "tokenizer")
            about = {"plan": self.plan, "recipe_path": recipe.path, "stage": recipe.stage, "lock_fd": lock.fileno()}
            write_json(self.folder / "plan.json", about)
            root = str(Path(__file__).parents[2])
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]),
            }
            environment["TOKENIZERS_PARALLELISM"] = "true"
            # The child inherits the lock: it is held without a gap from here until the child ends, however it ends.
            with open(self.folder / "log.txt", "ab") as log:
                self.child = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "pipeline.data",
                        str(self.folder / "recipe.yaml"),
                        "--ahead",
                        str(self.folder),
                    ],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[lock.fileno()],
                    start_new_session=True,  # Ctrl-C is for the training, which then still gets its last rows.
                )

    def is_running(self) -> bool:
        """Whether some process is preparing this plan."""
        if self.child is not None:
            return self.child.poll() is None
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / ".lock", "a+") as lock:
            return not _take(lock)

    def wait_until(self, there: Callable[[], bool], *, what: str) -> None:
        """Wait until `there()` is true. Raises what the preparing process failed with, or DataError when it is gone."""
        started = said = time.monotonic()
        while not there():
            time.sleep(POLL_S)
            now = time.monotonic()
            if now - said >= LINE_EVERY_S and int(os.environ.get("RANK", 0)) == 0:
                said = now
                print(f"data: waited {now - started:.0f} s for {what}; {self.progress()}", file=sys.stderr, flush=True)
            if not self.is_running() and not there():
                self._raise_failure(what)
        self.waited_s += time.monotonic() - started

    def progress(self) -> str:
        return ", ".join(
            f"{about['name']}: {sequence.rows * self.plan['row_tokens'] / 1e6:.1f}M tokens prepared"
            for role, stream in streams_of(self.plan).items()
            for about, sequence in zip(self.plan[role]["sequences"], stream.sequences, strict=True)
            if role == "train"
        )

    def _raise_failure(self, what: str) -> None:
        path = self.folder / "failure.json"
        if path.exists():
            failure = read_json(path)
            raise getattr(errors, failure["class"], DataError)(failure["message"])
        if self.child is None and time.monotonic() - self.opened < START_GRACE_S:
            return  # another process may be about to start it
        raise DataError(
            f"{self.folder}: the process that prepares the data has ended before {what} was ready. Its last words are in "
            f"{self.folder / 'log.txt'}. Run the same command again: preparation goes on where it stopped."
        )

    def close(self) -> None:
        """End the child, if there is one; what is sealed stays."""
        if self.child is not None and self.child.poll() is None:
            self.child.terminate()
            self.child.wait()


def _take(lock) -> bool:
    """Take the lock of an open file without waiting."""
    import fcntl

    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def run_ahead(folder: Path) -> int:
    """The child's work: carry out the plan in `folder`; a failure is left there as failure.json."""
    about = read_json(folder / "plan.json")
    parent = os.getppid()
    try:
        _carry_out(folder, about, alive=lambda: os.getppid() == parent)
    except TandemError as error:
        write_json(folder / "failure.json", {"class": type(error).__name__, "message": str(error)})
        return error.status
    return 0


def _carry_out(folder: Path, about: dict, *, alive: Callable[[], bool]) -> None:
    from transformers import AutoTokenizer

    from pipeline.recipe import read_recipe
    from pipeline.sources.open import open_sources

    recipe = read_recipe([str(folder / "recipe.yaml")], stage=about["stage"])
    recipe.path = about["recipe_path"]  # relative files and module:attr formats are looked up beside the user's recipe
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    plan = about["plan"]
    sources = open_sources(recipe, kind=plan["kind"])
    found = make_plan(recipe, tokenizer, sources=sources)
    if digest(found) != digest(plan):
        wrong = [role for role in ROLES if json.dumps(found[role]) != json.dumps(plan[role])]
        raise DataError(
            f"{folder}: the preparing process sees other sources or another tokenizer than the training ({', '.join(wrong) or 'settings'} "
            "differ), so its rows would not be the run's. If files changed just now, run the same command again."
        )
    with locks(plan):
        for _ in Workshop(plan, tokenizer, sources=sources).prepare(alive):
            pass
