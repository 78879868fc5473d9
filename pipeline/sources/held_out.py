"""Files of a source, or rows of its only file, that are kept from training where data.validation names nothing.

A source gives its last file in sorted order, as nanochat does with its last shard, when that file is large enough to be
scored. Of many small files one says little (and the last of them in sorted order is of one subject, author or day), so
files drawn by a hash of their names are held out until they are a share of the text. A source of a single file gives
rows: of every `period` consecutive rows one, at a place drawn by a hash, so that neither a sorted nor an interleaved file
biases the choice. All of it is arithmetic on names, sizes and row numbers: the same on every machine.
"""

import hashlib
import os
from typing import Any

from pipeline.artifacts.errors import DataError
from pipeline.sources.facts import FactsOfFiles
from pipeline.sources.files import SourceFile

ENOUGH_BYTES = 200_000  # Of files; the tenth part of them is what BPB moves by from one sample of text to another.
SHARE = 0.01  # Of the bytes of all files, where files are drawn.
MOST = 0.10  # Of the bytes of all files, whatever ENOUGH_BYTES asks for.

MIN_ROWS = 8  # Held out at least, where the file has twice as many.
MAX_PERIOD = 100  # One per cent of a large file.


def held_out_files(files: list[SourceFile], *, pinned: list[str] | None = None) -> list[SourceFile]:
    """The files, given in sorted order and at least two, that a source keeps from training.

    pinned: labels that a run has begun with; followed as long as all of them are there.
    """
    by_label = {file.label: file for file in files}
    if pinned and len(pinned) < len(files) and all(label in by_label for label in pinned):
        return [by_label[label] for label in sorted(pinned)]
    sizes = {file.label: _size(file) for file in files}
    whole, last = sum(sizes.values()), files[-1]
    if sizes[last.label] >= min(ENOUGH_BYTES, MOST * whole):
        return [last]
    wanted, held, taken = max(ENOUGH_BYTES, SHARE * whole), 0, []
    for file in sorted(files, key=lambda file: hashlib.sha256(os.fsencode(file.label)).digest()):
        if held < wanted and held + sizes[file.label] <= MOST * whole:
            held += sizes[file.label]
            taken.append(file)
    return sorted(taken, key=lambda file: file.label)


def hold_out_copies(train: list[SourceFile], held: list[SourceFile]) -> None:
    """Move files of the content of a held-out one out of training, unless nothing is left: names say nothing of content."""
    contents = {file.sha256 for file in held}
    rest = [file for file in train if file.sha256 not in contents]
    if rest:
        held += sorted((file for file in train if file.sha256 in contents), key=lambda file: file.label)
        train[:] = rest


def split_rows(train: SourceFile, held: SourceFile, facts: FactsOfFiles) -> None:
    """Let a source's only file, given twice, be its training rows and its validation rows. Raises DataError for one row."""
    path = train.local_path()
    rows = facts.rows(path)
    period = period_of(rows)
    if not period:
        raise DataError(
            f"{path} has {rows} row and is the source's only file, so nothing can be held out for validation. Add rows, or name data.validation."
        )
    train.part, held.part = "train", "validation"
    train.period = held.period = period


def use_held_out(recipe: Any, inputs: dict[str, Any]) -> None:
    """Let the recipe's sources hold out the files that a manifest's inputs name, whatever they would choose by now."""
    if recipe.data.validation is None:
        recipe.data.held_out = {
            source["name"]: [file["label"] for file in source["files"] if "part" not in file]
            for source in inputs.get("validation", [])
        }


def period_of(rows: int) -> int:
    """Of how many consecutive rows one is held out; 0 when the file has too few rows to part with one."""
    return 0 if rows < 2 else max(2, min(MAX_PERIOD, rows // MIN_ROWS))


def is_held_out(row: int, period: int) -> bool:
    group, place = divmod(row, period)
    drawn = int.from_bytes(hashlib.blake2b(str(group).encode(), digest_size=8).digest(), "big")
    return drawn % period == place


def _size(file: SourceFile) -> int:
    return file.bytes or (os.stat(file.path).st_size if file.path else 0)
