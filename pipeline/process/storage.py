"""Files written whole or not at all, locks, and the cache's folder."""

import errno
import hashlib
import json
import os
import shutil
import socket
import stat
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import filelock

from pipeline.process.errors import CannotWriteError, DamagedFileError, InputMissingError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)
# A file system that has no such call says one of these; it is no error of this file.
NOT_SUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
OWN_SUM = "own_sha256"
_noted: set[str] = set()


def note_once(text: str, *, about: str | None = None) -> None:
    """Print what a user should know of this machine on stderr, once per process. about: what two notes have in common
    that say the same; default their text."""
    if (about or text) not in _noted:
        _noted.add(about or text)
        print(f"note: {text}", file=sys.stderr, flush=True)


def _fsync(descriptor: int, folder: Path) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            raise
        note_once(
            f"{folder}: its file system does not know fsync ({error.strerror}), so a power cut may take files that "
            "were just written",
            about=f"fsync {os.fstat(descriptor).st_dev}",
        )


def fsync_folder(path: Path) -> None:
    """Make the entries of a folder durable: a rename is on disk only after its parent is."""
    if os.name == "nt":
        return  # a folder cannot be opened there
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _fsync(descriptor, path)
    finally:
        os.close(descriptor)


def fsync_file(path: Path) -> None:
    with open(path, "rb") as file:
        _fsync(file.fileno(), path.parent)


# Folders that must stay where they are while this process lives: absolute path -> a file that is in it all the time.
_kept_in_place: dict[Path, Path] = {}


def keep_in_place(folder: Path, *, mark: Path) -> None:
    """From now on nothing is written below the folder when `mark`, a file in it, is gone: it was renamed or
    removed."""
    _kept_in_place[folder.absolute()] = mark.absolute()


def release_places() -> None:
    """Forget what `keep_in_place` was called with: the process lives on after a training."""
    _kept_in_place.clear()


REMOVAL_S = 2.0  # longest time that a removal under way is given to reach the mark


def raise_if_moved(path: Path, *, after_error: bool = False) -> None:
    """Raise CannotWriteError when a folder around `path`, or `path` itself, is no longer where it was
    (`keep_in_place`).

    After an error of the file system the mark may be the last file to go, so it is given REMOVAL_S to do so.
    """
    path = path.absolute()
    until = time.monotonic() + (REMOVAL_S if after_error else 0.0)
    for folder, mark in _kept_in_place.items():
        if not path.is_relative_to(folder):
            continue
        while mark.exists() and time.monotonic() < until:
            time.sleep(0.05)
        if not mark.exists():
            raise CannotWriteError(
                f"{folder}: {mark.name} is not there any more, so the run directory was renamed or removed while the "
                "run was training, and nothing more is written. Give it its name back, then run the same command "
                "again."
            )


def make_parent(path: Path) -> None:
    """Create the folder of a file to be written. Raises CannotWriteError where that would be half of one that was
    moved away."""
    raise_if_moved(path)
    path.parent.mkdir(parents=True, exist_ok=True)


