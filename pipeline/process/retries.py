"""Reading again after an error that may pass, and a count of these retries.

An error of a disk or a network file system is one of these; a Hub that is away counts too (sources/hub_files.py). What is
read through a memory map has no errors to try again: there the kernel ends the process (SIGBUS).
"""

import errno
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pipeline.process.errors import DataError

LOG = logging.getLogger(__name__)
PASSING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
ATTEMPTS = 4
FIRST_WAIT_S = 0.5  # doubled after each attempt
T = TypeVar("T")

_made = 0
_kept_in: Path | None = None


def note_retry() -> None:
    """Count that something is about to be read again."""
    global _made
    _made += 1
    if _kept_in is not None:
        with open(_kept_in, "ab") as file:
            file.write(b"\n")


def retries() -> int:
    """Return how often this process has read something again."""
    return _made


def keep_retries_in(path: Path, *, anew: bool = True) -> None:
    """Write each later retry as a line of that file too, by which another process counts them (`retries_in`). anew: from 0."""
    global _kept_in
    if anew:
        path.unlink(missing_ok=True)
    _kept_in = path


def retries_in(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def may_pass(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in PASSING


def wait_or_raise(error: OSError, *, attempt: int, path: Path) -> None:
    """Wait before another attempt at reading. Raises the error when it stays, DataError after so many attempts."""
    if not may_pass(error):
        raise error
    if attempt >= ATTEMPTS:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}) in {attempt} attempts, so its rows are missing. Look at the disk or the network "
            "that it lies on, or copy it to another one; then run the same command again."
        ) from error
    wait_s = FIRST_WAIT_S * 2 ** (attempt - 1)
    LOG.warning("%s: %s, reading it again in %.1f s (%d of %d)", path, error.strerror, wait_s, attempt + 1, ATTEMPTS)
    note_retry()
    time.sleep(wait_s)


def read_again(read: Callable[[], T], *, path: Path) -> T:
    """Return what `read` gives, tried again after errors that may pass."""
    attempt = 1
    while True:
        try:
            return read()
        except OSError as error:
            wait_or_raise(error, attempt=attempt, path=path)
            attempt += 1
