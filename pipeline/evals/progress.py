"""A bar for what takes minutes, on terminals only: a log file would fill with it."""

import sys
from collections.abc import Iterable, Iterator, Sized
from typing import Any


def progress_bar(items: Iterable, *, name: str, shown: bool = True) -> Iterator[Any]:
    """The items, with a bar on stderr while they are gone through; without one when nobody knows how many they are."""
    from tqdm import tqdm

    return iter(
        tqdm(items, desc=name, leave=False, disable=not (shown and isinstance(items, Sized) and sys.stderr.isatty()))
    )
