"""Files and folders that exist whole or not at all."""

import errno
import hashlib
import json
import os
import shutil
import stat
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from pipeline.artifacts.errors import CannotWriteError, DamagedFileError

# A file system that has no such call says one of these; it is no error of this file.
NOT_SUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
JSON_BYTES = 256 * 2**20  # of a tokenizer.json 40 MB are seen, of our own files far less
JSON_DEPTH = 100
OWN_SUM = "own_sha256"
_noted: set[str] = set()


def note_once(text: str, *, about: str | None = None) -> None:
    """Print what a user should know of this machine on stderr, once per process. about: what two notes have in common that
    say the same; default their text."""
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
            f"{folder}: its file system does not know fsync ({error.strerror}), so a power cut may take files that were just written",
            about=f"fsync {os.fstat(descriptor).st_dev}",
        )


def fsync_folder(path: Path) -> None:
    """Make the entries of a folder durable: a rename is on disk only after its parent is."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _fsync(descriptor, path)
    finally:
        os.close(descriptor)


def fsync_file(path: Path) -> None:
    with open(path, "rb") as file:
        _fsync(file.fileno(), path.parent)


# Folders that must stay where they are while this process lives: absolute path -> a file that lies in it all the time.
_kept_in_place: dict[Path, Path] = {}


def keep_in_place(folder: Path, *, mark: Path) -> None:
    """From now on nothing is written below the folder when `mark`, a file in it, is gone: it was renamed or removed."""
    _kept_in_place[folder.absolute()] = mark.absolute()


def raise_if_moved(path: Path) -> None:
    """Raise CannotWriteError when a folder around `path`, or `path` itself, is no longer where it was (`keep_in_place`)."""
    path = path.absolute()
    for folder, mark in _kept_in_place.items():
        if path.is_relative_to(folder) and not mark.exists():
            raise CannotWriteError(
                f"{folder}: {mark.name} is not there any more, so the run directory was renamed or removed while the run was training, and "
                "nothing more is written. Give it its name back, then run the same command again."
            )


def make_parent(path: Path) -> None:
    """Create the folder of a file to be written. Raises CannotWriteError where that would be half of one that was moved away."""
    raise_if_moved(path)
    path.parent.mkdir(parents=True, exist_ok=True)


def write_bytes(path: str | Path, data: bytes) -> None:
    """Replace a file by new content: readers see the old bytes or the new ones, also after a power cut."""
    path = Path(path)
    make_parent(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            _fsync(file.fileno(), path.parent)
        os.replace(temporary, path)
    except BaseException:
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
    """Write an object with a checksum of its own, which `read_sealed_json` compares."""
    write_json(path, {**value, OWN_SUM: sum_of(value)})


def read_json(path: str | Path) -> dict[str, Any]:
    """Return the object in a JSON file, whoever wrote it.

    Raises DamagedFileError for what is no object, too large or nested too deeply; OSError as open does.
    """
    data = read_bounded(path)
    try:
        return parse_json(data)
    except ValueError as error:
        raise DamagedFileError(
            f"{path}: is no JSON as it was written ({error}), so nothing that it says can be trusted. Put it back from a copy, or remove "
            "it where it can be made again."
        ) from None


def open_regular(path: str | Path) -> BinaryIO:
    """Open a file for reading its bytes. Raises DamagedFileError for a folder, and for a pipe or a device, which would have no end."""
    # Without O_NONBLOCK the opening of a pipe waits for somebody who writes.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return open(descriptor, "rb")
    os.close(descriptor)
    kind = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
    raise DamagedFileError(f"{path}: is {kind}, not a file, so it is not read. Remove it, or put the file there.")


def refuse_endless_files(folder: str | Path) -> None:
    """Raise DamagedFileError where a folder has a pipe or a device among its files: a library that opens it would wait for ever."""
    for path in sorted(Path(folder).iterdir()):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise DamagedFileError(f"{path}: is a pipe or a device, not a file, so the folder is not used. Remove it.")


def read_bounded(path: str | Path) -> bytes:
    """Return a file's bytes, of one that is too large for `parse_json` no more than shows that."""
    with open_regular(path) as file:
        # read(n) takes n bytes of memory at once, however small the file is.
        return file.read(min(os.fstat(file.fileno()).st_size, JSON_BYTES) + 1)


def read_sealed_json(path: str | Path) -> dict[str, Any]:
    """As read_json; DamagedFileError also when the content is not that of its checksum. Files of old have none."""
    value = read_json(path)
    own_sum = value.pop(OWN_SUM, None)
    if own_sum is not None and own_sum != sum_of(value):
        raise DamagedFileError(
            f"{path}: has other content than was written, so nothing that it says can be trusted. Put it back from a copy, or remove it "
            "where it can be made again."
        )
    return value


def parse_json(data: bytes) -> dict[str, Any]:
    """Return the object in bytes from a disk or a network; ValueError says in a few words why there is none."""
    if len(data) > JSON_BYTES:
        raise ValueError(f"longer than {JSON_BYTES >> 20} MiB")
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("no object of keys")
    level: list[Any] = [value]
    for _ in range(JSON_DEPTH):
        level = [child for node in level for child in (node.values() if isinstance(node, dict) else node)]
        level = [child for child in level if isinstance(child, (dict, list))]
        if not level:
            return value
    raise ValueError("nested too deeply")


def sum_of(value: dict[str, Any]) -> str:
    """Return the sha256 of an object as JSON gives it back: there every key is text."""
    return hashlib.sha256(json.dumps(json.loads(json.dumps(value)), sort_keys=True).encode()).hexdigest()


def remove_file(path: Path) -> None:
    """Delete a file that may be gone already. What a file system keeps as it is in use (NFS: EBUSY) is left and named."""
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
    """Bytes of all files below a folder, also of one in which another process renames and removes meanwhile; 0 without one."""
    total = 0
    for where, _, names in os.walk(folder):  # unlike rglob it passes over a folder that has gone since it was listed
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(where, name)).st_size
    return total


def temporary_folder(path: str | Path) -> Path:
    """A new folder beside `path`, which becomes it with `publish_folder`; a name that starts with .tmp- never counts as whole."""
    path = Path(path)
    make_parent(path)
    temporary = path.with_name(f".tmp-{path.name}-{uuid.uuid4().hex[:8]}")
    temporary.mkdir()
    return temporary


def publish_folder(temporary: Path, path: Path) -> None:
    """Fsync every file and rename the folder. If `path` exists by then (another process was first), it is discarded."""
    for folder, _, names in os.walk(temporary, topdown=False):
        for name in names:
            fsync_file(Path(folder, name))
        fsync_folder(Path(folder))
    if path.exists():
        shutil.rmtree(temporary, ignore_errors=True)
    else:
        os.rename(temporary, path)
        fsync_folder(path.parent)


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """A folder that appears under its name only when the block has ended well; yields the temporary one, which is removed after an error."""
    temporary = temporary_folder(path)
    try:
        yield temporary
        publish_folder(temporary, Path(path))
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def move_folder(source: Path, target: Path) -> None:
    """Rename a folder, also to where only a copy can get it (another disk, a lower layer of overlayfs); `target` is whole or absent."""
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
        trash = (
            path  # a lower layer of overlayfs: a crash in between leaves a damaged one, which every reader finds out
        )
    shutil.rmtree(trash, ignore_errors=True)
