"""Sealed shards of rows on disk, and all shards of one source as readers see them.

A folder of shards lies under its cache key (row_plan.py) and holds

- shard-00000.safetensors: input_ids (rows, T+1) uint16 or uint32; origins (rows, 3) int32: file, row group and row of
  what begins the row; used (rows,) int32 positions before the padding; targets (rows,) int32 trained positions. Of
  conversations also trained and starts, (rows, ceil((T+1)/8)) uint8 of bits; of validation under a tokenizer whose ids
  have no fixed bytes also target_bytes (rows, T+1) int32.
- shard-00000.json: the seal with counts, bytes, sha256 and bad rows, written last. A shard without it does not exist.
- state-00000.safetensors: the packer as it was where preparation continues behind this shard.
- end.json: the source is used up; its rows and shards in all.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.process.commands import program
from pipeline.process.errors import DamagedFileError, DataError
from pipeline.process.network import read_again
from pipeline.process.storage import read_sealed_json, sha256_file

NO_TEXT = -1  # the bytes of a control token, in rows that carry the bytes of their tokens
FORMAT = 1  # part of every key: raise it when the same inputs give other bytes
OPEN_SHARDS = 8  # kept mapped; the rows of a step lie in one or two shards of a source
# Kinds of a seal's values that every version wrote; those of earlier versions have no checksum of their own.
SEAL = {
    **dict.fromkeys(("rows", "positions", "targets", "padded", "bytes"), int),
    "sha256": str,
    "bad_rows": list,
    "cursor": dict,
    "read": dict,
}
END = {"shards": int, "bad_rows": list, "read": dict}
NUMPY_TYPES = {"U8": "u1", "BOOL": "?", "U16": "<u2", "I32": "<i4", "U32": "<u4", "I64": "<i8", "U64": "<u8"}


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.safetensors"


def seal_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.json"


def end_path(folder: Path) -> Path:
    return folder / "end.json"


def state_path(folder: Path, number: int) -> Path:
    return folder / f"state-{number:05d}.safetensors"


def read_seal(folder: Path, number: int) -> dict[str, Any]:
    """Return the seal of a shard. Raises DamagedFileError when it is not as it was written, FileNotFoundError without
    one."""
    return _read(seal_path(folder, number), SEAL)


def read_end(folder: Path) -> dict[str, Any]:
    """Return end.json. Raises what read_seal does."""
    return _read(end_path(folder), END)


def _read(path: Path, kinds: dict[str, type]) -> dict[str, Any]:
    found = read_sealed_json(path)
    if any(type(found.get(name)) is not kind for name, kind in kinds.items()):
        raise DamagedFileError(f"{path}: does not describe shards. Run the same command again: it is made anew.")
    return found


def damaged_seals(folder: Path) -> list[Path]:
    """Return the seals and the end of a folder that are not as they were written."""
    damaged = []
    for path in [*sorted(folder.glob("shard-*.json")), end_path(folder)]:
        try:
            _read(path, END if path == end_path(folder) else SEAL)
        except FileNotFoundError:
            continue
        except DamagedFileError:
            damaged.append(path)
    return damaged


class Shard:
    """Memory-mapped arrays of a shard; reading a row is a copy out of the page cache."""

    def __init__(self, path: Path):
        arrays: dict[str, Any] = map_tensors(path)
        self.input_ids: np.ndarray = arrays["input_ids"]
        self.origins: np.ndarray = arrays["origins"]
        self.used: np.ndarray = arrays["used"]
        self.targets: np.ndarray = arrays["targets"]
        self.trained: np.ndarray | None = arrays.get("trained")
        self.starts: np.ndarray | None = arrays.get("starts")
        self.target_bytes: np.ndarray | None = arrays.get("target_bytes")


def is_damaged(folder: Path, number: int, *, verify: bool) -> bool:
    """Return whether a sealed shard's file is missing or of another size than its seal says; with verify, of other
    content."""
    path, seal = shard_path(folder, number), read_seal(folder, number)
    if not path.exists() or path.stat().st_size != seal["bytes"]:
        return True
    return verify and sha256_file(path) != seal["sha256"]


def open_shard(folder: Path, number: int) -> Shard:
    """Return the shard, its content checked against its seal. Raises DataError when they differ."""
    path = shard_path(folder, number)
    if read_again(lambda: is_damaged(folder, number, verify=True), path=path):
        raise DataError(
            f"{path}: this prepared shard is missing or is not as it was written. Run `{program('data')} RECIPE`, "
            "which makes it again, then this command again."
        )
    return Shard(path)


def map_tensors(path: Path) -> dict[str, np.ndarray]:
    """Return every tensor of a safetensors file as a read-only memory map, which safetensors' own reader copies."""
    # 8 bytes with the size of the header, the header in JSON, then the tensors.
    whole = np.memmap(path, dtype=np.uint8, mode="r")
    size = int.from_bytes(whole[:8].tobytes(), "little")
    header = json.loads(whole[8 : 8 + size].tobytes())
    tensors = {}
    for name, about in header.items():
        begin, end = about["data_offsets"]
        content = whole[8 + size + begin : 8 + size + end]
        # A plain ndarray on the same memory: indexing a np.memmap costs microseconds a row.
        tensors[name] = np.asarray(content).view(NUMPY_TYPES[about["dtype"]]).reshape(about["shape"])
    return tensors


