"""The folder where prepared data lives between runs."""

import os
from pathlib import Path


def cache_dir(value: str | None = None) -> Path:
    """The folder of tokenizers and shards: the recipe's, else $TANDEM_CACHE, else ~/.cache/tandem."""
    return Path(value or os.environ.get("TANDEM_CACHE") or Path.home() / ".cache" / "tandem").expanduser().absolute()
