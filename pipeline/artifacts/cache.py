"""The folder where prepared data lives between runs."""

import os
from pathlib import Path

from pipeline.artifacts.errors import CannotWriteError

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
            "data.cache_dir: this user has no home folder to keep prepared data in. Set TANDEM_CACHE, HOME or data.cache_dir."
        ) from None


def cache_of_run(value: str | None) -> Path:
    """Return the cache that a run's own recipe names, where it is one already; else the user's, since somebody else may have written
    the recipe, and what is evaluated must not be written where it says."""
    named = cache_dir(value)
    if sum((named / part).is_dir() for part in PARTS) > 1:
        return named
    own = cache_dir()
    return named if named.is_relative_to(own) else own


def can_be_made(folder: Path) -> bool:
    """Return whether the folder is there or could be made, as far as its nearest ancestor tells."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return there.is_dir() and os.access(there, os.W_OK)
