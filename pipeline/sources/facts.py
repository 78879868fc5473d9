"""Facts about files, kept under the cache by path, size and times of change: a second start reads no byte.

files/<folder>.jsonl    a line for each thing found out about a file of that folder, the last one counts; each with a checksum
files/<reading>.head    a file of the Hub began and ended as it should when it was looked at

Lines are appended and not made durable one by one, which took 236 s for 3,000 small files: what a power cut takes is found
out again. The time of change of the inode (ctime) is compared too, since `rsync -t` and `cp -p` give other content the old
time. Inode numbers are not: network and FUSE file systems make them up anew at each mount.
"""

import hashlib
import json
import os
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pipeline.artifacts.atomic import parse_json, sum_of, write_bytes
from pipeline.sources.raw_rows import count_rows

SPARE_LINES = 1000  # that a file of facts may have beyond four a file before it is written anew


@dataclass
class Facts:
    """sha256 and size of the file as it lies on disk; rows: as `raw_rows` counts them, None until asked for.

    checked: keys of the readings that were found sound.
    """

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    sha256: str = ""
    rows: int | None = None
    checked: list[str] = field(default_factory=list)


class FactsOfFiles:
    """Facts by file, with their store in `folder`. Threads and processes may share the store."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._known: dict[Path, dict[str, Facts]] = {}  # store -> path -> facts
        self._lock = threading.Lock()

    def of(self, path: Path) -> Facts:
        """What is known and still true of the file; its sha256 at least, computed now if need be."""
        status = os.stat(path)
        facts = self._facts(path)
        now = (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        if facts is None or (facts.size, facts.mtime_ns, facts.ctime_ns) != now:
            facts = Facts(str(path), *now, sha256=_sha256(path))
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
        value = asdict(facts)
        store = self._store(Path(facts.path))
        with self._lock:
            self._of_store(store)[facts.path] = facts
            store.parent.mkdir(parents=True, exist_ok=True)
            with open(store, "ab") as file:
                file.write(_line(value))

    def head_is_known(self, reading: str) -> bool:
        """Whether a file that is not fetched yet began and ended as it should when it was looked at."""
        return self._head(reading).exists()

    def keep_head(self, reading: str) -> None:
        self._head(reading).parent.mkdir(parents=True, exist_ok=True)
        self._head(reading).touch()

    def _head(self, reading: str) -> Path:
        return self.folder / "files" / f"{hashlib.sha256(os.fsencode(reading)).hexdigest()[:24]}.head"

    def _store(self, path: Path) -> Path:
        return self.folder / "files" / f"{hashlib.sha256(os.fsencode(path.parent)).hexdigest()[:24]}.jsonl"

    def _facts(self, path: Path) -> Facts | None:
        with self._lock:
            return self._of_store(self._store(path)).get(str(path))

    def _of_store(self, store: Path) -> dict[str, Facts]:
        if store not in self._known:
            lines = store.read_bytes().splitlines() if store.exists() else []
            known = {facts.path: facts for line in lines if (facts := _facts_in(line))}
            if (
                len(lines) > 4 * len(known) + SPARE_LINES
            ):  # of a line that another process adds meanwhile the fact is found out again
                write_bytes(store, b"".join(_line(asdict(facts)) for facts in known.values()))
            self._known[store] = known
        return self._known[store]


def _line(value: dict) -> bytes:
    # ASCII: a path that is not UTF-8 stays what it is. The line end before it closes a line that a crash has torn.
    return b"\n" + json.dumps({**value, "sum": sum_of(value)[:16]}).encode() + b"\n"


def _facts_in(line: bytes) -> Facts | None:
    """The facts of a line as it was written; a damaged or a torn one has none."""
    try:
        value = parse_json(line)
        own_sum = value.pop("sum", None)
        return Facts(**value) if own_sum == sum_of(value)[:16] else None
    except (ValueError, TypeError):
        return None


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