def write_bytes(path: str | Path, *parts: Any) -> None:
    """Replace a file by new content, one or more buffers: readers see the old bytes or the new ones, also after a
    power cut."""
    path = Path(path)
    make_parent(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with open(temporary, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            _fsync(file.fileno(), path.parent)
        os.replace(temporary, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:  # of a write
            error.filename = str(path)
        with suppress(OSError):  # the error above is the one to tell
            temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def write_text(path: str | Path, text: str) -> None:
    # A path that is no UTF-8 has lone surrogates, which UTF-8 cannot hold; escaped, JSON gives them back.
    write_bytes(path, text.encode(errors="backslashreplace"))


def write_json(path: str | Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, sort_keys=False) + "\n")


def write_sealed_json(path: str | Path, value: dict[str, Any]) -> None:
    """Write an object with its checksum, which `read_sealed_json` compares."""
    write_json(path, {**value, OWN_SUM: sum_of(value)})


def read_json(path: str | Path) -> dict[str, Any]:
    """Return the object in a JSON file, whoever wrote it.

    Raises DamagedFileError for what is no object or nested too deeply; OSError as open does.
    """
    try:
        return parse_json(Path(path).read_bytes())
    except ValueError as error:
        raise _not_as_written(path, f"is no JSON as it was written ({error})") from None


def _not_as_written(path: str | Path, what: str) -> DamagedFileError:
    return DamagedFileError(
        f"{path}: {what}, so nothing that it says can be trusted. Put it back from a copy, or remove it where it can "
        "be made again."
    )


def refuse_unreadable_files(folder: str | Path) -> None:
    """Raise InputMissingError for a file that this user may not read: safetensors would say that there is none."""
    for path in sorted(Path(folder).iterdir()):
        if path.is_file() and not os.access(path, os.R_OK):
            mode = stat.S_IMODE(path.stat().st_mode)
            raise InputMissingError(
                f"{path}: this user may not read it (mode {mode:04o}), so the folder is not used. Its owner can run: "
                f"chmod -R a+rX {folder}"
            )


def read_sealed_json(path: str | Path) -> dict[str, Any]:
    """Read as read_json does; DamagedFileError also when the content is not that of its checksum. Files of old have
    none."""
    value = read_json(path)
    own_sum = value.pop(OWN_SUM, None)
    if own_sum is not None and own_sum != sum_of(value):
        raise _not_as_written(path, "has other content than was written")
    return value


def parse_json(data: bytes) -> dict[str, Any]:
    """Return the object in bytes from a disk or a network; ValueError says in a few words why there is none."""
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("no object of keys")
    return value


def sum_of(value: dict[str, Any]) -> str:
    """Return the sha256 of an object as JSON gives it back: there every key is text."""
    return hashlib.sha256(json.dumps(json.loads(json.dumps(value)), sort_keys=True).encode()).hexdigest()


def remove_file(path: Path) -> None:
    """Delete a file that may be gone already. What a file system keeps as it is in use (NFS: EBUSY) is left and
    named."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        note_once(f"{path}: is in use and could not be removed; remove it later")


def sha256_file(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_bytes(folder: str | Path) -> int:
    """Return bytes of all files below a folder, also of one in which another process renames and removes meanwhile; 0
    without one."""
    total = 0
    for where, _, names in os.walk(folder):  # unlike rglob it passes over a folder that has gone since it was listed
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(where, name)).st_size
    return total


def temporary_folder(path: str | Path) -> Path:
    """Return a new folder next to `path`, which becomes it with `publish_folder`; a name that starts with .tmp- never
    counts as whole."""
    path = Path(path)
    make_parent(path)
    temporary = path.with_name(f".tmp-{path.name}-{uuid.uuid4().hex[:8]}")
    temporary.mkdir()
    return temporary


def publish_folder(temporary: Path, path: Path) -> None:
    """Fsync every file and rename the folder. If `path` exists by then (another process was first), it is
    discarded."""
    wanted = temporary.stat().st_mode & 0o666  # as the umask made it
    for folder, _, names in os.walk(temporary, topdown=False):
        for name in names:
            _add_mode(Path(folder, name), wanted)
            fsync_file(Path(folder, name))
        fsync_folder(Path(folder))
    if path.exists():
        shutil.rmtree(temporary, ignore_errors=True)
    else:
        os.rename(temporary, path)
        fsync_folder(path.parent)


def _add_mode(path: Path, wanted: int) -> None:
    """Let others read a file who could if open() had made it: safetensors and tempfile make files for their owner
    alone."""
    mode = path.stat().st_mode
    if wanted & ~mode:
        with suppress(OSError):  # a file system without modes, or another user's file
            path.chmod(stat.S_IMODE(mode) | wanted)


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """Yield a folder that appears under its name only when the block has ended well; yields the temporary one, which
    is removed after an error."""
    temporary = temporary_folder(path)
    try:
        yield temporary
        publish_folder(temporary, Path(path))
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def move_folder(source: Path, target: Path) -> None:
    """Rename a folder, also to where only a copy can get it (another disk, a lower layer of overlayfs); `target` is
    whole or absent."""
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        with new_folder(target) as copy:
            shutil.copytree(source, copy, dirs_exist_ok=True)
        shutil.rmtree(source, ignore_errors=True)


def remove_folder(path: Path) -> None:
    """Delete a folder such that a crash in between leaves nothing that looks whole: renamed first, then removed."""
    trash = path.with_name(f".trash-{path.name}-{uuid.uuid4().hex[:8]}")
    try:
        os.rename(path, trash)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        trash = path  # a lower layer of overlayfs: a crash leaves a damaged one, which every reader finds out
    shutil.rmtree(trash, ignore_errors=True)


PARTS = ("files", "preparations", "shards", "tokenizers")  # every cache that a run was prepared in has several of them


def cache_dir(value: str | None = None) -> Path:
    """Return the folder of tokenizers and shards: the recipe's, else $TANDEM_CACHE, else ~/.cache/tandem.

    Raises CannotWriteError for a user without a home, as in a container that runs under any number.
    """
    try:
        return (
            Path(value or os.environ.get("TANDEM_CACHE") or Path.home() / ".cache" / "tandem").expanduser().absolute()
        )
    except RuntimeError:
        raise CannotWriteError(
            "data.cache_dir: this user has no home folder to keep prepared data in. Set TANDEM_CACHE, HOME or "
            "data.cache_dir."
        ) from None


def cache_of_run(value: str | None) -> Path:
    """Return the cache that a run's own recipe names, where it is one already; else the user's, since somebody else
    may have written the recipe, and what is evaluated must not be written where it says."""
    named = cache_dir(value)
    if is_cache(named):
        return named
    own = cache_dir()
    return named if named.is_relative_to(own) else own


def is_cache(folder: Path) -> bool:
    """Return whether a run was prepared in the folder."""
    return sum((folder / part).is_dir() for part in PARTS) > 1


def is_writable(folder: Path) -> bool:
    """Return whether the folder can be written or could be made, as far as its nearest ancestor tells."""
    there = nearest_existing(folder)
    return there.is_dir() and os.access(there, os.W_OK)


def can_be_used(cache: Path) -> bool:
    """Return whether the cache is one, which may be read only, or could be made."""
    return is_cache(cache) or is_writable(cache)


def require_writable(folder: Path, *, lacks: str) -> None:
    """Raise CannotWriteError where a part of a cache that lacks something cannot be written."""
    if not is_writable(folder):
        raise CannotWriteError(
            f"{folder}: cannot be written by this user, and {lacks} not there yet. Set data.cache_dir to a folder "
            "that can."
        )


@contextmanager
def where_writable() -> Iterator[None]:
    """Leave out what is written in the block where this user may only read, as in a cache that another one has
    prepared."""
    try:
        yield
    except OSError as error:
        if error.errno not in NOT_WRITABLE:
            raise


POLL_S = 0.05
FOREVER = float("inf")


def lock(path: str | Path, *, wait_s: float = 0.0) -> filelock.BaseFileLock | None:
    """Return the held lock; None when another process still holds it after `wait_s`.

    It is held until `release()`. The kernel drops it when this process dies, so a lock file left behind locks nothing.
    """
    # On Windows nobody else can read a locked file, and the file may say who holds it: there another file is locked.
    file = f"{path}.held" if os.name == "nt" else str(path)
    # A process has one singleton for a file, which counts how often it is held: two of one process would not exclude
    # each other.
    held = filelock.FileLock(file, is_singleton=False, thread_local=False, fallback_to_soft=False)
    try:
        held.acquire(timeout=-1 if wait_s == FOREVER else wait_s, poll_interval=POLL_S)
    except filelock.Timeout:
        return None
    return held


def is_locked(path: str | Path) -> bool:
    """Return whether a process holds the lock on a file, which this user may only be able to read."""
    if os.name == "nt":  # nothing reads a lock there without taking it
        held = lock(path)
        if held is not None:
            held.release()
        return held is None
    import fcntl

    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@contextmanager
def file_lock(path: str | Path, *, wait_s: float = FOREVER) -> Iterator[bool]:
    """Hold an exclusive lock on a file while the block runs; yields whether it is held: after `wait_s` another may
    hold it still.

    A folder that this user may only read needs none: whatever the block were to write there fails by itself.
    """
    folder = Path(path).parent
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        yield True
        return
    held = lock(path, wait_s=wait_s)
    try:
        yield held is not None
    finally:
        if held is not None:
            held.release()


def machine(path: str | Path) -> str:
    """Return what processes have in common that see each other's locks on a file: a kernel, and the file system as it
    is mounted.

    Of a path that is not there, as of a folder that another machine alone has, that of what is there around it.
    """
    device = nearest_existing(Path(path).absolute()).stat().st_dev
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        kernel = socket.gethostname()
    return f"{kernel} {device}"


def nearest_existing(folder: Path) -> Path:
    """Return the folder, or its nearest ancestor that is there (and may turn out to be a file)."""
    return next(path for path in (folder, *folder.parents) if path.exists())
