"""Where prepared data lives between runs, and the locks that keep two processes from preparing it at once."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_dir(value: str | None = None) -> Path:
    """The folder of tokenizers and shards: the recipe's, else $TANDEM_CACHE, else ~/.cache/tandem."""
    return Path(value or os.environ.get("TANDEM_CACHE") or Path.home() / ".cache" / "tandem").expanduser().absolute()


@contextmanager
def file_lock(path: str | Path, *, blocking: bool = True) -> Iterator[bool]:
    """Hold an exclusive lock on a file while the block runs; yields whether it is held.

    The kernel drops it when the process dies, however it dies: a lock file left behind locks nothing.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if blocking else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
