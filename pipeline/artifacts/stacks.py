"""stacks/attempt-<n>/: where every rank stood when the run hung or lost a rank, for people and for the other ranks.

rank-<n>.txt holds the stacks of all threads of a rank; empty, it says that the rank trains. rank-<n>.json says where it
stood. All ranks share the run directory, so the files also tell the ranks of each other.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from pipeline.artifacts.atomic import raise_if_moved, read_json, write_json
from pipeline.artifacts.run_directory import RunDirectory


class Stacks:
    """One rank's files of one attempt."""

    def __init__(self, run: RunDirectory, *, rank: int, attempt: int):
        self.folder, self.rank = run.path / "stacks" / f"attempt-{attempt}", rank

    def _text(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.txt"

    def open(self) -> IO[str]:
        """This rank's empty file for stacks: opened in advance, since a process that hangs may not be able to."""
        for left in self.folder.parent.glob(f"attempt-*/rank-{self.rank}.txt"):
            if left.stat().st_size == 0:  # of an attempt that was killed
                _remove(left)
        raise_if_moved(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        return open(self._text(self.rank), "w", encoding="utf-8")

    def trains(self, rank: int) -> bool:
        """Whether that rank has begun to train in this attempt and not come to the end of it."""
        return self._text(rank).exists()

    def touch(self) -> None:
        """Say that this rank works: it is alive, and those that wait for it need not wonder."""
        os.utime(self._text(self.rank))

    def touched(self) -> dict[int, float]:
        """By other rank that trains, when it last said so; by the clock of the file system, to be compared with itself only."""
        texts = {int(text.stem.partition("-")[2]): text for text in self.folder.glob("rank-*.txt")}
        return {rank: text.stat().st_mtime for rank, text in texts.items() if rank != self.rank}

    def tell(self, place: dict[str, Any]) -> None:
        """Write where this rank stands: from now on every rank knows that the run is at an end."""
        write_json(self.folder / f"rank-{self.rank}.json", place)

    def told(self) -> dict[int, dict[str, Any]]:
        """What ranks have told, by rank."""
        places = []
        with suppress(OSError):  # of a disk that is away: asked again in a second
            places = [read_json(path) for path in self.folder.glob("rank-*.json")]
        return {place["rank"]: place for place in places}

    def clear(self) -> None:
        """This rank has come to the end of its training: it leaves no empty file."""
        _remove(self._text(self.rank))
        with suppress(OSError):  # not empty: stacks of an earlier attempt
            self.folder.parent.rmdir()


def _remove(text: Path) -> None:
    text.unlink(missing_ok=True)
    with suppress(OSError):  # not empty: another rank's file
        text.parent.rmdir()
