"""Whole checkpoints: written under another name, sealed with the hash of every file, renamed, and verified before use.

start(job) is called in the training; `python pipeline/run_dir/checkpoints.py` is the other side, a process that puts
the checkpoint on the disk while training continues, and outlives the training's death.
"""

import errno
import hashlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import filelock

if not __package__:
    sys.path[0] = str(Path(__file__).parents[2])

from pipeline.process import commands
from pipeline.process.errors import DamagedFileError
from pipeline.process.storage import (
    DISK_FULL,
    file_lock,
    folder_bytes,
    fsync_file,
    lock,
    move_folder,
    new_folder,
    parse_json,
    publish_folder,
    read_json,
    remove_file,
    remove_folder,
    sha256_file,
    sum_of,
    write_json,
)

SEAL = "MANIFEST.json"
# What transformers looks for in a model's folder has one of these endings.
MODEL_CONFIGS = ("config.json", "adapter_config.json")
LOADABLE_SUFFIXES = (".safetensors", ".bin", ".json", ".py", ".jinja", ".model", ".txt", ".msgpack", ".h5")
_NAME = re.compile(r"checkpoint-(\d+)")


@contextmanager
def whole_folder(path: str | Path, **facts) -> Iterator[Path]:
    """new_folder that ends with MANIFEST.json: the size and sha256 of every file, and `facts` (step, run ...)."""
    with new_folder(path) as temporary:
        yield temporary
        seal(temporary, **facts)


