"""The order in which shards are made: what the run reads first is made first."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pipeline.data.lookout import look_again, seen_path
from pipeline.data.plan import ROLES, open_stream, sequence_folder
from pipeline.data.sequence_writer import SequenceWriter
from pipeline.data.shards import is_damaged, shard_path
from pipeline.data.stream import Stream
from pipeline.data.watchlist import Watchlist


def streams_of(plan: dict) -> dict[str, Stream]:
    return {role: stream for role in ROLES if (stream := open_stream(plan, role)) is not None}


def next_shard(streams: dict[str, Stream]) -> tuple[str, int] | None:
    """(role, source) of the shard to make next; None when all that the run needs is sealed."""
    for role, stream in streams.items():
        source = stream.missing()
        if source is not None:
            return role, source
    return None


Made = tuple[str, int, Stream]  # role, source, stream of a shard that was just made
GoOn = Callable[[], bool]


class Workshop:
    """Writers for the sequences of a plan. sources: (train, validation); the caller holds the plan's locks."""

    def __init__(self, plan: dict, tokenizer: Any, *, sources: tuple[list, list]):
        self.plan, self.tokenizer = plan, tokenizer
        self.sources = {"train": sources[0], "validation": sources[1], "documents": sources[1]}
        self.streams = streams_of(plan)
        self.writers: dict[Path, SequenceWriter] = {}
        self.watchlist = Watchlist.load(plan["watchlist"]) if plan["watchlist"] else None

    def writer(self, role: str, source: int, from_shard: int | None = None) -> SequenceWriter:
        about = self.plan[role]["sequences"][source]
        return SequenceWriter(
            sequence_folder(self.plan, about),
            source=self.sources[role][source],
            tokenizer=self.tokenizer,
            settings=about["settings"],
            num_proc=self.plan["num_proc"],
            from_shard=from_shard,
            watchlist=self.watchlist
            if role == "train" and from_shard is None
            else None,  # looked at when it was sealed
        )

    def prepare(self, go_on: GoOn = lambda: True) -> Iterator[Made]:
        """Make every shard that the plan needs and lacks, yielding after each; go_on is asked in between."""
        while go_on() and (work := next_shard(self.streams)) is not None:
            role, source = work
            self.extend(role, source)
            yield role, source, self.streams[role]

    def extend(self, role: str, source: int) -> None:
        """Seal the next shard of a source, or its end."""
        folder = self.streams[role].sequences[source].folder
        if folder not in self.writers:
            self.writers[folder] = self.writer(role, source)
        self.writers[folder].extend()
        for stream in self.streams.values():
            stream.refresh()

    def repair(self, *, verify: bool) -> Iterator[Made]:
        """Make again the sealed shards whose file is missing or of another size than sealed; with verify, content."""
        for role, source, number in damaged_shards(self.plan, self.streams, verify=verify):
            self.make_again(role, source, number)
            yield role, source, self.streams[role]

    def look_again(self) -> Iterator[Made]:
        """Look for the watch-list in the text of training shards that were sealed without it, which reads their sources."""
        if self.watchlist is None:
            return
        stream = self.streams["train"]
        for source, number in unchecked_shards(stream, self.watchlist.id):
            folder, read_from = stream.sequences[source].folder, self.sources["train"][source]
            look_again(folder, number, source=read_from, watchlist=self.watchlist)
            yield "train", source, stream

    def make_again(self, role: str, source: int, number: int) -> None:
        writer = self.writer(role, source, from_shard=number)
        while writer.number <= number:
            writer.extend()


def unchecked_shards(stream: Stream, watchlist_id: str) -> list[tuple[int, int]]:
    """(source, shard) of the sealed training shards that the run needs and whose text was not held against the watch-list."""
    return [
        (source, number)
        for source, sequence in enumerate(stream.sequences)
        for number in range(stream.shards_needed(source))
        if not seen_path(sequence.folder, number, watchlist_id).exists()
    ]


def damaged_shards(plan: dict, streams: dict[str, Stream], *, verify: bool) -> list[tuple[str, int, int]]:
    """(role, source, shard) of the sealed shards that the run needs and that are not as they were sealed.

    With data.keep_shards a missing file is no damage: used shards are deleted.
    """
    return [
        (role, source, number)
        for role, stream in streams.items()
        for source, sequence in enumerate(stream.sequences)
        for number in range(stream.shards_needed(source))
        if is_damaged(sequence.folder, number, verify=verify)
        and not (plan["keep_shards"] and role == "train" and not shard_path(sequence.folder, number).exists())
    ]
