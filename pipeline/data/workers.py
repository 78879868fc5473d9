"""Blocks of a source as token ids, and the processes that encode them ahead of the one that packs them.

Encoding a block is what is costly of preparing data, and a pure function that any process may compute. Packing is
cheap and ordered; it takes the blocks one after the other (packing.py). Blocks that other processes encode lie as
files beside the shards, from when they are made until the rows that hold them are sealed.
"""

import hashlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import traceback
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pipeline.data.losses import fit_conversation
from pipeline.data.stream import NO_TEXT, NUMPY_TYPES, tensors_in
from pipeline.hardware.processor import available_bytes, usable_cores
from pipeline.process import commands
from pipeline.process.errors import DataError, RecipeError, ServiceError, TandemError, from_rust_panic
from pipeline.process.network import keep_retries_in
from pipeline.process.storage import write_bytes
from pipeline.sources.raw_rows import BLOCK_ROWS, kind_of
from pipeline.tokenizer.chat import render, rendered_talks
from pipeline.tokenizer.encode import encode_documents

FOLDER = "encoded-2"  # of the folder of shards; raise the number when the files are others
ENCODE_CHARS = 8_000_000  # handed to the tokenizer at once: bounds its memory when documents are huge
OUTCOMES = ("whole", "cut", "too_long", "no_target")  # of fit_conversation


