"""What a run has still to publish, as files: it outlives every process around it.

hub_queue/checkpoint-<n>/  the newest checkpoint, hard-linked: rotation may remove it meanwhile
hub_queue/published.jsonl  what was published: item, step, hash, repository, commit, files, time
hub_queue/publisher.log    what the publisher printed
hub_queue/.lock            held by the process that publishes
"""

import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from pipeline.process import commands
from pipeline.process.commands import command
from pipeline.process.storage import file_lock, new_folder, remove_folder
from pipeline.run_dir.checkpoints import SEAL, by_step, clean, read_seal, sealed_files, step_of
from pipeline.run_dir.rows import append_row, read_rows
from pipeline.run_dir.run_directory import RunDirectory

# The files of a checkpoint that only a continuation needs; the others are a model that from_pretrained loads.
TRAINING_STATE = ("optimizer*", "scheduler.json", "trainer_state.json", "position*.json", "rng-*", SEAL)
MODEL = "model"


@dataclass(frozen=True, kw_only=True)
class Item:
    """A sealed folder to publish. content: hash of the hashes of its files, since one step may be trained twice."""

    name: str
    step: int
    content: str
    folder: Path


class HubQueue:
    """What waits to be published of one run. One process publishes, the holder of the lock."""

    def __init__(self, run: RunDirectory):
        self.run, self.path = run, run.hub_queue
        self.published, self.log = self.path / "published.jsonl", self.path / "publisher.log"

    @contextmanager
    def hold(self, *, wait_s: float = 0.0) -> Iterator[bool]:
        """Keep other publishers out while the block runs; yields whether none of them holds the lock."""
        with file_lock(self.path / ".lock", wait_s=wait_s) as held:
            if held:
                clean(self.path)
            yield held

    def model(self) -> Item:
        """Return the finished model. Raises FileNotFoundError before the run has finished."""
        return _item(self.run.model, name=MODEL)

    def checkpoint(self) -> Item | None:
        """Return the newest checkpoint, linked in the queue in place of an older one; None without one."""
        folders = by_step(self.run.checkpoints)
        if not folders:
            return None
        newest = folders[-1]
        item, kept = _item(newest, name=newest.name), self.path / newest.name
        if kept.exists() and _item(kept, name=kept.name).content != item.content:
            remove_folder(kept)  # of a step that was trained again
        if not kept.exists():
            with new_folder(kept) as linked:
                link_files(newest, linked, sealed_files(newest))
        # Only now the older one: what waits is never nothing.
        for older in by_step(self.path):
            if older != kept:
                remove_folder(older)
        return _item(kept, name=kept.name)

    def is_published(self, item: Item, repo_id: str) -> bool:
        done = [(row["item"], row["content"]) for row in self._rows_of(repo_id)]
        return (item.name, item.content) in done

    def done(self, item: Item, **facts: Any) -> None:
        """Write down that an item was published, and remove what was linked for it."""
        row = {"item": item.name, "step": item.step, "content": item.content, "time": time.time()}
        append_row(self.published, row | facts)
        self.drop_after(-1)

    def drop_after(self, step: int) -> None:
        """Forget the linked checkpoint if it is beyond the step at which the run continues."""
        for folder in by_step(self.path):
            if (step_of(folder) or 0) > step:
                remove_folder(folder)

    def last_published(self, repo_id: str) -> dict[str, Any] | None:
        return next(reversed(self._rows_of(repo_id)), None)

    def _rows_of(self, repo_id: str) -> list[dict[str, Any]]:
        return [row for row in read_rows(self.published) if row.get("repo_id") == repo_id]


def _item(folder: Path, *, name: str) -> Item:
    manifest = read_seal(folder)
    sums = {name: facts["sha256"] for name, facts in manifest["files"].items()}
    content = hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()
    return Item(name=name, step=manifest["step"], content=content, folder=folder)


def is_training_state(name: str) -> bool:
    """Return whether only a continuation of the run needs the file of a checkpoint."""
    return any(fnmatch(name, pattern) for pattern in TRAINING_STATE)


def link_files(source: Path, target: Path, names: Iterable[str]) -> None:
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source / name, target / name)
        except FileNotFoundError:
            raise
        except OSError:  # a file system without hard links
            shutil.copyfile(source / name, target / name)


class Publishing:
    """Publishing to hub.id by other processes, from the first rank; on other ranks it does nothing.

    hub: that section of the recipe. A process and not a thread: uploading takes the interpreter's lock, hashing takes
    time, and a process can be killed.
    """

    def __init__(self, hub: Any, run: RunDirectory, *, start_step: int):
        self.hub, self.run, self.queue = hub, run, HubQueue(run)
        self.is_active = int(os.environ.get("RANK", 0)) == 0
        self.process: subprocess.Popen[bytes] | None = None
        if not self.is_active:
            return
        try:
            self.queue.drop_after(start_step)
            if hub.strategy == "checkpoint":
                self.process = self._start("beside", self.run.path, "--trainer", str(os.getpid()))
        except OSError as error:
            print(f"nothing is published while the run trains: {error}. {self._later()}", flush=True)

    def finish(self) -> None:
        """Publish the finished model, and print what was published, or how to finish it. Never raises."""
        if not self.is_active:
            return
        if self.process is not None:
            self.process.kill()  # what it was sending becomes no commit
            self.process.wait()
        print(f"publishing to {self.hub.id}, for at most {self.hub.wait_at_end_s:.0f} s", flush=True)
        try:
            model = self.queue.model()
            process = self._start("push", self.run.path)
            try:
                process.wait(timeout=self.hub.wait_at_end_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if self.queue.is_published(model, str(self.hub.id)):
                last = self.queue.last_published(str(self.hub.id)) or {}
                print(f"{last['url']}: published, {len(last['files'])} files, downloaded again and equal", flush=True)
                return
            # A killed process (returncode below 0) had no time to say why.
            lines = self.queue.log.read_text(errors="replace").strip().splitlines()
            reason = lines[-1] if process.returncode > 0 and lines else "no time was left"
            print(f"unpublished: model of step {model.step} ({reason})\n{self._later()}", flush=True)
        except OSError as error:
            print(f"the model was not published: {error}. {self._later()}", flush=True)

    def _start(self, *arguments: str | Path) -> subprocess.Popen[bytes]:
        environment = commands.environment(HF_HUB_DISABLE_PROGRESS_BARS="1")  # in a log they are noise
        self.queue.path.mkdir(parents=True, exist_ok=True)
        with open(self.queue.log, "ab") as log:
            return commands.start("-m", "pipeline.hub", *arguments, log=log, env=environment)

    def _later(self) -> str:
        return f"Finish with: {command('hub', 'push', self.run.path)}"
