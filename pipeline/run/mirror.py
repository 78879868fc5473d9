"""run.mirror: whole checkpoints of a run on a local disk follow it to an object store, and come back to an empty disk.

MIRROR/<run>/checkpoints/checkpoint-<step>/  its files, MANIFEST.json last: a folder without it was never whole
MIRROR/<run>/model/                          the finished model, in the same way
MIRROR/<run>/run_manifest.json, ...          the run's records, sent before their checkpoint and, as they say
`finished`, after the model MIRROR/<run>/.owner                          the start that took the run over last: the
process of any other one sends nothing more

A process beside the run sends them, so that training waits for nothing: python -m pipeline.run.mirror RUN ADDRESS
"""

import atexit
import hashlib
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.process import commands
from pipeline.process.errors import DamagedFileError, RecipeError, ServiceError, TandemError
from pipeline.process.network import as_os_error, is_refused, opened
from pipeline.process.storage import (
    DISK_FULL,
    file_lock,
    new_folder,
    parse_json,
    remove_folder,
    sha256_file,
    write_bytes,
)
from pipeline.recipe import Recipe
from pipeline.recipe.identity import differences
from pipeline.run_dir.checkpoints import SEAL, by_step, problems, read_seal, sealed_files, step_of
from pipeline.run_dir.hub_queue import link_files
from pipeline.run_dir.rows import read_rows
from pipeline.run_dir.run_directory import RunDirectory, find_run

KEPT = 2  # checkpoints in the mirror: the newest, and the one before while that is being sent
LOOK_EVERY_S = 1.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0  # after a failure; it doubles up to the longest
DRAIN_S = 480.0  # that the end of a run waits for what was not sent yet; the other ranks wait for it, for SAVING_S
TAKEN_OVER = 3  # the status of a process that sends no more, since another start has the run