@dataclass
class EncodedBlock:
    """n documents or conversations of a block, in order; flat arrays hold theirs one after the other."""

    file: int
    index: int
    empty_rows: int
    bad_rows: list[str]
    ids: np.ndarray  # flat, of the rows' dtype
    lengths: np.ndarray  # (n,) int64 ids of each; 0 also of a conversation that is dropped
    origins: np.ndarray  # (n, 2) int32 row group and row
    text_bytes: np.ndarray | None = None  # (n,) int64 of UTF-8; documents only
    target_bytes: np.ndarray | None = None  # flat int32 bytes of text under each id; where the rows carry them
    trained: np.ndarray | None = None  # flat bool: id is a target; conversations only
    rendered: np.ndarray | None = None  # (n,) int64 ids of the whole conversation
    outcomes: np.ndarray | None = None  # (n,) uint8 index into OUTCOMES
    seen: np.ndarray | None = None  # sorted uint64 hashes of a watch-list's n-grams in the text; None: nobody looked

    def each(self, flat: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the part of a flat array that is each item's."""
        at = 0
        for length in self.lengths.tolist():
            yield flat[at : at + length]
            at += length

    def places(self) -> list[tuple[int, int, int]]:
        """Return (file, row group, row) of each item."""
        return [(self.file, *place) for place in self.origins.tolist()]

    def content(self) -> bytes:
        """Return the block as a file: the CRC-32 of the rest, the length of the JSON, the JSON, tensors.

        A CRC finds a damaged file, and takes a third of SHA-256's time: one process reads what all others write.
        """
        arrays, about = {}, {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                arrays[field.name] = value.astype(np.uint8) if value.dtype == bool else value
            else:
                about[field.name] = value
        head = json.dumps(about).encode()
        rest = b"".join([len(head).to_bytes(8, "little"), head, *safetensors_parts(arrays)])
        return zlib.crc32(rest).to_bytes(4, "little") + rest


def safetensors_parts(tensors: dict[str, np.ndarray]) -> list[bytes | memoryview]:
    """Return the bytes that safetensors.numpy.save gives, as a header and the tensors themselves: three copies
    fewer."""
    names, types = list(NUMPY_TYPES), [np.dtype(kind) for kind in NUMPY_TYPES.values()]
    kinds = {name: types.index(array.dtype) for name, array in tensors.items()}
    header, parts, end = {}, list[bytes | memoryview](), 0
    for name in sorted(tensors, key=lambda name: (-kinds[name], name)):
        parts.append(np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8).data)
        begin, end = end, end + tensors[name].nbytes
        header[name] = {"dtype": names[kinds[name]], "shape": tensors[name].shape, "data_offsets": [begin, end]}
    content = json.dumps(header, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)
    return [len(content).to_bytes(8, "little") + content, *parts]


def read_encoded(path: Path) -> EncodedBlock | None:
    """Return the block that a file holds; None where there is none, or not as it was written."""
    try:
        with open(path, "rb") as file:
            sum_and_length = file.read(12)
            about, tensors = file.read(int.from_bytes(sum_and_length[4:], "little")), file.read()
    except (FileNotFoundError, OverflowError, MemoryError):
        return None
    if zlib.crc32(tensors, zlib.crc32(sum_and_length[4:] + about)).to_bytes(4, "little") != sum_and_length[:4]:
        return None
    arrays: dict[str, Any] = tensors_in(np.frombuffer(tensors, np.uint8))
    if "trained" in arrays:
        arrays["trained"] = arrays["trained"].astype(bool)
    return EncodedBlock(**json.loads(about), **arrays)


def encode_block(
    block: Any,
    *,
    source: Any,
    tokenizer: Any,
    settings: dict,
    num_proc: int | None = None,
    watchlist: Any | None = None,
) -> EncodedBlock:
    """Return the ids of a block of the source. settings: of its sequence (preparation.py). watchlist: looked for in
    the text, where given."""
    encode = _encode_conversations if settings["kind"] == "chat" else _encode_documents
    encoded = encode(block, source, tokenizer, settings, num_proc)
    if watchlist is not None:
        encoded.seen = watchlist.found_in(block.items)
    return encoded


def _encoded(block: Any, bad_rows: list[str], items: list, ids: list, dtype: Any, **more: np.ndarray) -> EncodedBlock:
    return EncodedBlock(
        file=block.file,
        index=block.index,
        empty_rows=block.empty_rows,
        bad_rows=bad_rows,
        ids=_flat(ids, dtype),
        lengths=np.array([len(a) for a in ids], np.int64),
        origins=np.array([(item.row_group, item.row) for item in items], np.int32).reshape(-1, 2),
        **more,
    )


def _flat(arrays: list, dtype: Any) -> np.ndarray:
    return np.concatenate([np.asarray(a, dtype) for a in arrays]) if arrays else np.zeros(0, dtype)


def _encode_documents(block: Any, source: Any, tokenizer: Any, settings: dict, num_proc: int | None) -> EncodedBlock:
    ids: list[np.ndarray] = []
    more: dict[str, np.ndarray] = {}
    if settings.get("target_bytes"):
        from pipeline.tokenizer.coverage import span_byte_lengths

        spans = [span_byte_lengths(tokenizer, document.text) for document in block.items]
        ids = [np.array(found) for found, _ in spans]
        lengths = [found for _, found in spans]
        if "end" in settings:
            lengths = _with_end(lengths, NO_TEXT, settings)
        more["target_bytes"] = _flat(lengths, np.int32)
    else:
        for documents in batches_of(block.items, ENCODE_CHARS):
            ids += encode_documents(tokenizer, [document.text for document in documents], num_proc=num_proc)
    if "end" in settings:
        ids = _with_end(ids, settings["end"], settings)
    more["text_bytes"] = np.array([len(document.text.encode()) for document in block.items], np.int64)
    return _encoded(block, block.bad_rows, block.items, ids, settings["dtype"], **more)


def _with_end(documents: list, end: int, settings: dict) -> list:
    """Return each document's numbers with one more at its end.

    Not behind a document that fills its last row without: in a row of its own the end would teach to write nothing.
    """
    whole = settings["row_tokens"] if settings["packing"] in ("cut_and_fit", "one_text") else 0
    ended = []
    for document in documents:
        fills_rows = len(document) % whole == 0 if whole else len(document) == 0
        ended.append(document if fills_rows else np.append(document, end))
    return ended


def _encode_conversations(
    block: Any, source: Any, tokenizer: Any, settings: dict, num_proc: int | None
) -> EncodedBlock:
    bad, talks, ids, trained, rendered, outcomes = list(block.bad_rows), [], [], [], [], []
    capacity, overflow = settings["row_tokens"] + 1, settings["max_row_overflow"]
    for talk, whole in zip(block.items, rendered_talks(tokenizer, block.items), strict=True):
        if isinstance(whole, DataError):
            bad.append(f"{source.files[talk.file].label}:{talk.row}: {whole}")
            continue
        fitted, targets, outcome = fit_conversation(
            talk.messages, whole, partial(render, tokenizer, tools=talk.tools), capacity=capacity, overflow=overflow
        )
        talks.append(talk)
        ids.append(fitted or [])
        trained.append(targets or [])
        rendered.append(len(whole[0]))
        outcomes.append(OUTCOMES.index(outcome))
    return _encoded(
        block,
        bad,
        talks,
        ids,
        settings["dtype"],
        trained=_flat(trained, bool),
        rendered=np.array(rendered, np.int64),
        outcomes=np.array(outcomes, np.uint8),
    )


def batches_of(documents: list, characters: int) -> Iterator[list]:
    """Yield the documents in order, in lists of at most so many characters or one document."""
    batch: list = []
    size = 0
    for document in documents:
        if batch and size + len(document.text) > characters:
            yield batch
            batch, size = [], 0
        batch.append(document)
        size += len(document.text)
    if batch:
        yield batch


# Processes that encode the blocks of a source ahead of the one that packs them, and a part's share of that work.
#
# The unit of work is a run of blocks of one file (workers.py): pure, and its result a whole file or none. Where it is
# computed, in which order and how often changes no byte, so a process that is killed costs the run that it was working
# on.

WORTH_A_PROCESS = 16_000_000  # bytes of files: seconds of encoding, against the two that a process takes to start
PROCESS_BYTES = 1 << 30  # of memory; as much again is left for the training
RUN_BLOCKS = 16  # where reading has to begin at the start of a file or a large row group
SEEKABLE_BLOCKS = 4  # of a row group: what is read in vain before a block in it is a small part of its work
PARTS = "parts"  # a file beside encoded blocks
POLL_S = 0.5  # between two looks whether what is waited for is still wanted
ATTEMPTS = 3  # of a run of blocks whose process is killed: then it is the blocks that kill


def processes_for(num_proc: int | None, source: Any) -> int:
    """Return how many processes encode a source; 1: the one that packs does it, in threads."""
    fitting = min(usable_cores(), available_bytes() // (2 * PROCESS_BYTES))
    return num_proc or max(1, min(fitting, sum(file.bytes for file in source.files) // WORTH_A_PROCESS))


# The work: what a process needs to know of it, and the encoding of a run of blocks.


class Work:
    """Sources by their folder of shards, each with the settings of its sequence. watchlist: looked for in the text,
    where given."""

    def __init__(
        self, sequences: dict[Path, tuple[Any, dict]], tokenizer: Any, *, watchlist: Any | None, retries: Path | None
    ):
        self.sequences, self.tokenizer, self.watchlist, self.retries = sequences, tokenizer, watchlist, retries

    def path(self, folder: Path, file: int, block: int) -> Path:
        """Return where an encoded block of a folder of shards lies; one that was searched for a watch-list is another
        file."""
        searched = "" if self.watchlist is None else f"-{self.watchlist.id}"
        return folder / FOLDER / f"{file:05d}-{block:07d}{searched}.safetensors"

    def encode(self, folder: Path, file: int, first: int, count: int) -> list[int]:
        """Write up to `count` blocks of a file from one on, unless they are there; return the ids of each, fewer at
        the file's end."""
        source, settings = self.sequences[folder]
        paths = [self.path(folder, file, block) for block in range(first, first + count)]
        there = [read_encoded(path) for path in paths]
        if all(there):
            return [len(encoded.ids) for encoded in there if encoded is not None]
        made = []
        for path, block, encoded in zip(paths, source.read_file(file, block=first), there, strict=False):
            if encoded is None:
                more = {"source": source, "tokenizer": self.tokenizer, "watchlist": self.watchlist}
                encoded = encode_block(block, settings=settings, num_proc=1, **more)
                write_bytes(path, encoded.content())
            made.append(len(encoded.ids))
        return made


class Engine(Protocol):
    """Places the work. count: runs of blocks that are worked on at a time."""

    count: int

    def submit(self, folder: Path, file: int, first: int, count: int) -> "Future[list[int]]": ...

    def close(self) -> None: ...


class WorkerPool:
    """Processes of this machine. Each is fed by a thread, starts with its first work, and is started again when it was
    killed."""

    def __init__(self, work: Work, count: int):
        self.count, self.content = count, pickle.dumps(work)
        self.threads = ThreadPoolExecutor(count)
        self.thread_local = threading.local()
        self.started: list[subprocess.Popen] = []
        self.closed = False

    def submit(self, *run: Any) -> "Future[list[int]]":
        return self.threads.submit(self._run_in_worker, run)

    def _run_in_worker(self, run: tuple) -> list[int]:
        for _ in range(ATTEMPTS):
            if self.closed:
                break
            process = getattr(self.thread_local, "process", None) or self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                with suppress(BrokenPipeError):  # then there is no answer either
                    pickle.dump(run, process.stdin)
                    process.stdin.flush()
                answer = pickle.load(process.stdout)
            except (EOFError, pickle.UnpicklingError):
                self.thread_local.process = None
                process.kill()  # it may wait for more after what was no answer
                process.wait()
                continue
            if isinstance(answer, BaseException):
                raise answer
            return answer
        folder, file, first, count = run
        raise DataError(
            f"{folder.name}: the process that encodes blocks {first} to {first + count - 1} of file {file} ended "
            f"{ATTEMPTS} times. It says why above or, in a training, in log.txt under "
            f"{folder.parents[1] / 'preparations'}; if it does not, the memory is probably used up: prepare with "
            "fewer processes (data.num_proc). What is sealed is not made again."
        )

    def _start(self) -> subprocess.Popen:
        # One thread each, also in libraries that would start one a core in every process.
        environment = commands.environment(TOKENIZERS_PARALLELISM="false", **commands.ONE_THREAD)
        # Its errors go where this process's go: the log of the preparation, or the terminal.
        process = commands.start(
            "-m", "pipeline.data", "--worker", env=environment, stdout=subprocess.PIPE, stderr=None
        )
        self.thread_local.process = process
        self.started.append(process)
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.write(self.content)
            process.stdin.flush()
        return process

    def close(self) -> None:
        self.closed = True
        self.threads.shutdown(wait=False, cancel_futures=True)
        for process in self.started:
            process.kill()
        self.threads.shutdown()
        for process in self.started:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]


class RayTasks:
    """Tasks of the Ray cluster that this machine belongs to, whose nodes see the cache and this program under the same
    paths."""

    def __init__(self, work: Work):
        try:
            import ray
        except ImportError:
            raise RecipeError(
                'data.engine: ray needs the package ray, which is not installed. Run pip install "tandem-llm[ray]".'
            ) from None
        single = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": commands.python_path()}
        try:
            ray.init("auto", runtime_env={"env_vars": single}, log_to_driver=False, logging_level="ERROR")
        except ConnectionError:
            raise ServiceError(
                "data.engine: ray finds no Ray cluster here. Start one with `ray start --head`, and on the other "
                "machines with `ray start --address=THIS_MACHINE:6379`."
            ) from None
        self.ray, self.count = ray, int(ray.cluster_resources().get("CPU", 1))
        self.content = ray.put(pickle.dumps(work))
        # A task whose node is lost is made on another one.
        self.encode = ray.remote(num_cpus=1, max_retries=ATTEMPTS, scheduling_strategy="SPREAD")(_encoded_by_task)

    def submit(self, *run: Any) -> "Future[list[int]]":
        future: Future[list[int]] = Future()

        def answered(answer: Future) -> None:
            error = answer.exception() or answer.result()
            if not future.cancelled():
                future.set_exception(error) if isinstance(error, BaseException) else future.set_result(error)

        self.encode.remote(self.content, run).future().add_done_callback(answered)
        return future

    def close(self) -> None:
        self.ray.shutdown()


_works: dict[bytes, Work] = {}  # of a process that makes tasks of Ray


def _encoded_by_task(content: bytes, run: tuple) -> list[int] | BaseException:
    digest = hashlib.sha256(content).digest()
    if digest not in _works:
        _works.clear()
        _works[digest] = pickle.loads(content)
    return _answer(_works[digest], run)


def _answer(work: Work, run: tuple) -> list[int] | BaseException:
    """Return what `Work.encode` returns or raises, as it can be sent to another process."""
    try:
        return work.encode(*run)
    except BaseException as error:
        answer = from_rust_panic(error) or error
    if not isinstance(answer, TandemError):
        answer.add_note("".join(traceback.format_exception(answer)))
    with suppress(Exception):  # an own format may raise what cannot be sent
        return pickle.loads(pickle.dumps(answer))
    return RuntimeError(repr(answer))


def serve_work() -> int:
    """Encode what stdin asks for until it ends, or the process at its other end does."""
    commands.end_with(os.getppid())
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # who sends the work starts another process for one that was killed
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a user's own format may print
    requests = sys.stdin.buffer
    work = pickle.load(requests)
    if work.retries is not None:
        keep_retries_in(work.retries, anew=False)
    with suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        while True:
            pickle.dump(_answer(work, pickle.load(requests)), results)
            results.flush()
    return 0


# The runs of a source in order, and their blocks as they are made.


def seekable_blocks(path: Path) -> int | None:
    """Return how many blocks the file has, where reading can begin at each at little cost: parquet of small row
    groups; else None."""
    if kind_of(path.name) != "parquet":
        return None
    import pyarrow
    import pyarrow.parquet

    try:
        metadata = pyarrow.parquet.read_metadata(path)
    except (OSError, ValueError, pyarrow.ArrowException):
        return None  # reported where it is read
    groups = (metadata.row_group(number).num_rows for number in range(metadata.num_row_groups))
    return -(-metadata.num_rows // BLOCK_ROWS) if max(groups, default=0) <= SEEKABLE_BLOCKS * BLOCK_ROWS else None


class Runs:
    """Runs of blocks of a source from a cursor on, in order: (file, first block, blocks). part: (k, n), of which every
    n-th is given.

    ramp: blocks of the first file that are given one by one. A run may lie beyond the end of a file of unknown length.
    """

    def __init__(self, source: Any, *, file: int, block: int, ramp: int = 0, part: tuple[int, int] = (0, 1)):
        self.source, self.ramp, (self.part, self.parts) = source, ramp, part
        # Whole files, where there are enough of them: then a part reads, and fetches, no other. One part begins at the
        # very block.
        self.whole_files = self.parts == 1 or len(source.files) >= 2 * self.parts
        self.known: int | None = None  # blocks of the file, where reading can begin at any of them
        self._begin(file, block)

    def _begin(self, file: int, block: int) -> None:
        while self.whole_files and file % self.parts != self.part:
            file, block = file + 1, 0
        self.file, self.first, self.block = file, block, -1  # -1: not opened yet

    @property
    def is_over(self) -> bool:
        return self.file >= len(self.source.files)

    @property
    def next_files(self) -> list[int]:
        """Return the file that is being given out, and the one after it where there is one."""
        return list(range(self.file, len(self.source.files), self.parts if self.whole_files else 1))[:2]

    def next(self) -> tuple[int, int, int] | None:
        """Return the next run; None where the file gives this part no more. The file is there."""
        if self.block < 0:
            self.known, self.block = seekable_blocks(self.source.path_of(self.file)), self.first
            if not self.whole_files:
                length = 1 if self.known is not None else RUN_BLOCKS
                self.block = self.first // length * length
        file, block = self.file, self.block
        count = RUN_BLOCKS if self.known is None and block >= self.ramp else 1  # the first rows are to come soon
        self.block += count
        if self.known is not None and self.block >= self.known:
            self.note_end_of_file(file)
        return (file, block, count) if self.whole_files or block // count % self.parts == self.part else None

    def note_end_of_file(self, file: int) -> None:
        """Take note that a file has no more blocks."""
        if self.file == file:
            self.ramp = 0
            self._begin(file + 1, 0)


class EncodedReader:
    """Encoded blocks of one source in the source's order, while an engine makes the next ones."""

    def __init__(self, engine: Engine, work: Work, folder: Path):
        self.engine, self.work, self.folder = engine, work, folder
        self.source = work.sequences[folder][0]
        self.fetched: dict[int, Future] = {}
        self.used: deque[tuple[int, int, Path]] = deque()  # blocks that were read and whose rows may not all be sealed
        self.closed = False  # nothing more is read

    def read(self, *, file: int, block: int) -> Iterator[EncodedBlock]:
        """Yield the blocks from that cursor to the end of the last file. Raises what reading and encoding raise."""
        for number, first, count, answer in self.results(
            Runs(self.source, file=file, block=block, ramp=2 * self.engine.count), unless_there=True
        ):
            error = answer.exception()
            paths = self.paths(number, first, count)
            # What was made before an error comes first, as it does where one process does everything.
            for index, path in enumerate(paths if error else paths[: len(answer.result())], first):
                encoded = read_encoded(path)
                if encoded is None and error:
                    break
                if encoded is None:  # damaged or deleted since; it can always be made again
                    self.work.encode(self.folder, number, index, 1)
                    encoded = read_encoded(path)
                assert encoded is not None
                self.used.append((number, index, path))
                yield encoded
            if error:
                raise error

    def paths(self, number: int, first: int, count: int) -> list[Path]:
        return [self.work.path(self.folder, number, index) for index in range(first, first + count)]

    def results(
        self, runs: Runs, *, unless_there: bool = False
    ) -> Iterator[tuple[int, int, int, "Future[list[int]]"]]:
        """Yield (file, first block, blocks, answer) of each run in order, when it is done. Raises what fetching a file
        raises.

        unless_there: the engine is not asked for runs whose blocks are there; their answers count no ids.
        """
        pending: deque[tuple[int, int, int, Future]] = deque()
        while True:
            for number, first, count, answer in [*pending]:
                if not answer.done() or answer.cancelled() or answer.exception() or len(answer.result()) == count:
                    continue
                runs.note_end_of_file(number)
                for behind in [each for each in pending if each[0] == number and each[1] > first]:
                    behind[3].cancel()
                    pending.remove(behind)
            while len(pending) < 2 * self.engine.count and not runs.is_over and self._is_here(runs.next_files):
                run = runs.next()
                if run is None:
                    continue
                there = unless_there and all(path.exists() for path in self.paths(*run))
                pending.append((*run, _answered([0] * run[2]) if there else self.engine.submit(self.folder, *run)))
            if not pending and runs.is_over:
                return
            if pending and pending[0][3].done():
                yield pending.popleft()
                continue
            # Of none, where all came in a moment ago, nothing is waited for.
            awaited = [each[3] for each in pending if not each[3].done()] if pending else [self.fetched[runs.file]]
            wait(awaited, timeout=POLL_S, return_when=FIRST_COMPLETED)
            if self.closed:
                raise CancelledError
            if not pending and awaited[0].done():
                awaited[0].result()

    def _is_here(self, files: list[int]) -> bool:
        """Return whether the first of these files is there, as it was verified; all are fetched meanwhile."""
        for number in files:
            if number not in self.fetched:
                future: Future = Future()
                self.fetched[number] = future
                fetch = threading.Thread(target=self._fetch, args=(number, future), daemon=True)
                fetch.start() if self.source.files[number].path is None else fetch.run()
        first = self.fetched[files[0]]
        return first.done() and not first.exception()

    def _fetch(self, number: int, future: Future) -> None:
        try:
            future.set_result(self.source.path_of(number))
        except BaseException as error:
            future.set_exception(error)

    def take_used(self, file: int, block: int) -> list[Path]:
        """Return the blocks before one, at which or later preparation goes on from the shard that is full now."""
        used = []
        while self.used and self.used[0][:2] < (file, block):
            used.append(self.used.popleft()[2])
        return used


def _answered(answer: list[int]) -> "Future[list[int]]":
    future: Future[list[int]] = Future()
    future.set_result(answer)
    return future


def has_encoded(folder: Path) -> bool:
    """Return whether a part of a source was encoded for a folder of shards, or a preparation was killed."""
    return (folder / FOLDER).is_dir()


def note_part(folder: Path) -> None:
    """Take note that parts encode for a folder of shards, more of it than a short run may need."""
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    (folder / FOLDER / PARTS).touch()


def parts_noted(folder: Path) -> float:
    """Return when a part last began to encode for a folder of shards, in seconds of the epoch; 0 where none did."""
    noted = folder / FOLDER / PARTS
    return noted.stat().st_mtime if noted.exists() else 0.0


def remove_encoded(folder: Path, *, of_parts: bool) -> None:
    """Delete the encoded blocks of a folder of shards. of_parts: also where parts were noted."""
    if (folder / FOLDER / PARTS).exists() and not of_parts:
        return
    for left in folder.glob("encoded-*"):  # those of earlier versions too
        shutil.rmtree(left, ignore_errors=True)
