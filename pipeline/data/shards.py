"""A sealed shard: a safetensors file of rows, and a JSON seal that is written last.

<folder>/shard-00000.safetensors   input_ids (rows, T+1) uint16|uint32, origins (rows, 3) int32 = pq, rg, row;
                                   used (rows,) int32 positions before the padding, targets (rows,) int32 trained ones;
                                   conversations also trained and starts, (rows, ceil((T+1)/8)) uint8 of bits;
                                   validation under a tokenizer without fixed bytes also target_bytes (rows, T+1) int32
<folder>/shard-00000.json          the seal: counts, bytes, sha256, bad rows; a shard without it does not exist
<folder>/state-00000.safetensors   the packer where preparation goes on after this shard (the newest and every 16th are kept)
<folder>/end.json                  the source is used up: rows and shards in all
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.data.packing import PackedRows
from pipeline.process.commands import program
from pipeline.process.errors import DamagedFileError, DataError
from pipeline.process.retries import read_again
from pipeline.process.storage import read_sealed_json, sha256_file, write_bytes, write_sealed_json

FORMAT = 1  # part of every key: raise it when the same inputs give other bytes


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.safetensors"


def seal_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.json"


def seen_path(folder: Path, number: int, watchlist_id: str) -> Path:
    """Return where the matches of a watch-list (evals/decontamination.py) in a shard's text lie, once it was searched."""
    return folder / f"seen-{number:05d}-{watchlist_id}.safetensors"


def end_path(folder: Path) -> Path:
    return folder / "end.json"


def state_path(folder: Path, number: int) -> Path:
    return folder / f"state-{number:05d}.safetensors"


def shard_tensors(rows: PackedRows) -> dict[str, np.ndarray]:
    tensors = {"input_ids": rows.input_ids, "origins": rows.origins, "used": rows.used, "targets": rows.targets}
    if rows.trained is not None and rows.starts is not None:
        tensors |= {"trained": np.packbits(rows.trained, axis=1), "starts": np.packbits(rows.starts, axis=1)}
    if rows.target_bytes is not None:
        tensors["target_bytes"] = rows.target_bytes
    return tensors


def safetensors_bytes(tensors: dict[str, np.ndarray]) -> bytes:
    from safetensors.numpy import save

    return save({name: np.ascontiguousarray(array) for name, array in tensors.items()})


def write_shard(folder: Path, number: int, rows: PackedRows, seal: dict) -> dict:
    """Write one shard and then its seal, `seal` completed by the counts of the rows; returns the seal."""
    path, content = shard_path(folder, number), safetensors_bytes(shard_tensors(rows))
    write_bytes(path, content)
    seal = {
        "format": FORMAT,
        "shard": number,
        "rows": len(rows),
        "positions": len(rows) * (rows.input_ids.shape[1] - 1),
        "targets": int(rows.targets.sum()),
        "padded": int(rows.input_ids.size - rows.used.sum()),
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        **seal,
    }
    write_sealed_json(seal_path(folder, number), seal)
    return seal


# What every seal holds, those of earlier versions too, which have no checksum of their own.
COUNTS = ("rows", "positions", "targets", "padded", "bytes")


def read_seal(folder: Path, number: int) -> dict[str, Any]:
    """Return the seal of a shard. Raises DamagedFileError when it is not as it was written, FileNotFoundError without one."""
    seal = read_sealed_json(seal_path(folder, number))
    good = all(type(seal.get(name)) is int for name in COUNTS) and isinstance(seal.get("sha256"), str)
    if not good or not all(
        isinstance(seal.get(name), kind) for name, kind in (("bad_rows", list), ("cursor", dict), ("read", dict))
    ):
        raise DamagedFileError(f"{seal_path(folder, number)}: is no seal of a shard. {MADE_AGAIN}")
    return seal


def read_end(folder: Path) -> dict[str, Any]:
    """Return end.json. Raises DamagedFileError when it is not as it was written, FileNotFoundError without one."""
    end = read_sealed_json(end_path(folder))
    if not (
        type(end.get("shards")) is int and isinstance(end.get("read"), dict) and isinstance(end.get("bad_rows"), list)
    ):
        raise DamagedFileError(f"{end_path(folder)}: is no end of shards. {MADE_AGAIN}")
    return end


MADE_AGAIN = "Run the same command again: it is made anew."


def damaged_seals(folder: Path) -> list[Path]:
    """Return the seals and the end of a folder that are not as they were written."""
    damaged = []
    for path in [*sorted(folder.glob("shard-*.json")), end_path(folder)]:
        try:
            if path == end_path(folder):
                read_end(folder)
            else:
                read_seal(folder, int(path.stem.removeprefix("shard-")))
        except FileNotFoundError:
            continue
        except DamagedFileError:
            damaged.append(path)
    return damaged


@dataclass
class Shard:
    """Memory-mapped tensors of a sealed shard; reading a row is a copy out of the page cache."""

    input_ids: np.ndarray
    origins: np.ndarray
    used: np.ndarray
    targets: np.ndarray
    trained: np.ndarray | None = None
    starts: np.ndarray | None = None
    target_bytes: np.ndarray | None = None


NUMPY_TYPES = {"U8": "u1", "U16": "<u2", "U32": "<u4", "I32": "<i4", "I64": "<i8"}


def is_damaged(folder: Path, number: int, *, verify: bool) -> bool:
    """Return whether a sealed shard's file is missing or of another size than its seal says; with verify, of other content."""
    path, seal = shard_path(folder, number), read_seal(folder, number)
    if not path.exists() or path.stat().st_size != seal["bytes"]:
        return True
    return verify and sha256_file(path) != seal["sha256"]


def open_shard(folder: Path, number: int) -> Shard:
    """Return the shard, its content checked against its seal. Raises DataError when they differ."""
    path = shard_path(folder, number)
    if read_again(lambda: is_damaged(folder, number, verify=True), path=path):
        raise DataError(
            f"{path}: this prepared shard is missing or differs from its seal, so the rows in it are not those that were "
            f"prepared. Run `{program('data')} RECIPE`, which makes it again, then this command again."
        )
    return Shard(**map_tensors(path))


def map_tensors(path: Path) -> dict[str, np.ndarray]:
    """Return every tensor of a safetensors file as a read-only memory map."""
    whole = np.memmap(path, dtype=np.uint8, mode="r")
    size = int.from_bytes(whole[:8].tobytes(), "little")
    header = json.loads(whole[8 : 8 + size].tobytes())
    tensors = {}
    for name, about in header.items():
        if name != "__metadata__":
            begin, end = (8 + size + at for at in about["data_offsets"])
            # A plain ndarray on the same memory: indexing a np.memmap costs microseconds a row.
            tensors[name] = np.asarray(whole[begin:end]).view(NUMPY_TYPES[about["dtype"]]).reshape(about["shape"])
    return tensors
