"""run.mirror: whole checkpoints of a run on a local disk follow it to an object store, and come back to an empty disk.

MIRROR/<run>/checkpoints/checkpoint-<step>/  its files, MANIFEST.json last: a folder without it was never whole
MIRROR/<run>/model/                          the finished model, in the same way
MIRROR/<run>/run_manifest.json, ...          the run's records, sent before their checkpoint; `finished` after the model
MIRROR/<run>/.owner                          the start that sends: every other one stops with LostOwnership

A thread of the first rank sends them, so that training does not wait. What a killed run has not sent, its next start
sends.
"""

import json
import os
import shutil
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.process.commands import yield_to_training
from pipeline.process.errors import DamagedFileError, RecipeError, ServiceError
from pipeline.process.network import as_os_error, is_refused, opened
from pipeline.process.storage import (
    DISK_FULL,
    new_folder,
    parse_json,
    read_json,
    remove_folder,
    write_bytes,
    write_json,
)
from pipeline.recipe.identity import differences
from pipeline.run_dir.checkpoints import SEAL, by_step, problems, read_seal, sealed_files, step_of
from pipeline.run_dir.hub_queue import link_files
from pipeline.run_dir.rows import read_rows
from pipeline.run_dir.run_directory import RunDirectory, find_run

KEPT = 2  # checkpoints in the mirror: the newest, and the one before while that is being sent
LOOK_EVERY_S = 1.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0  # after a failure; it doubles up to the longest
FAILED_FLUSH_S = 30.0  # that a run that failed waits before it says why
FLUSH_S = 480.0  # that the end of a run waits for what was not sent yet; the other ranks wait for it, for SAVING_S


class LostOwnership(Exception):
    """Raised when another start has the run in the store."""


class DamagedError(Exception):
    """Raised when a file from the store is not the one that was sealed."""


