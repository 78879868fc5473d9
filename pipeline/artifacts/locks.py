"""Locks on files: the kernel drops one when the last process that has it open dies, so a lock file left behind locks nothing.

A file system without flock (Lustre mounted without it, some FUSE ones) gets locks of this machine instead: a file in its
temporary folder, named by the path. Two starts on one machine are then told apart, and two on different machines are not.
"""

import errno
import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from pipeline.artifacts.atomic import NOT_SUPPORTED, note_once
from pipeline.artifacts.errors import CannotWriteError

ABSENT = (*NOT_SUPPORTED, errno.ENOLCK)
POLL_S = 0.05
FOREVER = float("inf")


def lock(path: str | Path, *, shared: bool = False, wait_s: float = 0.0) -> IO[bytes] | None:
    """Return the open file that holds the lock until it is closed here and in every child that inherited it; None when
    another process still holds it after `wait_s`.

    The file is `path`, which is made unless the lock is shared, or where that cannot be locked one of this machine.
    """
    file: IO[bytes] = open(path, "rb" if shared else "ab")  # noqa: SIM115 - the lock lives as long as the file is open
    deadline = time.monotonic() + wait_s
    operation = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    operation |= 0 if wait_s == FOREVER else fcntl.LOCK_NB
    while True:
        try:
            fcntl.flock(file, operation)
            return file
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.close()
                return None
            time.sleep(POLL_S)
        except OSError as error:
            file.close()
            if error.errno not in ABSENT:
                raise
            if is_stand_in(file):
                raise CannotWriteError(
                    f"{Path(path).parent}: neither its file system nor that of {tempfile.gettempdir()} has locks ({error.strerror}), so two "
                    "starts of one run could not be told apart. Set TMPDIR to a folder that has."
                ) from None
            note_once(
                f"{Path(path).parent}: its file system has no locks ({error.strerror}), so two starts are told apart on this machine only. "
                "Do not start one run, or prepare its data, on two machines at once",
                about=f"locks {os.stat(path).st_dev}",
            )
            file = open(_stand_in(Path(path)), "ab")  # noqa: SIM115


def is_stand_in(file: IO[bytes]) -> bool:
    """Return whether a lock holds on this machine only, as the path's own file system has none."""
    return Path(file.name).parent == _folder()


@contextmanager
def file_lock(path: str | Path, *, blocking: bool = True) -> Iterator[bool]:
    """Hold an exclusive lock on a file while the block runs; yields whether it is held."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    held = lock(path, wait_s=FOREVER if blocking else 0.0)
    try:
        yield held is not None
    finally:
        if held is not None:
            held.close()


def _folder() -> Path:
    return Path(tempfile.gettempdir()) / f"tandem-locks-{os.getuid()}"


def _stand_in(path: Path) -> Path:
    _folder().mkdir(mode=0o700, exist_ok=True)
    return _folder() / hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]
