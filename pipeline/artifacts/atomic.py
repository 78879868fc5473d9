"""Files and folders that exist whole or not at all."""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def fsync_folder(path: Path) -> None:
    """Make the entries of a folder durable: a rename is on disk only after its parent is."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def write_bytes(path: str | Path, data: bytes) -> None:
    """Replace a file by new content: readers see the old bytes or the new ones, also after a power cut."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def write_text(path: str | Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: str | Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, sort_keys=False) + "\n")


def read_json(path: str | Path) -> Any:
    return json.loads(Path(path).read_text(encoding="utf-8"))


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
    path.parent.mkdir(parents=True, exist_ok=True)
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
        shutil.rmtree(temporary)
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


def remove_folder(path: Path) -> None:
    """Delete a folder such that a crash in between leaves nothing that looks whole: renamed first, then removed."""
    trash = path.with_name(f".trash-{path.name}-{uuid.uuid4().hex[:8]}")
    os.rename(path, trash)
    shutil.rmtree(trash, ignore_errors=True)