def seal(folder: Path, *, written: dict[str, dict[str, Any]] | None = None, **facts) -> None:
    """Write MANIFEST.json over everything that is in the folder now. written: bytes and sha256 by name, from who wrote
    these files: a network file system may show a size of some seconds ago. Raises FileNotFoundError where it lists one
    of them not at all."""
    written = written or {}
    files = {
        name: written.get(name) or {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and (name := str(path.relative_to(folder))) != SEAL
    }
    for name in written.keys() - files.keys():
        raise FileNotFoundError(errno.ENOENT, "was written and is not in its folder", str(folder / name))
    manifest = {**facts, "files": files}
    write_json(folder / SEAL, {**manifest, "sha256": sum_of(manifest)})


def read_seal(folder: str | Path) -> dict[str, Any]:
    """Return MANIFEST.json, whoever wrote it: `files` maps names to bytes and sha256, `step` is a step where there is
    one.

    Raises DamagedFileError when it is anything else, FileNotFoundError where there is none.
    """
    path = Path(folder) / SEAL
    manifest = read_json(path)
    own_sum = manifest.pop("sha256", None)
    if own_sum != sum_of(manifest):
        raise DamagedFileError(f"{path}: has other content than was written. Put the folder back from a copy.")
    files, step = manifest.get("files"), manifest.get("step", 0)
    good = isinstance(files, dict) and all(map(_are_facts, files.values())) and type(step) is int and 0 <= step < 2**63
    if not good:
        raise DamagedFileError(
            f"{path}: is no list of files as this program writes it. Take the files from elsewhere."
        )
    return manifest


def _are_facts(facts: Any) -> bool:
    return isinstance(facts, dict) and type(facts.get("bytes")) is int and isinstance(facts.get("sha256"), str)


def problems(folder: str | Path) -> list[str]:
    """Return what is damaged in a sealed folder: empty when every listed file is there with its size and hash.

    Files that are not listed do no damage: `unexpected_files` names them.
    """
    folder = Path(folder)
    try:
        files = read_seal(folder)["files"]
    except FileNotFoundError:
        return [f"{SEAL} is missing"]
    except DamagedFileError:
        return [f"{SEAL} has other content than was written"]
    except OSError as error:
        return [unreadable(SEAL, error)]
    found = []
    for name, expected in files.items():
        path = folder / name
        try:
            if not path.is_file():
                found.append(f"{name} is missing")
            elif path.stat().st_size != expected["bytes"]:
                found.append(f"{name} has {path.stat().st_size} bytes instead of {expected['bytes']}")
            elif sha256_file(path) != expected["sha256"]:
                found.append(f"{name} has other content than was written")
        except OSError as error:
            found.append(unreadable(name, error))
    return found


def sealed_files(folder: Path) -> dict[str, Path]:
    """Return the files that MANIFEST.json lists, itself included, by their names in the folder."""
    return {name: folder / name for name in [*read_seal(folder)["files"], SEAL]}


def unexpected_files(folder: Path) -> list[str]:
    """Return the names of files in a sealed folder that it was not written with: a file manager's .DS_Store, notes."""
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return sorted(found - set(sealed_files(folder)))


def unexpected_model_files(folder: Path) -> list[str]:
    """Return the unexpected files that from_pretrained might take for a part of the model."""
    paths = map(Path, unexpected_files(folder))
    return [str(path) for path in paths if path.suffix in LOADABLE_SUFFIXES and not path.name.startswith(".")]


def is_model(folder: Path) -> bool:
    """Return whether the folder holds a model, or an adapter of PEFT, which names its base."""
    return any((folder / name).is_file() for name in MODEL_CONFIGS)


def has_whole_model(folder: Path) -> bool:
    """Return whether from_pretrained loads what was written, however damaged the training state is."""
    damaged = {problem.split(" ", 1)[0] for problem in problems(folder)}
    state = ("optimizer", "scheduler.", "trainer_state.", "position.", "rng-")
    return all(name.startswith(state) for name in damaged)


def unreadable(name: str, error: OSError) -> str:
    """Return a file whose blocks are bad is damaged like any other; whatever else keeps it from being read says
    nothing of it."""
    if error.errno not in (errno.EIO, errno.EBADMSG, errno.EUCLEAN):
        raise error
    return f"{name} cannot be read ({error.strerror})"


def step_of(folder: Path) -> int | None:
    match = _NAME.fullmatch(folder.name)
    return int(match.group(1)) if match else None


def by_step(checkpoints: Path) -> list[Path]:
    """Return the checkpoint folders in the order of their steps; numbers decide, never file times."""
    if not checkpoints.is_dir():
        return []
    folders = [path for path in checkpoints.iterdir() if path.is_dir() and step_of(path) is not None]
    return sorted(folders, key=lambda folder: step_of(folder) or 0)


def newest_whole(checkpoints: Path, quarantine: Path) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint that verifies, and a line for each damaged one on the way, which is moved aside."""
    notes: list[str] = []
    folders = by_step(checkpoints)
    while folders:
        folder = folders.pop()
        found = problems(folder)
        if not found:
            if names := unexpected_files(folder):
                belong = "does not belong" if len(names) == 1 else "do not belong"
                notes.append(f"{folder}: {', '.join(names)} {belong} to the checkpoint; ignored.")
            return folder, notes
        target = quarantined(folder, quarantine)
        instead = "; the checkpoint before it is tried" if folders else ""
        notes.append(f"{folder}: {'; '.join(found)}. Moved to {target}{instead}.")
    return None, notes


def quarantined(folder: Path, quarantine: Path) -> Path:
    """Move a checkpoint to quarantine; return its new place."""
    quarantine.mkdir(parents=True, exist_ok=True)
    target = quarantine / folder.name
    number = 1
    while target.exists():
        number += 1
        target = quarantine / f"{folder.name}.{number}"
    move_folder(folder, target)
    return target


def rotate(
    checkpoints: Path, *, keep: int | None, every: int | None = None, scores: dict[int, float] | None = None
) -> None:
    """Delete checkpoints beyond the `keep` newest; called only after a new one is sealed.

    Those stay whose step is a multiple of `every`, and the one with the lowest of `scores` (by step; of those that lie
    here). keep=None deletes nothing.
    """
    if keep is None:
        return
    folders = {step_of(folder) or 0: folder for folder in by_step(checkpoints)}
    steps = list(folders)
    kept = set(steps[-max(keep, 1) :])
    if every:
        kept.update(step for step in steps if step % every == 0)
    # The lowest score, of equal ones that of the later step.
    scored = [(score, -step) for step, score in (scores or {}).items() if step in folders and math.isfinite(score)]
    if scored:
        _, step = min(scored)
        kept.add(-step)
    for step, folder in folders.items():
        if step not in kept:
            remove_folder(folder)


def clean(checkpoints: Path) -> None:
    """Remove what an interrupted save or rotation left behind."""
    if checkpoints.is_dir():
        for folder in checkpoints.iterdir():
            if folder.name.startswith((".tmp-", ".trash-")):
                shutil.rmtree(folder, ignore_errors=True)


# The process that writes a checkpoint.
#
# A job is one line of JSON on stdin: the temporary folder that holds the small files already, its final name, the
# facts of its manifest, what rotation keeps, and for each large file its descriptor and size: an unnamed file in
# memory, inherited. No torch here: the process starts in 50 ms and takes 10 MB. It holds checkpoints/.writing locked:
# the next start of the run waits for a checkpoint that a killed one was still writing. It ends with 0, or with the
# error as JSON on stderr.
#
# Of a sharded model each rank starts such a process for its own files, all into one folder. Those of rank 1 and above
# report bytes and sha256 of theirs in a folder next to it; that of rank 0 waits for the reports, then seals and renames
# as for one process.

LOCK = ".writing"
_CHUNK = 8 << 20
# Seconds in which nothing is written, after which the other ranks' files are given up: a rank starts a killed process
# again, after its step at the latest, while the training lives. A network file system may show another host's file 60
# s later.
PATIENCE_S, PATIENCE_WITHOUT_TRAINING_S = 600.0, 90.0


@dataclass(kw_only=True)
class Job:
    """One checkpoint to write. images: file name -> (descriptor, bytes); scores: step -> what rotation finds the best
    by.

    rank, ranks: of a sharded model, whose ranks write a part each; training: the process that started this one.
    """

    temporary: str
    target: str
    facts: dict[str, Any]
    images: dict[str, tuple[int, int]]
    keep: int | None
    every: int | None
    scores: dict[int, float]
    rank: int = 0
    ranks: int = 1
    training: int = field(default_factory=os.getpid)


def start(job: Job) -> subprocess.Popen:
    """Begin to write; the caller leaves the images alone until the process has ended."""
    try:
        import fcntl
    except ImportError:  # Windows, where no descriptors are inherited
        return cast(subprocess.Popen, Written(job))
    checkpoints = Path(job.target).parent
    images = [descriptor for descriptor, _ in job.images.values()]
    with open(checkpoints / LOCK, "ab") as file:
        if job.rank == 0:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _is_writing(checkpoints) from None
        # The process inherits the open file, and with it the lock, without a gap in which this one may be killed.
        process = commands.start(__file__, pass_fds=[file.fileno(), *images])
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
        process.stdin.close()
    except BrokenPipeError:
        pass  # it has died: its status tells
    process.stdin = None  # communicate() would flush it
    return process


class Written:
    """A checkpoint that was written in this process, as the process looks that has written one and ended."""

    def __init__(self, job: Job):
        self.returncode, self.stderr = 0, b""
        try:
            if job.rank:
                write_part(job)
            else:
                with file_lock(Path(job.target).parent / LOCK):
                    write(job)
        except OSError as error:
            self.returncode, self.stderr = 1, error_line(error).encode()

    def poll(self) -> int:
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[bytes, bytes]:
        return b"", self.stderr


def take_lock(checkpoints: Path, *, wait_s: float = 0.0) -> filelock.BaseFileLock:
    """Return the lock; BlockingIOError when a writer still holds it after `wait_s`."""
    if (held := lock(checkpoints / LOCK, wait_s=wait_s)) is None:
        raise _is_writing(checkpoints)
    return held


def _is_writing(checkpoints: Path) -> BlockingIOError:
    return BlockingIOError(errno.EWOULDBLOCK, "another process is writing a checkpoint", str(checkpoints / LOCK))


def write(job: Job) -> None:
    """Write the images, wait for those of other ranks, seal, rename, rotate. After an error nothing of it is left."""
    temporary, target = Path(job.temporary), Path(job.target)
    for left in temporary.glob(".*"):  # half a manifest of a writer that was killed
        remove_file(left)
    try:
        written = {name: _write_image(temporary / name, *image) for name, image in job.images.items()}
        if job.ranks > 1:
            written |= _written_by_other_ranks(job)
        seal(temporary, written=written, **job.facts)
        publish_folder(temporary, target)
    except BaseException:
        discard(temporary)
        raise
    shutil.rmtree(reports(temporary), ignore_errors=True)
    try:
        rotate(target.parent, keep=job.keep, every=job.every, scores=job.scores)
    except OSError as error:
        raise NotRotatedError(error.errno, error.strerror, error.filename) from error


def write_part(job: Job) -> None:
    """Write the images of a rank above 0 into the folder that rank 0's process publishes, and report to it what they
    are, or the error."""
    temporary = Path(job.temporary)
    report = reports(temporary) / f"{job.rank}.json"
    if report.exists() or not report.parent.exists():
        return  # killed when all was reported, and started again: rank 0's process may be sealing by now
    try:
        written = {name: _write_image(temporary / name, *image) for name, image in job.images.items()}
        for name in written:
            fsync_file(temporary / name)  # here: another host's fsync would not reach what this one has cached
        _write_report(report, {"written": written})
    except OSError as error:
        try:
            # Not exists(), whose first answer a network file system may have kept.
            if report.name in os.listdir(report.parent):
                return  # its name came all the same: rank 0's process may be sealing what it names
            for name in job.images if error.errno in DISK_FULL else ():
                remove_file(temporary / name)  # there is room for the report then
            _write_report(report, json.loads(error_line(error)))
            report.stat()
        except FileNotFoundError:
            return  # rank 0's process has given up, or a next start has cleared all away
        except OSError:
            pass  # a disk that takes no report either: the first error says why
        raise


def _write_report(report: Path, facts: dict[str, Any]) -> None:
    """Write it whole or, where its folder has gone, not at all: write_json would make the folder anew, and nobody
    remove it."""
    unnamed = report.with_suffix(".part")
    with suppress(FileNotFoundError):
        unnamed.write_text(json.dumps(facts))
        os.replace(unnamed, report)


def reports(temporary: Path) -> Path:
    """Return the folder of the reports of ranks above 0: next to the checkpoint's, which never holds
    anything else."""
    return temporary.with_name(f"{temporary.name}-reports")


def discard(temporary: Path) -> None:
    """Remove what was written of a checkpoint that will not be."""
    for folder in (temporary, reports(temporary)):
        shutil.rmtree(folder, ignore_errors=True)


def _written_by_other_ranks(job: Job) -> dict[str, dict[str, Any]]:
    """Return bytes and sha256 by name of all that the other ranks' processes have written, once all have reported and
    it is here to see.

    Raises OSError with the error of one of them, and when nothing has been written for so long that one must be lost.
    """
    temporary = Path(job.temporary)
    missing, written = set(range(1, job.ranks)), dict[str, dict[str, Any]]()
    size, since, pause_s = -1, time.monotonic(), 0.02
    while True:
        listed, there = os.listdir(reports(temporary)), set(os.listdir(temporary))  # network file systems list anew
        for rank in [r for r in missing if f"{r}.json" in listed]:
            report = read_json(reports(temporary) / f"{rank}.json")
            if "written" not in report:
                raise OSError(report["errno"], report["strerror"], report["filename"])
            if report["written"].keys() <= there:
                written |= report["written"]
                missing.discard(rank)
        if not missing:
            return written
        if (now := folder_bytes(temporary)) != size:
            size, since = now, time.monotonic()
        patience_s = PATIENCE_S if os.getppid() == job.training else PATIENCE_WITHOUT_TRAINING_S
        if time.monotonic() - since > patience_s:
            lost = " and ".join(map(str, sorted(missing)))
            raise OSError(
                errno.ETIMEDOUT, f"the part of rank {lost} was not written in {patience_s:.0f} s", job.target
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 1.0)  # a look costs a shared disk a request for each file of each rank


class NotRotatedError(OSError):
    """The new checkpoint is whole; old ones could not be deleted."""


def error_line(error: OSError) -> str:
    """Return the error as `last_words` reads it."""
    facts = {"errno": error.errno, "strerror": error.strerror, "filename": error.filename}
    return json.dumps(facts | {"rotating": isinstance(error, NotRotatedError)})


def last_words(stderr: bytes) -> dict[str, Any]:
    """Return the writer's error, the last line that it wrote; ValueError when it died without one. Notes may come
    before it."""
    return parse_json(stderr.strip().rpartition(b"\n")[2])


def not_rotated(stderr: bytes) -> str | None:
    """Return what kept the writer from deleting old checkpoints, from its own words; None when it failed at something
    else."""
    with suppress(ValueError):
        error = last_words(stderr)
        if error["rotating"]:
            return f"{error['filename']}: {error['strerror']}"
    return None


def _write_image(path: Path, descriptor: int, size: int) -> dict[str, Any]:
    """Copy a file in memory to the disk; returns its bytes and sha256."""
    digest = hashlib.sha256()
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        os.lseek(descriptor, 0, os.SEEK_SET)
        for offset in range(0, size, _CHUNK):
            chunk = memoryview(os.read(descriptor, min(_CHUNK, size - offset)))
            digest.update(chunk)
            while chunk:
                chunk = chunk[os.write(out, chunk) :]
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(out)
    return {"bytes": size, "sha256": digest.hexdigest()}


def main() -> int:
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # of which Windows lacks the last
        number = getattr(signal, name, signal.SIGINT)
        signal.signal(number, signal.SIG_IGN)
    text = sys.stdin.buffer.read()
    if not text.endswith(b"\n"):
        return 1  # the training died before it had said what to write; the next start clears its folder away
    job = Job(**json.loads(text))
    job.scores = {int(step): score for step, score in job.scores.items()}
    try:
        if job.rank:
            write_part(job)
        else:
            write(job)
    except OSError as error:
        print(error_line(error), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