class Mirror:
    """A run's folder in a store, which one start at a time writes."""

    def __init__(self, run: RunDirectory, address: str):
        self.run, self.address = run, f"{address.rstrip('/')}/{run.name}"
        self.store, self.root = opened(self.address)
        self.sent: set[str] = set()  # checksum manifests that the store has
        self.queue = run.path / "mirror_queue"
        # tokens: of this folder's starts, by any of which the store may know it: one that takes over may not reach it.
        # went_back: from a start without run.resume auto until the store has nothing beyond this run.
        self.state_file = self.queue / "state.json"

    def state(self) -> dict[str, Any]:
        return read_json(self.state_file) if self.state_file.exists() else {"tokens": [], "went_back": False}

    def take_over(self, *, went_back: bool = False) -> None:
        """Become the owner; the start that had the run until now stops sending."""
        token = uuid.uuid4().hex
        self.queue.mkdir(parents=True, exist_ok=True)
        # First: a start that is killed in between must know its own token.
        before = self.state()
        state = {"tokens": [*before["tokens"], token], "went_back": went_back or before["went_back"]}
        write_json(self.state_file, state)
        now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        owner = {"token": token, "host": socket.gethostname(), "time": now}
        self.store.pipe_file(f"{self.root}/.owner", json.dumps(owner).encode())

    def refuse_if_taken(self) -> None:
        """Raise LostOwnership when another start has the run. A run that nobody has becomes this start's."""
        try:
            owner = parse_json(self.store.cat_file(f"{self.root}/.owner"))
        except (FileNotFoundError, ValueError):  # nobody's, or torn while it was written
            self.take_over()
            return
        if owner.get("token") not in self.state()["tokens"]:
            raise LostOwnership(
                f"{self.address}: a start on {owner.get('host')} took the run over at {owner.get('time')}, so this "
                "one sends nothing more. Stop one of the two; the one that starts last has the mirror."
            )

    def due(self) -> list[Path]:
        """Return the sealed folders that the store should have: the newest checkpoint, and the model of a finished
        run."""
        folders = by_step(self.run.checkpoints)[-1:]
        if "finished" in self.run.read_manifest():
            folders.insert(0, self.run.model)
        return [folder for folder in folders if (folder / SEAL).is_file()]

    def is_behind(self) -> bool:
        """Return whether something whole is here that the store does not have."""
        return any((folder / SEAL).read_text() not in self.sent for folder in self.due())

    def send(self) -> None:
        """Send what is due. Raises OSError when the store does not take it, LostOwnership when another start has it."""
        for folder in self.due():
            manifest = (folder / SEAL).read_text()
            if manifest in self.sent:
                continue
            if not self._has(folder):
                with self._held(folder) as held:
                    self._send_folder(held, folder)
            self.sent.add(manifest)
            if step := step_of(folder):
                self._drop_others(step)

    def _has(self, folder: Path) -> bool:
        """Return whether the store has this folder by its checksum manifest and its sizes."""
        there = self._place(folder)
        try:
            if self.store.cat_file(f"{there}/{SEAL}") != (folder / SEAL).read_bytes():
                return False
            for file, facts in read_seal(folder)["files"].items():
                if self.store.info(f"{there}/{file}")["size"] != facts["bytes"]:
                    return False
        except FileNotFoundError:
            return False
        return True

    def _place(self, path: Path) -> str:
        return f"{self.root}/{path.relative_to(self.run.path).as_posix()}"

    @contextmanager
    def _held(self, folder: Path) -> Iterator[Path]:
        """Yield the folder's files, hard-linked: rotation may remove a checkpoint while it is being sent."""
        held = self.queue / folder.name
        if held.exists():  # of a process that was killed
            remove_folder(held)
        with new_folder(held) as linked:
            link_files(folder, linked, sealed_files(folder))
        try:
            yield held
        finally:
            remove_folder(held)

    def _send_folder(self, held: Path, folder: Path) -> None:
        """Send a sealed folder, its checksum manifest last, and the records: before a checkpoint, after the model."""
        is_model, there = folder == self.run.model, self._place(folder)
        if not is_model:
            self._send_records()
        self.refuse_if_taken()
        with suppress(FileNotFoundError):  # of the same step trained anew: first, since it is no whole one any more
            self.store.rm_file(f"{there}/{SEAL}")
        for file in sorted(sealed_files(held), key=lambda file: file == SEAL):
            self._put(held / file, f"{there}/{file}")
        if is_model:
            self._send_records()

    def _send_records(self) -> None:
        for record in self.run.records():
            if record.is_file():
                self._put(record, self._place(record))

    def _put(self, file: Path, name: str) -> None:
        self.refuse_if_taken()  # for each: a machine may have been suspended since the one before
        with open(file, "rb") as source, self.store.open(name, "wb") as target:
            shutil.copyfileobj(source, target, 2**22)

    def _drop_others(self, newest: int) -> None:
        """Remove checkpoints that are older than KEPT allows, were half sent, or are beyond the newest: the run went
        back."""
        sealed = self.steps()
        kept = [step for step in sealed if step <= newest][-KEPT:]
        for step, folder in self._folders().items():
            if step in kept:
                continue
            self.refuse_if_taken()
            with suppress(FileNotFoundError):
                if step in sealed:
                    self.store.rm_file(f"{folder}/{SEAL}")  # first: what is left is no checkpoint any more
                self.store.rm(folder, recursive=True)
        write_json(self.state_file, {**self.state(), "went_back": False})

    def steps(self) -> list[int]:
        """Return the steps of the sealed checkpoints in the store, in order. Raises OSError when it does not
        answer."""
        return sorted(step for step, folder in self._folders().items() if self.store.exists(f"{folder}/{SEAL}"))

    def _folders(self) -> dict[int, str]:
        """Return the checkpoints in the store by their steps, half sent ones too."""
        try:
            folders = self.store.ls(f"{self.root}/checkpoints", detail=False)
        except FileNotFoundError:
            return {}
        steps = {step_of(Path(folder)): folder for folder in folders}
        return {step: folder for step, folder in steps.items() if step}

    def restore(self) -> None:
        """Fetch the newest whole checkpoint that is further than what is whole here, with its records."""
        here = [step_of(folder) or 0 for folder in by_step(self.run.checkpoints) if not problems(folder)]
        newest_here = max(here, default=0)
        steps = self.steps()
        if self.state()["went_back"]:
            steps = [step for step in steps if step <= newest_here]
        for step in reversed(steps):
            if step <= newest_here:
                return
            name = f"checkpoints/checkpoint-{step}"
            reached = max((row.get("step", 0) for row in read_rows(self.run.metrics)), default=0)
            try:
                # Records here that come as far are further than those that were sent with the checkpoint.
                self.fetch(name, before=partial(self.fetch_records, anew=reached < step))
            except DamagedError as error:
                print(f"{self.address}/{name}: is damaged ({error}). The one before it is tried.", flush=True)
                continue
            print(f"{self.run.path}: checkpoint-{step} was restored from {self.address}", flush=True)
            return

    def fetch(self, name: str, *, before: Callable[[], None] = lambda: None) -> None:
        """Fetch a sealed folder of the store into the run, and call `before` when it is whole, before it appears.

        Raises DamagedError, and then none appears.
        """
        target = self.run.path / name
        with new_folder(target) as folder:
            try:
                self._get(f"{name}/{SEAL}", folder / SEAL)
                for file in read_seal(folder)["files"]:
                    if not (folder / file).resolve().is_relative_to(folder.resolve()):
                        raise DamagedError(f"{SEAL} names a file outside the folder, {file}")
                    self._get(f"{name}/{file}", folder / file)
            except (FileNotFoundError, DamagedFileError):
                pass  # problems() says which
            if found := problems(folder):
                raise DamagedError("; ".join(found))
            before()
            if target.exists():  # a model of an end that was not reached, a damaged checkpoint
                remove_folder(target)

    def fetch_records(self, *, anew: bool = False) -> None:
        """Fetch the records, and of a finished run the model first: without it the run repeats its end.

        The records of a run that has trained here stay, unless anew: another machine went further.
        """
        if self.run.has_trained() and not anew:
            return
        contents = {}
        for record in self.run.records():
            with suppress(FileNotFoundError):
                contents[record] = self.store.cat_file(self._place(record))
        try:
            manifest = parse_json(contents.get(self.run.manifest, b"{}"))
        except ValueError:
            if self.run.has_trained():
                return  # the records here are whole
            manifest = {}  # read_manifest() says it
        self._refuse_another_run(manifest)
        if "finished" in manifest:
            try:
                self.fetch("model")
            except DamagedError as error:
                print(f"{self.address}/model: is damaged ({error}). The run repeats its end.", flush=True)
                del manifest["finished"]
                contents[self.run.manifest] = json.dumps(manifest, indent=2).encode()
        for record in sorted(contents, key=lambda record: record == self.run.metrics):  # by which has_trained() judges
            write_bytes(record, contents[record])

    def _refuse_another_run(self, manifest: dict[str, Any]) -> None:
        if not self.run.has_trained():
            return
        begun = self.run.read_manifest().get("must_match")
        if not begun:
            return
        found = differences(begun, manifest.get("must_match", {}))
        if found:
            raise RecipeError(
                f"{self.address}: holds another run of this name, which differs from {self.run.path} in keys that "
                "cannot change:\n  " + "\n  ".join(found) + "\nGive one of the two another run.name or run.mirror."
            )

    def refuse_what_cannot_be_written(self, where: str) -> None:
        """Raise RecipeError where the bucket does not exist, takes nothing from this user or gives back other bytes;
        one that is away may come back."""
        trial, sent = f"{self.root}/.trial-{uuid.uuid4().hex[:8]}", b"by run.mirror before the training\n"
        try:
            with as_os_error():
                self.store.pipe_file(trial, sent)
                try:
                    back = self.store.cat_file(trial)
                finally:
                    self.store.rm_file(trial)
        except OSError as error:
            if is_refused(error):
                raise RecipeError(
                    f"{where}: {self.address} cannot be written ({error}). Check the bucket's name and region, this "
                    "machine's clock, and that the credentials may list, read, write and delete."
                ) from error
            return
        if back != sent:
            raise RecipeError(
                f"{where}: {self.address} gives back other bytes than it was sent, so no checkpoint would come back "
                "whole. Set AWS_REQUEST_CHECKSUM_CALCULATION=when_required, or name another store."
            )

    def _get(self, name: str, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        self.store.get_file(f"{self.root}/{name}", str(target))


def restore_from_mirror(address: str, run: RunDirectory, *, resume: str | int, where: str) -> None:
    """Fetch what is further than this run is here, or the finished run, under run.resume auto. where: the place of
    run.mirror.

    Raises RecipeError for a store that can never be written, ServiceError when it does not say what it has and nothing
    is here: to begin anew would repeat the run and write over its state.
    """
    if "finished" in run.read_manifest():
        return
    mirror = Mirror(run, address)
    mirror.refuse_what_cannot_be_written(where)
    try:
        with as_os_error():
            if resume == "auto":
                mirror.restore()
            mirror.take_over(went_back=resume != "auto")
    except OSError as error:
        if error.errno in DISK_FULL:
            raise
        here = by_step(run.checkpoints)
        if not here or problems(here[-1]):
            raise ServiceError(
                f"{where}: {mirror.address} does not answer ({error}), and this run has no whole newest checkpoint "
                "here. Run the same command again, or begin anew with run.resume=never."
            ) from error
        print(f"{mirror.address}: does not answer ({error}), so the run continues from its own checkpoint", flush=True)


def restore_base(address: str, run: RunDirectory, *, start: str | None, where: str) -> bool:
    """Fetch the finished run of the same folder that model.start_from names and that is not here. Return whether it
    came.

    A run that has begun needs the base that it began from, whatever `latest:` means by now. Raises ServiceError when
    the store does not answer.
    """
    start = run.read_manifest().get("must_match", {}).get("model.start_from") or start
    home = run.path.parent
    if start is None or Path(start).exists() or find_run(start, str(home)):
        return False
    folder = Path(start).parent if Path(start).name == run.model.name else Path(start)
    if len(folder.parts) > 1 and folder.parent.resolve() != home.resolve():
        return False  # no run of this folder: a Hub id, a model elsewhere
    mirror = Mirror(RunDirectory(home / folder.name), address)
    try:
        with as_os_error():
            if not mirror.store.exists(f"{mirror.root}/{mirror.run.model.name}/{SEAL}"):
                return False
            mirror.fetch_records()
    except OSError as error:
        if error.errno in DISK_FULL:
            raise
        raise ServiceError(
            f"{where}: {mirror.address} does not answer ({error}), and model.start_from, {start}, is not here. Run the "
            "same command again, or put that run back."
        ) from error
    if not mirror.run.model.is_dir():  # damaged, and said
        return False
    print(f"{mirror.run.path}: was restored from {mirror.address}, as model.start_from is it", flush=True)
    return True


class CheckpointUploader:
    """Sends what a run saves, in a thread of the first rank, until flush()."""

    def __init__(self, run: RunDirectory, address: str):
        self.mirror = Mirror(run, address)
        self.ending = threading.Event()
        self.thread = threading.Thread(target=self._send_until_the_end, name="mirror", daemon=True)
        self.mirror.queue.mkdir(exist_ok=True)  # for the folder that holds what is being sent
        self.thread.start()

    def _send_until_the_end(self) -> None:
        if sys.platform == "linux":  # elsewhere it would slow down the training's own threads
            yield_to_training()
        pause, gives_up_at = FIRST_PAUSE_S, float("inf")
        while time.monotonic() < gives_up_at:
            ends = self.ending.wait(LOOK_EVERY_S)
            if ends:
                gives_up_at = min(gives_up_at, time.monotonic() + FLUSH_S)
            try:
                with as_os_error():
                    self.mirror.send()
            except LostOwnership as error:
                print(error, flush=True)
                return
            except Exception as error:  # whatever a store's client raises: the next look tries again
                print(f"{self.mirror.address}: not sent: {error or type(error).__name__}", flush=True)
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
                continue
            pause = FIRST_PAUSE_S
            if ends:
                return

    def flush(self, seconds: float = FLUSH_S) -> None:
        """Wait until what was saved is in the store, and say so when it is not; only the first call does."""
        if self.ending.is_set():  # a signal's end was waited for, and its exception is no second reason to
            return
        self.ending.set()
        self.thread.join(seconds)
        if self.thread.is_alive():
            print(f"{self.mirror.address}: does not have what was saved last. The next start sends it.", flush=True)


def start_uploader(address: str, run: RunDirectory) -> Callable[..., None] | None:
    """Send the run's checkpoints from now on, and return what waits for the last of them; None on other ranks than the
    first."""
    if int(os.environ.get("RANK", 0)) != 0:
        return None
    return CheckpointUploader(run, address).flush
