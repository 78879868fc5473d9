"""What a source keeps from training where data.validation names nothing.

Of text whole files, in which neighbours are often about the same; of conversations rows of each file, since files are
often of one kind.
"""

import hashlib
import os

from pipeline.process.commands import program
from pipeline.process.errors import DataError
from pipeline.sources.file_facts import FileFacts
from pipeline.sources.files import SourceFile

ENOUGH_BYTES = 200_000  # Of files; the tenth part of them is what BPB moves by from one sample of text to another.
SHARE = 0.01  # Of the bytes of all files, where files are drawn.
MOST = 0.10  # Of the bytes of all files, whatever ENOUGH_BYTES asks for.

MIN_ROWS = 8  # Held out at least, where the file has twice as many.
MAX_PERIOD = 100  # One per cent of a large file.
# Of conversations; of more, which the Hub may still have, one per cent is held out without counting.
COUNTED_BYTES = 2**28
UNCOUNTED_ROWS = 2**32  # of a file, more than any has


def held_out_files(files: list[SourceFile], *, pinned: list[str] | None = None) -> list[SourceFile]:
    """Return the files, given in sorted order and at least two, that a source keeps from training.

    pinned: labels that a run has begun with; followed as long as all of them are there.
    """
    by_label = {file.label: file for file in files}
    if pinned and len(pinned) < len(files) and all(label in by_label for label in pinned):
        return [by_label[label] for label in sorted(pinned)]
    sizes = {file.label: file_size(file) for file in files}
    whole, last = sum(sizes.values()), files[-1]
    if sizes[last.label] >= min(ENOUGH_BYTES, MOST * whole):
        return [last]
    # The last file is too small: more, in an order by their names' hashes, which a new file does not change.
    wanted, held, taken = max(ENOUGH_BYTES, SHARE * whole), 0, []
    for file in sorted(files, key=lambda file: hashlib.sha256(os.fsencode(file.label)).digest()):
        if held < wanted and held + sizes[file.label] <= MOST * whole:
            held += sizes[file.label]
            taken.append(file)
    return sorted(taken, key=lambda file: file.label)


def hold_out_duplicates(train: list[SourceFile], held: list[SourceFile]) -> None:
    """Move files of the content of a held-out one out of training, unless nothing is left: names say nothing of
    content."""
    contents = {file.sha256 for file in held}
    rest = [file for file in train if file.sha256 not in contents]
    if rest:
        held += sorted((file for file in train if file.sha256 in contents), key=lambda file: file.label)
        train[:] = rest


def counted(files: list[SourceFile]) -> bool:
    """Return whether the rows of the files are counted before they are split; the same whatever is fetched by now."""
    return len(files) == 1 or not any(file.fetch for file in files) or sum(map(file_size, files)) <= COUNTED_BYTES


def split_rows(train: list[SourceFile], held: list[SourceFile], facts: FileFacts, *, kind: str) -> None:
    """Let files that are given twice, `held` in sorted order, be the training rows and the validation rows of a
    source, as if they were one file after another. Of copies the same rows are held out. Raises DataError for one
    row."""
    rows, offsets = 0, dict[str, int]()
    are_counted = counted(held)
    for file in held:
        if file.sha256 not in offsets:
            offsets[file.sha256] = rows
            rows += facts.rows(file.local_path()) if are_counted else UNCOUNTED_ROWS
    period = period_of(rows)
    if not period:
        long_text = "Of conversations it takes two or more."
        if kind == "text":
            long_text = f"One long text becomes documents with `{program('init')} FILE`."
        raise DataError(
            f"{held[0].path} has {rows} row and is the source's only file, so nothing can be held out for validation. "
            f"Add rows, or name data.validation. {long_text}"
        )
    for part, files in (("train", train), ("validation", held)):
        for file in files:
            file.part, file.period, file.offset = part, period, offsets[file.sha256]  # type: ignore[assignment]


def period_of(rows: int) -> int:
    """Return of how many consecutive rows one is held out; 0 when the file has too few rows to part with one."""
    return 0 if rows < 2 else max(2, min(MAX_PERIOD, rows // MIN_ROWS))


def is_held_out(row: int, period: int) -> bool:
    # One row of each `period` rows, at a place that is drawn: data in a regular order would be sampled unevenly.
    group, place = divmod(row, period)
    drawn = int.from_bytes(hashlib.blake2b(str(group).encode(), digest_size=8).digest(), "big")
    return drawn % period == place


def file_size(file: SourceFile) -> int:
    if file.bytes or file.path is None:
        return file.bytes
    return os.stat(file.path).st_size  # it is not verified yet
