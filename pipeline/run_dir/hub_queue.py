"""Queue of what a run has still to publish, as files: an item outlives every process around it.

hub_queue/<item>.json      one item: checkpoint-<step> or model, and why it was not published yet
hub_queue/checkpoint-<n>/  the checkpoint's model, hard-linked: rotation may remove the checkpoint meanwhile
hub_queue/state-<n>/       the whole checkpoint, hard-linked, where hub.strategy is checkpoint
hub_queue/published.jsonl  what was published: item, repository, commit, files
hub_queue/publisher.log    what the publisher said
hub_queue/.lock            held by the process that publishes
"""

import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from pipeline.process import commands
from pipeline.process.commands import command
from pipeline.process.storage import file_lock, new_folder, read_json, remove_file, remove_folder, write_json
from pipeline.run_dir.checkpoints import SEAL, by_step, clean, problems, read_seal, seal, sealed_files, step_of
from pipeline.run_dir.rows import append_row, read_rows
from pipeline.run_dir.run_directory import RunDirectory

# The files of a checkpoint that only a continuation needs; the others are a model that from_pretrained loads.
TRAINING_STATE = ("optimizer*", "scheduler.json", "trainer_state.json", "position*.json", "rng-*", SEAL)
MODEL = "model"


@dataclass(frozen=True, kw_only=True)
class Item:
    """A model to publish. content: hash of the hashes of its files, since one step may be trained twice."""

    name: str
    step: int
    content: str
    # The Hub's newest commit when an upload was begun: the model may stand there although nobody lived to write it
    # down.
    before: str | None = None
    error: str | None = None
    not_before: float = 0.0  # the Hub asked to be left alone until then (time.time())

    def is_valid(self) -> bool:
        """Return whether it is as it was written: its file may be anything."""
        named = isinstance(self.name, str) and (self.name == MODEL or step_of(Path(self.name)) is not None)
        return (
            named
            and type(self.step) is int
            and isinstance(self.content, str)
            and type(self.not_before) in (int, float)
        )


class HubQueue:
    """The items of one run, the newest last. One process publishes, the holder of the lock; the run itself only adds.

    strategy: hub.strategy, whether a newer item supersedes the older ones and whether it brings the state of the
    training.
    """

    def __init__(self, run: RunDirectory, *, strategy: str = "every_save"):
        self.run, self.path = run, run.hub_queue
        self.all, self.with_state = strategy == "all_checkpoints", strategy == "checkpoint"
        self.published, self.log = self.path / "published.jsonl", self.path / "publisher.log"

    @contextmanager
    def hold(self, *, wait_s: float = 0.0) -> Iterator[bool]:
        """Keep other publishers out while the block runs; yields whether nobody else does that to us."""
        self.run.refuse_links(self.path)
        with file_lock(self.path / ".lock", wait_s=wait_s) as held:
            if held:
                clean(self.path)
                self._drop_damaged()
            yield held

    def folder(self, item: Item) -> Path:
        return self.run.model if item.name == MODEL else self.path / item.name

    def state(self, item: Item) -> Path | None:
        """Return the whole checkpoint that the item brings along; of the finished model the newest one."""
        if not self.with_state:
            return None
        if item.name == MODEL:
            return self.run.whole_checkpoint()
        folder = self.path / f"state-{item.step}"
        return folder if folder.exists() else None

    def next(self) -> Item | None:
        """Return the item to publish now: the newest, or of all the oldest."""
        items = self.items()
        return items[0 if self.all else -1] if items else None

    def items(self) -> list[Item]:
        """Oldest first. One that cannot be read, or whose model is gone, is no item."""
        found = []
        for path in self.path.glob("*.json"):
            with suppress(OSError, ValueError, TypeError):
                item = Item(**read_json(path))
                if item.is_valid() and item.name == path.stem:
                    found.append(item)
        return sorted((item for item in found if (self.folder(item) / SEAL).exists()), key=_order)

    def add_model(self, repo_id: str, *, again: bool = False) -> None:
        """Queue the finished model, unless it is queued already or was published; `again`: also when it was."""
        manifest = read_seal(self.run.model)
        item = Item(name=MODEL, step=manifest["step"], content=_content(manifest["files"]))
        queued = (item.name, item.content) in {(other.name, other.content) for other in self.items()}
        if not queued and (again or self._is_new(item, repo_id)):
            self._add(item)

    def add_checkpoints(self, repo_id: str) -> None:
        """Queue the newest checkpoint, which supersedes the older queued ones, or every one; not what was queued or
        published."""
        for folder in by_step(self.run.checkpoints)[0 if self.all else -1 :]:
            with suppress(FileNotFoundError):  # rotated away between two looks: the next look finds a newer one
                manifest = read_seal(folder)
                files = {name: facts for name, facts in manifest["files"].items() if not _is_training_state(name)}
                item = Item(name=folder.name, step=manifest["step"], content=_content(files))
                if self._is_new(item, repo_id):
                    self._link(folder, item, manifest["run"], files)
                    self._add(item)
                    if not self.all:
                        self._remove(other for other in self.items() if _order(other) < _order(item))

    def _save(self, item: Item) -> None:
        write_json(self.path / f"{item.name}.json", asdict(item))

    def note(self, item: Item, **changes: Any) -> None:
        """Change a queued item, as it is on disk now; one that was dropped meanwhile stays dropped."""
        for queued in self.items():
            if queued.name == item.name:
                self._save(replace(queued, **changes))

    def done(self, item: Item, **facts: Any) -> None:
        """Write down that an item was published, and let go of it and of what it supersedes."""
        row = {"item": item.name, "step": item.step, "content": item.content, "time": time.time()}
        append_row(self.published, row | facts)
        self._remove(
            other
            for other in self.items()
            if other.name == item.name or (not self.all and _order(other) < _order(item))
        )

    def drop_after(self, step: int) -> None:
        """Forget what lies beyond the step where the run goes on: it would be published, and keep newer work out."""
        self._remove(item for item in self.items() if item.step > step)

    def _drop_damaged(self) -> None:
        for item in self.items():
            if item.name != MODEL and (found := problems(self.folder(item))):
                print(f"{self.folder(item)}: damaged ({'; '.join(found)}), so it is not published", flush=True)
                self._remove(iter([item]))

    def last_published(self, repo_id: str) -> dict[str, Any] | None:
        rows = [row for row in read_rows(self.published) if row.get("repo_id") == repo_id]
        return rows[-1] if rows else None

    def _add(self, item: Item) -> None:
        # What the Hub asked for one item, it asked for all.
        waits = [queued.not_before for queued in self.items()]
        self._save(replace(item, not_before=max(waits, default=0.0)))

    def _is_new(self, item: Item, repo_id: str) -> bool:
        same = (item.name, item.content)
        published = (
            (row.get("item"), row.get("content")) for row in read_rows(self.published) if row.get("repo_id") == repo_id
        )
        return same not in {(queued.name, queued.content) for queued in self.items()} | set(published)

    def _link(self, checkpoint: Path, item: Item, run: str, files: dict[str, dict[str, Any]]) -> None:
        folder, state = self.folder(item), self.path / f"state-{item.step}"
        for old in (folder, state):  # of another content, or never finished
            if old.exists():
                remove_folder(old)
        with new_folder(folder) as linked:
            link_files(checkpoint, linked, files)
            # The hashes that the checkpoint was written with: what has rotted since is found before it is published.
            seal(linked, written=files, step=item.step, run=run)
        if self.with_state:
            with new_folder(state) as linked:
                link_files(checkpoint, linked, sealed_files(checkpoint))

    def _remove(self, items: Iterator[Item]) -> None:
        for item in list(items):
            remove_file(self.path / f"{item.name}.json")
            if item.name != MODEL:
                for folder in (self.folder(item), self.path / f"state-{item.step}"):
                    if folder.exists():
                        remove_folder(folder)