def documents_begun(input_ids: np.ndarray, used: np.ndarray, starts: np.ndarray | None, *, bos: int) -> np.ndarray:
    """Return (n,) how many conversations (starts, (n, T + 1) bool) or pieces of text (each begins with BOS) begin in
    each row.

    A document that packing cut in two or more counts with every piece. A row's last token is the next row's first
    under `concat`, so what begins there begins in the next row.
    """
    begins = input_ids == bos if starts is None else starts
    row, at = np.divmod(np.flatnonzero(begins), begins.shape[1])
    counts = at < np.minimum(used[row], begins.shape[1] - 1)  # padding may have the id of BOS, or a start
    return np.bincount(row[counts], minlength=len(begins))


class ShardedDataset:
    """The sealed shards of one cache key, which only ever grow at the end, until the source is used up.

    rows: sealed so far. end: None until all there is is sealed. sums: for each n up to the number of seals, targets,
    padding and documents of the first n shards; without documents where not counts_documents, as of shards that an
    earlier version sealed.
    """

    def __init__(self, folder: str | Path, *, shard_rows: int):
        self.folder, self.shard_rows = Path(folder), shard_rows
        self.seals: list[dict] = []
        self.rows = 0
        self.sums = [np.zeros(3, np.int64)]
        self.counts_documents = True
        self.end: dict | None = None
        self._open: dict[int, Shard] = {}
        self.refresh()

    @property
    def length(self) -> int | None:
        """Return rows of the whole source; None until all there is is sealed."""
        return None if self.end is None else self.rows

    def refresh(self) -> bool:
        """Look for new seals; return whether there were any."""
        if self.end is not None:
            return False
        before = len(self.seals)
        # The end first: shards sealed between the two looks are then counted, never missed.
        end = read_end(self.folder) if end_path(self.folder).exists() else None
        while seal_path(self.folder, len(self.seals)).exists():
            seal = read_seal(self.folder, len(self.seals))
            self.seals.append(seal)
            self.rows += seal["rows"]
            self.sums.append(self.sums[-1] + [seal["targets"], seal["padded"], seal.get("documents", 0)])
            self.counts_documents &= "documents" in seal
        # A seal that is missing before the end is to be made again: without it rows would be left out in silence.
        if end and len(self.seals) >= end["shards"]:
            self.end = end
        return self.end is not None or len(self.seals) > before

    def shard(self, number: int) -> Shard:
        """Return the shard, verified against its seal when it is opened."""
        if number not in self._open:
            while len(self._open) >= OPEN_SHARDS:  # the one that was opened first
                del self._open[next(iter(self._open))]
            self._open[number] = open_shard(self.folder, number)
        return self._open[number]

    def bad_rows(self, shards: int) -> list[str]:
        """Return the unreadable rows named in the first `shards` seals."""
        seals = self.seals[:shards]
        if self.end and shards >= len(self.seals):
            seals = [*seals, self.end]
        return [line for seal in seals for line in seal["bad_rows"]]

    def totals(self, shards: int | None = None) -> dict[str, Any]:
        """Return sums over the first `shards` seals (all sealed): shards rows positions targets padded bytes bad_rows,
        and what was read of the source by then: documents text_tokens text_bytes cropped_tokens ..."""
        # Counts of what was read only grow: those of the last seal, or of the end, are those of all.
        seals = self.seals[:shards]
        last: dict[str, Any] = seals[-1] if seals else {"read": {}}
        if self.end and len(seals) == len(self.seals):
            last = self.end
        sums: dict[str, Any] = {"shards": len(seals), "bad_rows": len(self.bad_rows(len(seals)))}
        for name in ("rows", "positions", "targets", "padded", "bytes"):
            sums[name] = sum(seal[name] for seal in seals)
        return {**sums, **last["read"]}
