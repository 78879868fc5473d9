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
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

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
    # The Hub's newest commit when an upload was begun: the model may stand there although nobody lived to write it down.
    before: str | None = None
    error: str | None = None
    not_before: float = 0.0  # the Hub asked to be left alone until then (time.time())

    def is_valid(self) -> bool:
        """Return whether it is as it was written: its file may be anything."""
        named = isinstance(self.name, str) and (self.name == MODEL or step_of(Path(self.name)) is not None)
        return (
            named and type(self.step) is int and isinstance(self.content, str) and type(self.not_before) in (int, float)
        )


class HubQueue:
    """The items of one run, the newest last. One process publishes, the holder of the lock; the run itself only adds.

    strategy: hub.strategy, whether a newer item supersedes the older ones and whether it brings the state of the training.
    """

    def __init__(self, run: RunDirectory, *, strategy: str = "every_save"):
        self.run, self.path = run, run.path / "hub_queue"
        self.all, self.with_state = strategy == "all_checkpoints", strategy == "checkpoint"
        self.published, self.log = self.path / "published.jsonl", self.path / "publisher.log"

    @contextmanager
    def hold(self, *, wait_s: float = 0.0) -> Iterator[bool]:
        """Keep other publishers out while the block runs; yields whether nobody else does that to us."""
        self.run.refuse_links(self.path)
        deadline = time.monotonic() + wait_s
        while True:
            with file_lock(self.path / ".lock", blocking=False) as held:
                if held or time.monotonic() >= deadline:
                    if held:
                        clean(self.path)
                        self._drop_damaged()
                    yield held
                    return
            time.sleep(0.2)

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
        """Queue the newest checkpoint, which supersedes the older queued ones, or every one; not what was queued or published."""
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