def _order(item: Item) -> tuple[bool, int]:
    return item.name == MODEL, item.step  # the finished model is newer than every checkpoint


def _is_training_state(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in TRAINING_STATE)


def _content(files: dict[str, dict[str, Any]]) -> str:
    sums = {name: facts["sha256"] for name, facts in files.items()}
    return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()


def link_files(source: Path, target: Path, names: Iterable[str]) -> None:
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source / name, target / name)
        except FileNotFoundError:
            raise
        except OSError:  # a file system without hard links
            shutil.copyfile(source / name, target / name)


# The trainer's side: start the publisher, and at the end of the run wait for it, but not for ever.


class Publishing:
    """Publishing to hub.id beside the run, on the first rank; on other ranks it does nothing. hub: that section of the
    recipe.

    A process and not a thread: uploading takes the interpreter's lock, hashing takes time, and a process can be
    killed.
    """

    def __init__(self, hub: Any, run: RunDirectory, *, start_step: int):
        self.hub, self.run, self.queue = hub, run, HubQueue(run, strategy=hub.strategy)
        self.active = int(os.environ.get("RANK", 0)) == 0
        self.process: subprocess.Popen[bytes] | None = None
        if self.active:
            try:
                self.queue.drop_after(start_step)
            except OSError as error:
                print(f"{self.queue.path}: what lies beyond step {start_step} stays queued: {error}", flush=True)
            if hub.strategy != "end":
                self._start()

    def finish(self) -> None:
        """Publish the finished model; say what was published, or what was not and how to finish it. Never raises."""
        if not self.active:
            return
        try:
            self.queue.add_model(str(self.hub.id))
            if self.queue.items():
                self._wait()
            self._notify()
        except OSError as error:
            print(f"the model was not published: {error}. {self._later()}", flush=True)

    def _start(self) -> None:
        environment = commands.environment(HF_HUB_DISABLE_PROGRESS_BARS="1")  # in a log they are noise
        try:
            self.queue.path.mkdir(parents=True, exist_ok=True)
            with open(self.queue.log, "ab") as log:
                self.process = commands.start(
                    "-m",
                    "pipeline.hub",
                    "beside",
                    self.run.path,
                    "--trainer",
                    str(os.getpid()),
                    log=log,
                    env=environment,
                )
        except OSError as error:
            print(f"nothing is published while the run goes on: {error}. {self._later()}", flush=True)

    def _wait(self) -> None:
        print(f"publishing to {self.hub.id}, for at most {self.hub.wait_at_end_s:.0f} s", flush=True)
        if self.process is None or self.process.poll() is not None:
            self._start()
        if self.process is not None:
            try:
                self.process.wait(timeout=self.hub.wait_at_end_s)
            except subprocess.TimeoutExpired:
                self.process.kill()  # what it was sending becomes no commit, and the queue keeps the item
                self.process.wait()

    def _notify(self) -> None:
        last = self.queue.last_published(str(self.hub.id))
        if last and last["item"] == MODEL:
            self.run.update_manifest(hub={"id": last["repo_id"], "commit": last["commit"], "time": last["time"]})
            print(f"{last['url']}: published, {len(last['files'])} files, downloaded again and equal", flush=True)
        left = [
            f"{item.name} of step {item.step} ({item.error or 'no time was left'})" for item in self.queue.items()[-1:]
        ]
        if left:
            print(f"unpublished: {'; '.join(left)}\n{self._later()}", flush=True)

    def _later(self) -> str:
        return f"Finish with: {command('hub', 'push', self.run.path)}"