class Mirror:
    """A run's folder in a store."""

    def __init__(self, run: RunDirectory, address: str):
        self.run, self.address = run, f"{address.rstrip('/')}/{run.name}"
        self.store, self.root = opened(self.address)
        self.queue = run.path / "mirror_queue"
        self.waiting = self.queue / "training_waits"  # while the end of a run waits for what is left
        self.tokens = self.queue / "owner"  # by which this folder is known in the store, one a start
        # The owner's token that a start saw in the store, until the start owns it.
        self.takes_over = self.queue / "takes_over"
        # From a start without run.resume auto until the store has nothing beyond this run.
        self.went_back = self.queue / "went_back"

    # ---- whose run it is ----

    def owner(self) -> dict[str, Any] | None:
        """Return token, host and time of the start that took the run over last; None in a store that knows of none."""
        try:
            return parse_json(self.store.cat_file(f"{self.root}/.owner"))
        except FileNotFoundError:
            return None
        except ValueError:  # written by nobody that we know
            return {}

    def is_own(self, owner: dict[str, Any] | None) -> bool:
        known = self.tokens.read_text().split() if self.tokens.exists() else []
        return token_of(owner) in known

    def take_over(self) -> None:
        """Become the owner. A new token for every start: a copy of this disk, on another machine, knows the old ones
        alone."""
        owner = {"token": uuid.uuid4().hex, "host": socket.gethostname()}
        owner["time"] = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        with open(self.tokens, "a") as file:  # first: a start that is killed in between must know its own
            file.write(f"\n{owner['token']}")  # a full disk may have cut the one before
        self.store.pipe_file(f"{self.root}/.owner", json.dumps(owner).encode())

    def refuse_if_taken(self) -> None:
        """Raise TakenOverError when another start has the run. One that nobody has becomes this one's."""
        owner = self.owner()
        if owner is None:
            self.take_over()
        elif not self.is_own(owner):
            raise TakenOverError(
                f"{self.address}: was taken over by a start on {owner.get('host')} at {owner.get('time')}, so this "
                "run sends nothing more: two would replace each other's checkpoints. Stop one of the two; the one "
                "that starts last has the mirror."
            )

    # ---- what is sent ----

    def begin(self) -> None:
        """Take the run over where this start is to do it and none has since it looked, and see what the store has of
        what is due."""
        if self.takes_over.exists():
            if token_of(self.owner()) == self.takes_over.read_text():
                self.take_over()
            self.takes_over.unlink(missing_ok=True)
            self.refuse_if_taken()
        self.compare()

    def compare(self) -> None:
        """Mark what the store has as it lies here, by its seal and its sizes, and nothing else."""
        marks = {self._mark(folder) for folder in self._due() if self._has(folder)}
        for mark in marks:
            mark.touch()
        for mark in set(self.queue.glob("sent-*")) - marks:
            mark.unlink()

    def _has(self, folder: Path) -> bool:
        there = f"{self.root}/{folder.relative_to(self.run.path).as_posix()}"
        try:
            if self.store.cat_file(f"{there}/{SEAL}") != (folder / SEAL).read_bytes():
                return False
            files = read_seal(folder)["files"].items()
            return all(self.store.info(f"{there}/{file}")["size"] == facts["bytes"] for file, facts in files)
        except FileNotFoundError:
            return False

    def is_behind(self) -> bool:
        """Return whether something whole lies here that has not been sent."""
        return any(not self._mark(folder).exists() for folder in self._due())

    def send(self) -> None:
        """Send what is due, the newest checkpoint alone of several. Raises OSError when the store does not take it."""
        for folder in self._due():
            if self._mark(folder).exists():
                continue
            with self._held(folder) as held:
                if folder != self.run.model:
                    self._put_records()
                self._put_folder(held, folder.relative_to(self.run.path).as_posix())
                if folder == self.run.model:
                    self._put_records()
                self._mark(held).touch()
            if step := step_of(folder):
                self._drop_others(step)

    def _due(self) -> list[Path]:
        finished = "finished" in self.run.read_manifest()  # not before: the records say so then
        folders = [*([self.run.model] if finished else []), *by_step(self.run.checkpoints)[-1:]]
        return [folder for folder in folders if (folder / SEAL).is_file()]

    def _mark(self, folder: Path) -> Path:
        # One step may be trained twice, and run.mirror may name another store later.
        store = hashlib.sha256(self.address.encode()).hexdigest()
        return self.queue / f"sent-{folder.name}-{sha256_file(folder / SEAL)[:12]}-{store[:12]}"

    @contextmanager
    def _held(self, folder: Path) -> Iterator[Path]:
        """Yield the folder's files, hard-linked: rotation may remove a checkpoint while it is being sent."""
        for left in self.queue.iterdir():
            if left.is_dir():  # of a process that was killed: it would keep from the disk what rotation frees
                remove_folder(left)
        held = self.queue / folder.name
        with new_folder(held) as linked:
            link_files(folder, linked, sealed_files(folder))
        try:
            yield held
        finally:
            remove_folder(held)

    def _put_records(self) -> None:
        for record in self.run.records():
            if record.is_file():
                self._put(record, record.relative_to(self.run.path).as_posix())

    def _put_folder(self, folder: Path, name: str) -> None:
        """Send a sealed folder, its seal last. One that stands there over other files goes first: the step was trained
        anew."""
        seal = f"{self.root}/{name}/{SEAL}"
        self.refuse_if_taken()
        if self.store.exists(seal) and self.store.cat_file(seal) != (folder / SEAL).read_bytes():
            self.store.rm_file(seal)
        for file in sorted(sealed_files(folder), key=lambda file: file == SEAL):
            self._put(folder / file, f"{name}/{file}")

    def _put(self, file: Path, name: str) -> None:
        self.refuse_if_taken()  # for each: a machine may have stood still since the one before
        with open(file, "rb") as source, self.store.open(f"{self.root}/{name}", "wb") as target:
            shutil.copyfileobj(source, target, 2**22)

    def _drop_others(self, newest: int) -> None:
        """Remove checkpoints that are older than KEPT allows, were half sent, or lie beyond the newest: the run went
        back."""
        sealed = self.steps()
        steps = [step for step in sealed if step <= newest][-KEPT:]
        for step, folder in self._folders().items():
            if step not in steps:
                self.refuse_if_taken()
                if step in sealed:
                    with suppress(FileNotFoundError):
                        self.store.rm_file(f"{folder}/{SEAL}")  # first: what is left is no checkpoint any more
                with suppress(FileNotFoundError):  # the server has it no more
                    self.store.rm(folder, recursive=True)
        self.went_back.unlink(missing_ok=True)

    # ---- what comes back ----

    def restore(self) -> None:
        """Fetch the newest whole checkpoint that goes further than what lies here whole.

        A run that went back (run.resume) leaves what lies beyond there until that is dropped. Raises OSError when the
        store does not answer.
        """
        here, own = by_step(self.run.checkpoints), self.is_own(self.owner())
        newest = (step_of(here[-1]) if here else 0) if self.went_back.exists() else math.inf
        for step in reversed(self.steps()):
            if step > (newest or 0):
                continue
            if any((step_of(folder) or 0) >= step and not problems(folder) for folder in here):
                return
            name = f"checkpoints/checkpoint-{step}"
            # Records of ours that come as far go further than those that were sent with the checkpoint.
            reached = max((row.get("step", 0) for row in read_rows(self.run.metrics)), default=0)
            try:
                self.fetch(name, before=partial(self.fetch_records, anew=not own or reached < step))
            except DamagedError as error:
                print(f"{self.address}/{name}: is damaged ({error}). The one before it is tried.", flush=True)
                continue
            print(f"{self.run.path}: checkpoint-{step} was restored from {self.address}", flush=True)
            return

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
        return {step: folder for folder in folders if (step := step_of(Path(folder)))}

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
        self.queue.mkdir(exist_ok=True)
        self._mark(target).touch()  # the store has it

    def fetch_records(self, *, anew: bool = False) -> None:
        """Fetch the records, and of a finished run the model first: without it the run repeats its end.

        The records of a run that has trained here stay, since they go further; not `anew`, when another machine went
        on.
        """
        if self.run.has_trained() and not anew:
            return
        names = {
            record: f"{self.root}/{record.relative_to(self.run.path).as_posix()}" for record in self.run.records()
        }
        contents = {record: self.store.cat_file(name) for record, name in names.items() if self.store.exists(name)}
        try:
            manifest = parse_json(contents.get(self.run.manifest, b"{}"))
        except ValueError:
            if self.run.has_trained():
                return  # what lies here is whole
            manifest = {}  # read_manifest() says it
        begun = self.run.read_manifest().get("must_match") if self.run.has_trained() else None
        if begun and (found := differences(begun, manifest.get("must_match", {}))):
            raise RecipeError(
                f"{self.address}: holds another run of this name, which goes further and differs from {self.run.path} "
                "in keys that cannot change:\n  "
                + "\n  ".join(found)
                + "\nGive one of the two another run.name, or another run.mirror."
            )
        if "finished" in manifest:
            try:
                self.fetch("model")
            except DamagedError as error:
                print(f"{self.address}/model: is damaged ({error}). The run repeats its end.", flush=True)
                del manifest["finished"]
                contents[self.run.manifest] = json.dumps(manifest, indent=2).encode()
        for record in sorted(contents, key=lambda record: record == self.run.metrics):  # by which has_trained() judges
            write_bytes(record, contents[record])

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
                    f"{where}: {self.address} cannot be written ({error}), so nothing that the run saves would be in "
                    "the store. Look at the bucket's name and region, this machine's clock, and the credentials, "
                    "which must be allowed to list, read, write and delete."
                ) from error
            return
        if back != sent:
            raise RecipeError(
                f"{where}: {self.address} gives back other bytes than it was sent ({len(back)} instead of "
                f"{len(sent)}), so no checkpoint would come back whole. Some stores keep what an upload carries "
                "between its bytes, signatures and checksums: set AWS_REQUEST_CHECKSUM_CALCULATION=when_required, "
                "under which it carries none, or name another store."
            )

    def _get(self, name: str, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        with self.store.open(f"{self.root}/{name}", "rb") as source, open(target, "wb") as file:
            shutil.copyfileobj(source, file, 2**22)


def token_of(owner: dict[str, Any] | None) -> str:
    """Return the token of an owner, nothing of none."""
    return str((owner or {}).get("token", ""))


class TakenOverError(Exception):
    """Raised when another start has the run in the store."""


class DamagedError(Exception):
    """Raised when a file from the store is not the one that was sealed."""


def restore_from_mirror(recipe: Recipe, run: RunDirectory) -> None:
    """Fetch what goes further than this run does here, or the finished run, under run.resume auto, and have this start
    take the run over.

    Raises RecipeError for a store that can never be written, ServiceError when it does not say what it has and nothing
    is here: to begin anew would repeat the run and write over its state.
    """
    if not recipe.run.mirror or "finished" in run.read_manifest():
        return
    mirror = Mirror(run, recipe.run.mirror)
    mirror.takes_over.unlink(missing_ok=True)
    mirror.refuse_what_cannot_be_written(recipe.where("run.mirror"))
    try:
        with as_os_error():
            owner = mirror.owner()
            if recipe.run.resume == "auto":
                mirror.restore()
    except OSError as error:
        if error.errno in DISK_FULL:
            raise
        here = by_step(run.checkpoints)
        if not here or problems(here[-1]):
            raise ServiceError(
                f"{recipe.where('run.mirror')}: {mirror.address} does not answer ({error}), and this run has no whole "
                "newest checkpoint here. Run the same command again; to begin anew in any case, whatever the mirror "
                "has: run.resume=never."
            ) from error
        print(f"{mirror.address}: does not answer ({error}), so the run goes on from what is here", flush=True)
        return
    mirror.queue.mkdir(parents=True, exist_ok=True)
    mirror.takes_over.write_text(token_of(owner))
    if recipe.run.resume != "auto":
        mirror.went_back.touch()


def restore_base_from_mirror(recipe: Recipe, run: RunDirectory) -> bool:
    """Fetch the finished run that model.start_from names when it is not here and lies beside this one. Return whether
    it came.

    A run that has begun needs the base that it began from, whatever `latest:` means by now. Raises ServiceError when
    the store does not answer.
    """
    begun = run.read_manifest().get("must_match", {}).get("model.start_from")
    start, home = begun or recipe.model.start_from, Path(recipe.run.directory)
    if not recipe.run.mirror or start is None or Path(start).exists() or find_run(start, recipe.run.directory):
        return False
    folder = Path(start).parent if Path(start).name == RunDirectory(home).model.name else Path(start)
    if RunDirectory(folder).manifest.exists() or (len(folder.parts) > 1 and folder.parent.resolve() != home.resolve()):
        return False  # no run of this folder: a Hub id, a model elsewhere
    mirror = Mirror(RunDirectory(home / folder.name), recipe.run.mirror)
    try:
        with as_os_error():
            if not mirror.store.exists(f"{mirror.root}/{mirror.run.model.name}/{SEAL}"):
                return False
            mirror.fetch_records()
    except OSError as error:
        if error.errno in DISK_FULL:
            raise
        raise ServiceError(
            f"{recipe.where('run.mirror')}: {mirror.address} does not answer ({error}), and model.start_from, "
            f"{start}, is not here. Run the same command again, or put that run back."
        ) from error
    if not mirror.run.model.is_dir():  # damaged, and said
        return False
    print(f"{mirror.run.path}: was restored from {mirror.address}, as model.start_from is it", flush=True)
    return True


class Mirroring:
    """The trainer's side of run.mirror: a process beside the run on the first rank; on other ranks nothing."""

    def __init__(self, recipe: Recipe, run: RunDirectory):
        self.process: subprocess.Popen[bytes] | None = None
        if int(os.environ.get("RANK", 0)) != 0:
            return
        assert recipe.run.mirror is not None
        self.mirror = Mirror(run, recipe.run.mirror)
        self.mirror.queue.mkdir(exist_ok=True)
        self.mirror.waiting.unlink(missing_ok=True)
        if "finished" in run.read_manifest():
            with suppress(OSError, TandemError), as_os_error():  # of a store that is away the marks are believed
                self.mirror.compare()
            if not self.mirror.is_behind():
                return
        self.arguments = ("-m", "pipeline.run.mirror", run.path, recipe.run.mirror, str(os.getpid()))
        self.log = self.mirror.queue / "mirror.log"
        self.process = self._start()
        self.ended = threading.Event()
        self.watch = threading.Thread(target=self._watch, name="mirror", daemon=True)
        self.watch.start()
        atexit.register(self._stop)  # A thread that still runs then can abort the interpreter's end.

    def _start(self, why: str = "") -> "subprocess.Popen[bytes]":
        with open(self.log, "ab") as log:
            log.write(why.encode())
            log.flush()
            return commands.start(*self.arguments, log=log)

    def _watch(self) -> None:
        """Start the process again when it has died (no memory, a kill), until the run ends or another start has it."""
        pause = FIRST_PAUSE_S
        while self.process and not self.ended.wait(LOOK_EVERY_S):
            status = self.process.poll()
            if status == TAKEN_OVER:
                return
            if status is None or self.ended.wait(pause):
                continue
            pause = min(2 * pause, LONGEST_PAUSE_S)
            with suppress(OSError):  # no memory, no disk: after the next pause
                self.process = self._start(f"the process that sends ended with status {status}; it is started again\n")

    def _stop(self) -> None:
        self.ended.set()
        self.watch.join()

    def drain(self) -> None:
        """Wait until what was saved is in the store, for at most DRAIN_S, and say so when it is not."""
        if self.process is None:
            return
        with suppress(OSError):  # a full disk: then it goes on yielding
            self.mirror.waiting.touch()
        ends = time.monotonic() + DRAIN_S
        while self.mirror.is_behind() and self.watch.is_alive() and time.monotonic() < ends:
            time.sleep(0.1)
        self._stop()
        if self.process.poll() == TAKEN_OVER:
            print(self.log.read_text().splitlines()[-1], flush=True)
        elif self.mirror.is_behind():
            print(
                f"{self.mirror.address}: does not have what was saved last; {self.log} says why. The next start "
                "sends it.",
                flush=True,
            )


def follow(run: RunDirectory, address: str, *, trainer: int) -> int:
    """Send what the run saves for as long as the trainer lives, and what is left then, for at most DRAIN_S. Return the
    status."""
    mirror = Mirror(run, address)
    with file_lock(mirror.queue / ".lock"):  # a process of the last start may still be sending
        try:
            _follow(mirror, trainer)
        except TakenOverError as error:
            print(error, flush=True)  # the last line of its log, for drain
            return TAKEN_OVER
    return 0


def _follow(mirror: Mirror, trainer: int) -> None:
    # As in hub/push.py: what is sent while the run trains yields to it, what its end waits for does not.
    yielding = ThreadPoolExecutor(1, initializer=commands.yield_to_training)
    pause, ends, begun = FIRST_PAUSE_S, None, False
    while ends is None or time.monotonic() < ends:
        if ends is None and os.getppid() != trainer:
            ends = time.monotonic() + DRAIN_S
        try:
            with as_os_error():
                if not begun:
                    mirror.begin()
                    begun = True
                if mirror.is_behind():
                    nobody_trains = ends is not None or mirror.waiting.exists()
                    mirror.send() if nobody_trains else yielding.submit(mirror.send).result()
                elif ends is not None:
                    return
            pause = FIRST_PAUSE_S
        except (OSError, TandemError) as error:
            print(f"{mirror.address}: not sent: {error}", flush=True)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
        time.sleep(LOOK_EVERY_S)


if __name__ == "__main__":
    sys.exit(follow(RunDirectory(sys.argv[1]), sys.argv[2], trainer=int(sys.argv[3])))
