"""data.keep_shards: token shards that come and go with the reader, for disks that cannot hold a run's data.

The reader notes how many rows it has used and deletes shards behind it; the preparing process stays at most keep_shards
ahead and makes deleted ones again when a later epoch, or a resume from an older checkpoint, needs them.
"""

import time
from pathlib import Path

from pipeline.artifacts.atomic import read_json, remove_file, write_json
from pipeline.data.shards import shard_path
from pipeline.data.stream import Stream
from pipeline.data.work import Workshop

POLL_S = 0.2


def note_used(folder: Path, rows: int) -> None:
    """Say that the first `rows` global rows are used."""
    write_json(folder / "used.json", {"rows": rows})


def used_rows(folder: Path) -> int:
    path = folder / "used.json"
    return read_json(path)["rows"] if path.exists() else 0


def shard_of(stream: Stream, source: int, k: int) -> tuple[int, int]:
    """(shard, first k after it) of a source's running row number k."""
    sequence = stream.sequences[source]
    row = k if sequence.end is None else k % sequence.rows
    shard = row // sequence.shard_rows
    end = (shard + 1) * sequence.shard_rows
    if sequence.end is not None:
        end = min(end, sequence.rows)
    return shard, k - row + end


def delete_used(stream: Stream, rows: int, *, keep: int) -> None:
    """Delete the shards that lie more than `keep` shards behind the first `rows` global rows, in the order of use."""
    for source, k in enumerate(stream.mixture.used(rows)):
        sequence = stream.sequences[source]
        current, _ = shard_of(stream, source, k)
        count = max(1, len(sequence.seals))
        if sequence.end is None:
            behind = list(range(max(0, current - keep)))
        else:  # In a circle, and what lies just ahead is being made: up to keep + 2, as an epoch's last shard is short.
            behind = [(current - keep - i) % count for i in range(1, count - 2 * keep - 2)]
        for number in behind:
            remove_file(shard_path(sequence.folder, number))


def prepare_sliding(workshop: Workshop, folder: Path, *, from_row: int) -> None:
    """Make the training shards from a global row on in the order of use, at most keep_shards ahead of the reader."""
    keep = workshop.plan["keep_shards"]
    note_used(folder, from_row)
    for role, stream in workshop.streams.items():
        while role != "train" and (source := stream.missing()) is not None:
            workshop.extend(role, source)
    stream = workshop.streams["train"]
    while (source := stream.undecided()) is not None:
        workshop.extend("train", source)
    nexts = list(stream.mixture.used(from_row))
    while True:
        uses = [(at, s) for s, k in enumerate(nexts) if (at := stream.mixture.first_use(s, k)) is not None]
        if not uses:
            return
        _, source = min(uses)
        sequence = stream.sequences[source]
        while nexts[source] > stream.mixture.used(used_rows(folder))[source] + keep * sequence.shard_rows:
            time.sleep(POLL_S)
        shard, after = shard_of(stream, source, nexts[source])
        if shard >= len(sequence.seals):
            workshop.extend("train", source)
            if shard >= len(sequence.seals):  # It ended there: the next rows are its first again, or another source's.
                continue
        elif not shard_path(sequence.folder, shard).exists():
            workshop.make_again("train", source, shard)
        nexts[source] = after
