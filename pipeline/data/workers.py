"""Processes that encode the blocks of a source ahead of the one that packs them.

Packing is cheap and ordered, and takes the blocks one after the other. Blocks that other processes encode are files in
the folder of shards, from when they are made until the rows that hold them are sealed. Where a block is encoded, in
which order and how often changes no byte, so a process that is killed costs the range of blocks that it worked on.
"""

import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import threading
import traceback
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.data.encoding import EncodedBlock, encode_block, num_encoded, read_encoded
from pipeline.hardware.processor import available_bytes, usable_cores
from pipeline.process.commands import end_with
from pipeline.process.errors import DataError, TandemError, from_rust_panic
from pipeline.process.network import keep_retries_in
from pipeline.process.storage import write_bytes
from pipeline.sources.raw_rows import BLOCK_ROWS, kind_of

FOLDER = "encoded-3"  # of the folder of shards; raise the number when the files are others
WORTH_A_PROCESS = 16_000_000  # bytes of files: seconds of encoding, against the two that a process takes to start
PROCESS_BYTES = 1 << 30  # of memory; as much again is left for the training
RANGE_BLOCKS = 16  # reading may have to begin at the start of the file or of a large row group
ATTEMPTS = 3  # of a range whose process is killed: then it is the blocks that kill


def processes_for(num_proc: int | None, source: Any) -> int:
    """Return how many processes encode a source; 1: the one that packs does it, in threads."""
    fitting = min(usable_cores(), available_bytes() // (2 * PROCESS_BYTES))
    return num_proc or max(1, min(fitting, sum(file.bytes for file in source.files) // WORTH_A_PROCESS))


@dataclass
class EncodeJob:
    """All that a process needs to encode. datasets: source and settings by the folder of shards. retries: file that
    counts what is read again. watchlist: for which the text is searched."""

    datasets: dict[Path, tuple[Any, dict]]
    tokenizer: Any
    retries: Path | None
    watchlist: Any | None = None

    def path(self, folder: Path, file: int, block: int) -> Path:
        """Return where an encoded block of a folder of shards is written, which also holds what a search found."""
        searched = "" if self.watchlist is None else f"-{self.watchlist.id}"
        return folder / FOLDER / f"{file:05d}-{block:07d}{searched}.safetensors"

    def encode(self, folder: Path, file: int, first: int, count: int) -> list[int]:
        """Write up to `count` blocks of a file from one on, unless they are there; return the ids of each, fewer at
        the file's end."""
        source, settings = self.datasets[folder]
        made = []
        # The file may end before `count` blocks are read.
        for number, block in zip(range(first, first + count), source.read_file(file, block=first), strict=False):
            path = self.path(folder, file, number)
            encoded = read_encoded(path)
            if encoded is None:
                encoded = encode_block(
                    block,
                    source=source,
                    tokenizer=self.tokenizer,
                    settings=settings,
                    num_proc=1,
                    watchlist=self.watchlist,
                )
                write_bytes(path, encoded.content())
            made.append(len(encoded.ids))
        return made


_job: EncodeJob | None = None  # of a worker


def _begin(job: EncodeJob, parent: int) -> None:
    """Begin a worker, which ends with the process that started it."""
    global _job
    end_with(parent)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if job.retries is not None:
        keep_retries_in(job.retries, anew=False)
    _job = job


def _encode(*block_range: Any) -> list[int]:
    assert _job is not None
    try:
        return _job.encode(*block_range)
    except BaseException as error:
        found = from_rust_panic(error) or error
        if not isinstance(found, TandemError):
            found.add_note("".join(traceback.format_exception(found)))
        # An exception is sent by pickle, which calls its class with its arguments: not every class takes them.
        sendable: BaseException = RuntimeError(repr(found))
        with suppress(Exception):  # a user's format may raise what cannot be sent
            sendable = pickle.loads(pickle.dumps(found))
        raise sendable from None


class WorkerPool:
    """Processes of this machine, which are started when they are needed and again after one was killed."""

    def __init__(self, job: EncodeJob, count: int):
        self.job, self.count = job, count
        self.executor = self._new()

    def _new(self) -> ProcessPoolExecutor:
        spawn = multiprocessing.get_context("spawn")  # threads of this process would not survive a fork
        return ProcessPoolExecutor(self.count, mp_context=spawn, initializer=_begin, initargs=(self.job, os.getpid()))

    def submit(self, folder: Path, file: int, first: int, count: int) -> "Future[list[int]]":
        try:
            return self.executor.submit(_encode, folder, file, first, count)
        except BrokenProcessPool:
            self.executor = self._new()
            return self.executor.submit(_encode, folder, file, first, count)

    def close(self) -> None:
        workers = list((self.executor._processes or {}).values())
        self.executor.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.kill()
        self.executor.shutdown()
        del self.executor, workers
        gc.collect()  # its semaphores, which a process that ends by os._exit would leave behind


class BlockRanges:
    """Ranges of blocks of a source from a cursor on, in order: (file, first block, blocks). part: (k, n), of which
    every n-th file is given.

    ramp: so many ranges are of one block each, so that the first rows come soon. A range may be beyond the end of a
    file of unknown length.
    """

    def __init__(self, source: Any, *, file: int, block: int, ramp: int = 0, part: tuple[int, int] = (0, 1)):
        self.source, self.ramp, self.part = source, ramp, part
        self.fetched: dict[int, Future[Path]] = {}
        self._begin(file, block)

    def _begin(self, file: int, block: int) -> None:
        number, parts = self.part
        while file % parts != number:
            file, block = file + 1, 0
        self.file, self.block = file, block
        self.num_blocks: int | None = None
        # This file, and the next one while this one is read.
        if file < len(self.source.files):
            for each in (file, file + parts):
                self._fetch(each)

    def _fetch(self, file: int) -> None:
        """Have a file fetched that is not here."""
        if file in self.fetched or file >= len(self.source.files):
            return
        future = self.fetched[file] = Future()

        def fetch() -> None:
            try:
                future.set_result(self.source.path_of(file))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=fetch, daemon=True).start()

    def next(self) -> tuple[int, int, int] | None:
        """Return the next range; None at the end. Raises what fetching the file raises."""
        if self.file >= len(self.source.files):
            return None
        if self.num_blocks is None:
            self.num_blocks = num_blocks(self.fetched[self.file].result())
        file, first = self.file, self.block
        count = RANGE_BLOCKS
        if self.ramp > 0:
            count = 1
            self.ramp -= 1
        self.block += count
        if self.num_blocks is not None and self.block >= self.num_blocks:
            self.end_file(file)
        return file, first, count

    def end_file(self, file: int) -> None:
        """Begin with the next file: this one has no more blocks."""
        if self.file == file:
            self._begin(file + self.part[1], 0)


def num_blocks(path: Path) -> int | None:
    """Return how many blocks a file has, where that is known without reading it."""
    if kind_of(path.name) != "parquet":
        return None
    import pyarrow
    import pyarrow.parquet

    try:
        return -(-pyarrow.parquet.read_metadata(path).num_rows // BLOCK_ROWS)
    except (OSError, ValueError, pyarrow.ArrowException):
        return None  # reported where it is read


class EncodedReader:
    """Encoded blocks of one source in the source's order, while a pool makes the next ones."""

    def __init__(self, pool: WorkerPool, job: EncodeJob, folder: Path):
        self.pool, self.job, self.folder = pool, job, folder
        self.source = job.datasets[folder][0]
        self.used: deque[tuple[int, int]] = deque()  # file and block that were read and whose rows may not be sealed

    def read(self, *, file: int, block: int) -> Iterator[EncodedBlock]:
        """Yield the blocks from that cursor to the end of the last file. Raises what reading and encoding raise."""
        ranges = BlockRanges(self.source, file=file, block=block, ramp=2 * self.pool.count)
        for number, first, count, answer in self.encode(ranges):
            error = answer.exception()
            made = count if error else len(answer.result())
            # What was made before an error comes first, as it does where one process does everything.
            for index in range(first, first + made):
                encoded = read_encoded(self.job.path(self.folder, number, index))
                if encoded is None and error is None:  # deleted since; it can always be made again
                    self.job.encode(self.folder, number, index, 1)
                    encoded = read_encoded(self.job.path(self.folder, number, index))
                if encoded is None:
                    break
                self.used.append((number, index))
                yield encoded
            if error:
                raise error

    def encode(self, ranges: BlockRanges) -> Iterator[tuple[int, int, int, "Future[list[int]]"]]:
        """Yield (file, first block, blocks, answer) of each range in order, when it is encoded."""
        pending: deque[tuple[tuple[int, int, int], Future[list[int]]]] = deque()
        attempt = 1
        while True:
            while len(pending) < 2 * self.pool.count:
                found = ranges.next()
                if found is None:
                    break
                pending.append((found, self._submit(found)))
            if not pending:
                return
            (file, first, count), answer = pending[0]
            if isinstance(answer.exception(), BrokenProcessPool):
                attempt += 1
                if attempt > ATTEMPTS:
                    raise DataError(
                        f"{self.folder.name}: the process that encodes blocks {first} to {first + count - 1} of file "
                        f"{file} ended {ATTEMPTS} times, probably for memory. Prepare with fewer processes: "
                        "data.num_proc."
                    )
                pending = deque((each, self._submit(each)) for each, _ in pending)
                continue
            attempt = 1
            pending.popleft()
            if not answer.exception() and len(answer.result()) < count:
                ranges.end_file(file)
                while pending and pending[0][0][0] == file:
                    pending.popleft()[1].cancel()
            yield file, first, count, answer

    def _submit(self, block_range: tuple[int, int, int]) -> "Future[list[int]]":
        file, first, count = block_range
        made = [num_encoded(self.job.path(self.folder, file, block)) for block in range(first, first + count)]
        if None not in made:  # by a part that was made before, or by a preparation that was killed
            answer: Future[list[int]] = Future()
            answer.set_result([num or 0 for num in made])
            return answer
        return self.pool.submit(self.folder, file, first, count)

    def discard(self, file: int, block: int) -> None:
        """Delete the blocks before one, at which or later preparation continues from the shard that is sealed now."""
        while self.used and self.used[0] < (file, block):
            self.job.path(self.folder, *self.used.popleft()).unlink(missing_ok=True)


def has_encoded(folder: Path) -> bool:
    """Return whether blocks were encoded for a folder of shards, by a part or by a preparation that was killed."""
    return (folder / FOLDER).is_dir()


def remove_encoded(folder: Path) -> None:
    """Delete the encoded blocks of a folder of shards, those of earlier versions too."""
    for left in folder.glob("encoded-*"):
        shutil.rmtree(left, ignore_errors=True)
