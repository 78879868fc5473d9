"""Facts about files, kept under the cache by path, size and times of change: a second start hashes no file again."""

import hashlib
import json
import os
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pipeline.process.storage import sha256_file, where_writable
from pipeline.sources.raw_rows import count_rows


@dataclass
class Facts:
    """sha256 and size of the file as it is on disk; rows: as `raw_rows` counts them, None until they are counted.

    checked: keys of the readings that were found sound.
    """

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    sha256: str = ""
    rows: int | None = None
    checked: list[str] = field(default_factory=list)


class FileFacts:
    """Facts by file, with a store for each folder of files, which threads and processes may share."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._known: dict[str, Facts] = {}
        self._read: dict[Path, int] = {}  # store -> bytes of it that were read
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple:
        return type(self), (self.folder,)

    def of(self, path: Path) -> Facts:
        """Return what is known and still true of the file; its sha256 at least, computed now if need be."""
        status = os.stat(path)
        now = (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        facts = self._known.get(str(path))
        if facts is None or (facts.size, facts.mtime_ns, facts.ctime_ns) != now:
            self._read_new_lines(self._store(path))
            facts = self._known.get(str(path))
        if facts is None or (facts.size, facts.mtime_ns, facts.ctime_ns) != now:
            facts = Facts(str(path), *now, sha256=sha256_file(path))
            self.keep(facts)
        return facts

    def rows(self, path: Path) -> int:
        """Return how many rows the file has; blank lines of a jsonl count."""
        facts = self.of(path)
        if facts.rows is None:
            facts.rows = count_rows(path)
            self.keep(facts)
        return facts.rows

    def keep(self, facts: Facts) -> None:
        store = self._store(Path(facts.path))
        # ASCII: a path that is not UTF-8 stays what it is. The line end before it closes a line that a crash has torn.
        line = b"\n" + json.dumps(asdict(facts)).encode() + b"\n"
        self._known[facts.path] = facts
        with self._lock, where_writable():
            store.parent.mkdir(parents=True, exist_ok=True)
            with open(store, "ab") as file:
                file.write(line)

    def _store(self, path: Path) -> Path:
        return self.folder / "files" / f"{hashlib.sha256(os.fsencode(path.parent)).hexdigest()[:24]}.jsonl"

    def _read_new_lines(self, store: Path) -> None:
        if not store.exists():
            return
        with self._lock, open(store, "rb") as file:
            file.seek(self._read.get(store, 0))
            for line in file:
                try:
                    value = json.loads(line)
                    value.pop("sum", None)  # of earlier versions
                    facts = Facts(**value)
                except (ValueError, TypeError, AttributeError, RecursionError):
                    continue  # blank, torn or damaged: found out again
                self._known[facts.path] = facts
            self._read[store] = file.tell()
