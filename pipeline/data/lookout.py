"""Looks for a watch-list in the text of a sequence of shards, while it is tokenized or afterwards.

<folder>/seen-00000-<watch-list's id>.safetensors   ngrams: sorted uint64 hashes that stood in the text read for this shard

A shard's text is that of the blocks from the one in work when the shard before was sealed to the one in work when this
one was, both included: what a writer that was stopped in between reads again. Rows may be packed a little later than
their text is read, so the first shards' files tell of a few documents more than are in these shards, never of fewer.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.artifacts.atomic import write_bytes
from pipeline.data.shards import read_seal, safetensors_bytes
from pipeline.data.watchlist import Watchlist, sorted_once


def seen_path(folder: Path, number: int, watchlist_id: str) -> Path:
    return folder / f"seen-{number:05d}-{watchlist_id}.safetensors"


def read_seen(folder: Path, number: int, watchlist_id: str) -> np.ndarray | None:
    """The watched n-grams in a shard's text, or None when nobody looked."""
    from safetensors.numpy import load_file

    path = seen_path(folder, number, watchlist_id)
    return load_file(path)["ngrams"] if path.exists() else None


def write_seen(folder: Path, number: int, watchlist_id: str, ngrams: list[np.ndarray]) -> None:
    path = seen_path(folder, number, watchlist_id)
    if not path.exists():
        write_bytes(path, safetensors_bytes({"ngrams": sorted_once(ngrams)}))


def texts_of(items: list) -> list[str]:
    """The text of documents, and of conversations what their messages say, as one text each."""
    return [
        item.text if hasattr(item, "text") else "\n".join(message.get("content") or "" for message in item.messages)
        for item in items
    ]


class Lookout:
    """Beside a writer of shards, on a thread of its own: numpy and the tokenizer let each other work."""

    def __init__(self, folder: Path, watchlist: Watchlist):
        self.folder, self.watchlist = folder, watchlist
        self.thread = ThreadPoolExecutor(1)
        self.found: list[Future] = []

    def look(self, items: list) -> None:
        """Look at a block that is about to be packed; an empty one when there is no more."""
        self.found.append(self.thread.submit(lambda: self.watchlist.found(texts_of(items))))

    def seal(self, number: int) -> None:
        """Keep what was found for a shard, before its seal is written: a sealed shard was looked at whole or not at all."""
        write_seen(self.folder, number, self.watchlist.id, [found.result() for found in self.found])
        self.found = self.found[-1:]


def look_again(folder: Path, number: int, *, source: Any, watchlist: Watchlist) -> None:
    """Look at the text of a sealed shard, read once more from its source; nothing is tokenized."""
    begin = {"file": 0, "block": 0, "finishing": False}
    if number:
        begin = read_seal(folder, number - 1)["cursor"]
    end = read_seal(folder, number)["cursor"]
    found = []
    for block in source.read(file=begin["file"], block=begin["block"]) if not begin["finishing"] else ():
        found.append(watchlist.found(texts_of(block.items)))
        if (block.file, block.index) == (end["file"], end["block"]):
            break
    write_seen(folder, number, watchlist.id, found)
