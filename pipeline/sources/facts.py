"""What was found out about a file, kept under the cache by path, size and time of change: a second start reads no byte."""

import hashlib
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pipeline.artifacts.atomic import read_json, write_json
from pipeline.sources.raw_rows import count_rows


@dataclass
class Facts:
    """sha256 and size of the file as it lies on disk; rows: as `raw_rows` counts them, None until asked for.

    checked: keys of the readings that were found sound.
    """

    path: str
    size: int
    mtime_ns: int
    sha256: str = ""
    rows: int | None = None
    checked: list[str] = field(default_factory=list)


class FactsOfFiles:
    """Facts by file, with their store in `folder`."""

    def __init__(self, folder: Path):
        self.folder = folder

    def of(self, path: Path) -> Facts:
        """What is known and still true of the file; its sha256 at least, computed now if need be."""
        status = os.stat(path)
        place = self._place(path)
        try:
            facts = Facts(**read_json(place))
        except (OSError, ValueError, TypeError):
            facts = None
        if (
            facts is None
            or (facts.path, facts.size, facts.mtime_ns) != (str(path), status.st_size, status.st_mtime_ns)
            or not facts.sha256
        ):
            facts = Facts(path=str(path), size=status.st_size, mtime_ns=status.st_mtime_ns, sha256=_sha256(path))
            self.keep(facts)
        return facts

    def rows(self, path: Path) -> int:
        """How many rows the file has; blank lines of a jsonl count."""
        facts = self.of(path)
        if facts.rows is None:
            facts.rows = count_rows(path)
            self.keep(facts)
        return facts.rows

    def keep(self, facts: Facts) -> None:
        write_json(self._place(Path(facts.path)), asdict(facts))

    def head_is_known(self, reading: str) -> bool:
        """Whether a file that is not fetched yet began and ended as it should when it was looked at."""
        return self._head(reading).exists()

    def keep_head(self, reading: str) -> None:
        self._head(reading).parent.mkdir(parents=True, exist_ok=True)
        self._head(reading).touch()

    def _head(self, reading: str) -> Path:
        return self.folder / "files" / f"{hashlib.sha256(reading.encode()).hexdigest()[:24]}.head"

    def _place(self, path: Path) -> Path:
        return self.folder / "files" / f"{hashlib.sha256(str(path).encode()).hexdigest()[:24]}.json"


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
