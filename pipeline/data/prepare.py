"""Shards made by a plan: all of them now, or in the process that prepares ahead of a training."""

import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from pipeline.data.mixture import MixedDataset
from pipeline.data.preparation import RETRIES, START_GRACE_S, Preparation
from pipeline.data.references import add_reference
from pipeline.data.row_plan import damaged_shards, discard_damaged, locks, next_shard, sequence_folder, streams_of
from pipeline.data.shard_writer import ShardWriter
from pipeline.data.workers import EncodedReader, EncodeJob, WorkerPool, has_encoded, processes_for, remove_encoded
from pipeline.hardware.processor import keep_freed_memory
from pipeline.process.commands import end_with, yield_to_training
from pipeline.process.errors import CannotWriteError, DiskFullError, TandemError, from_rust_panic
from pipeline.process.network import keep_retries_in
from pipeline.process.storage import lock, write_json

Made = tuple[str, int, MixedDataset]  # role, source, and the rows of which a shard was just made


class ShardBuilder:
    """Writers for the shards of a plan. sources: (train, validation). The caller holds the plan's locks.

    retries: a file that counts what worker processes read again.
    """

    def __init__(self, plan: dict, tokenizer: Any, *, sources: tuple[list, list], retries: Path | None = None):
        self.plan, self.tokenizer, self.retries = plan, tokenizer, retries
        self.sources = {"train": sources[0], "validation": sources[1], "documents": sources[1]}
        self.streams = streams_of(plan)
        self.writers: dict[Path, ShardWriter] = {}
        self.pool: WorkerPool | None = None
        self.published: Any = None
        self.watchlist: Any = None
        if plan["shards_from"]:
            from pipeline.contrib.published_shards import PublishedShards

            self.published = PublishedShards(plan["shards_from"])
        if plan["watchlist"] and plan["train"]:
            from pipeline.contrib.decontamination import Watchlist

            self.watchlist = Watchlist.load(plan["watchlist"])

    def __enter__(self) -> "ShardBuilder":
        return self

    def __exit__(self, *error: object) -> None:
        """End the worker processes, and delete what they made when nothing more is needed of it."""
        if self.pool is not None:
            self.pool.close()
        if self.published is not None:
            self.published.close()
        if self.plan["train"] and next_shard(self.streams) is None:
            for dataset in self.streams["train"].datasets:
                remove_encoded(dataset.folder)

    def prepare(self) -> Iterator[Made]:
        """Make every shard that the plan needs and lacks, yielding after each."""
        while (work := next_shard(self.streams)) is not None:
            role, source = work
            self.extend(role, source)
            yield role, source, self.streams[role]

    def extend(self, role: str, source: int) -> None:
        """Seal the next shard of a source, or its end: the published one where there is one."""
        dataset, settings = self.streams[role].datasets[source], self.plan[role]["sequences"][source]["settings"]
        folder = dataset.folder
        is_taken = self.published is not None and self.published.take(folder, len(dataset.seals), settings=settings)
        if not is_taken:
            if folder not in self.writers:
                self.writers[folder] = self._writer(role, source)
            self.writers[folder].extend()
        # All of them: sources of the same content, packed alike, share a folder.
        for stream in self.streams.values():
            stream.refresh()

    def repair(self, *, verify: bool) -> Iterator[Made]:
        """Make again the sealed shards whose file is missing or of another size than sealed; with verify, content."""
        for role, source, number in damaged_shards(self.streams, verify=verify):
            writer = self._writer(role, source, from_shard=number)
            while writer.number <= number:
                writer.extend()
            yield role, source, self.streams[role]

    def search_all(self) -> Iterator[Made]:
        """Search the training text of shards that were sealed without the watch-list, which reads their sources."""
        if self.watchlist is None:
            return
        stream = self.streams["train"]
        for source, dataset in enumerate(stream.datasets):
            for number in range(stream.shards_needed(source)):
                if self.watchlist.search_again(dataset.folder, number, self.sources["train"][source]):
                    yield "train", source, stream

    def _writer(self, role: str, source: int, from_shard: int | None = None) -> ShardWriter:
        about, opened = self.plan[role]["sequences"][source], self.sources[role][source]
        folder = sequence_folder(self.plan, about)
        encoded = watchlist = None
        if role == "train" and from_shard is None:
            watchlist = self.watchlist
            if processes_for(self.plan["num_proc"], opened) > 1 or has_encoded(folder):
                encoded = self.encoded_reader(source)
        return ShardWriter(
            folder,
            source=opened,
            tokenizer=self.tokenizer,
            settings=about["settings"],
            num_proc=self.plan["num_proc"],
            from_shard=from_shard,
            encoded=encoded,
            watchlist=watchlist,
        )

    def encoded_reader(self, source: int) -> EncodedReader:
        """Return what gives the blocks of a training source as worker processes encode them."""
        train = self.plan["train"]["sequences"]
        if self.pool is None:
            keep_freed_memory()  # shard after shard takes the same arrays, and this process feeds on all others
            datasets = {
                sequence_folder(self.plan, about): (opened, about["settings"])
                for about, opened in zip(train, self.sources["train"], strict=True)
            }
            count = max(processes_for(self.plan["num_proc"], opened) for opened in self.sources["train"])
            self.pool = WorkerPool(EncodeJob(datasets, self.tokenizer, self.retries, self.watchlist), count)
        return EncodedReader(self.pool, self.pool.job, sequence_folder(self.plan, train[source]))


def prepare_now(
    plan: dict,
    tokenizer: Any,
    *,
    sources: tuple[list, list],
    verify: bool = False,
    report: Callable | None = None,
) -> Preparation:
    """Prepare everything in this process; report(role, source, stream) is called after each shard.

    All the training text is searched for the plan's watch-list, that of sealed shards too.
    """
    add_reference(plan, None)
    discard_damaged(plan)
    with locks(plan), ShardBuilder(plan, tokenizer, sources=sources) as builder:
        for made in chain(builder.repair(verify=verify), builder.prepare(), builder.search_all()):
            if report is not None:
                report(*made)
    return Preparation(plan)


def prepare_in_background(folder: Path) -> int:
    """Prepare the task {plan, sources, tokenizer} that comes on stdin; return the exit status.

    A failure is left as failure.json in the preparation's folder.
    """
    content = sys.stdin.buffer.read()
    end_with(os.getppid())  # sealed shards are whole, so any moment will do
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    yield_to_training()
    own = lock(folder / ".lock", wait_s=START_GRACE_S)  # held to the end
    if own is None:
        return 0  # another process prepares this plan
    keep_retries_in(folder / RETRIES)
    try:
        task = pickle.loads(content)
        plan = task["plan"]
        builder = ShardBuilder(plan, task["tokenizer"], sources=task["sources"], retries=folder / RETRIES)
        with locks(plan), builder:
            for _ in chain(builder.repair(verify=False), builder.prepare()):
                pass
    except BaseException as error:
        failure = from_rust_panic(error) or error
        if isinstance(failure, OSError) and not isinstance(failure, TandemError):
            # ENOSPC, EDQUOT
            kind = DiskFullError if failure.errno in (28, 122) else CannotWriteError
            failure = kind(
                f"{failure.filename or folder}: {failure.strerror}, so the shards cannot be written. Free some space "
                "or move data.cache_dir; then run the same command again."
            )
        if not isinstance(failure, TandemError):
            raise
        write_json(folder / "failure.json", {"class": type(failure).__name__, "message": str(failure)})
        return failure.status
    return 0
