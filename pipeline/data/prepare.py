"""Shards prepared once and shared: by the first process that needs them, ahead of the step, and pruned."""

import json
import math
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from pipeline.data.plan import ROLES, digest, folders_of, make_plan, open_stream, sequence_folder
from pipeline.data.shard_writer import SequenceWriter
from pipeline.data.shards import damaged_seals, is_damaged, seen_path, shard_path
from pipeline.data.stream import Stream
from pipeline.data.workers import Ahead, Engine, Processes, Runs, Work, has_encoded, processes_for, remove_encoded
from pipeline.monitor.heartbeat import beat
from pipeline.process import errors
from pipeline.process.errors import DataError, TandemError, of_panic
from pipeline.process.progress import waiting
from pipeline.process.retries import keep_retries_in, retries_in
from pipeline.process.storage import (
    file_lock,
    folder_bytes,
    is_stand_in,
    lock,
    locks_are_inherited,
    read_json,
    remove_file,
    write_json,
)
from pipeline.process.user_code import import_built_in

# The order in which shards are made: what the run reads first is made first.


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
    """Writers for the sequences of a plan, and what encodes their text. sources: (train, validation); the caller holds the plan's
    locks. retries: a file that counts what other processes read again."""

    def __init__(self, plan: dict, tokenizer: Any, *, sources: tuple[list, list], retries: Path | None = None):
        self.plan, self.tokenizer, self.retries = plan, tokenizer, retries
        self.engine: Engine | None = None
        self.sources = {"train": sources[0], "validation": sources[1], "documents": sources[1]}
        self.streams = streams_of(plan)
        self.writers: dict[Path, SequenceWriter] = {}
        self.watchlist = import_built_in("evals.Watchlist").load(plan["watchlist"]) if plan["watchlist"] else None

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
            ahead=self.ahead(source) if role == "train" and from_shard is None and self.is_shared_out(source) else None,
        )

    def is_shared_out(self, source: int) -> bool:
        """Return whether other processes encode a training source, or have encoded something of it."""
        folder = self.streams["train"].sequences[source].folder
        return processes_for(self.plan["num_proc"], self.sources["train"][source]) > 1 or has_encoded(folder)

    def ahead(self, source: int) -> Ahead:
        """Return what gives the blocks of a training source as other processes encode them."""
        counts = [processes_for(self.plan["num_proc"], each) for each in self.sources["train"]]
        if self.engine is None:
            sequences = zip(self.plan["train"]["sequences"], self.sources["train"], strict=True)
            folders = {sequence_folder(self.plan, about): (each, about["settings"]) for about, each in sequences}
            self.work = Work(folders, self.tokenizer, watchlist=self.watchlist, retries=self.retries)
            self.engine = Processes(self.work, max(counts))
        folder = sequence_folder(self.plan, self.plan["train"]["sequences"][source])
        return Ahead(self.engine, self.work, folder, count=counts[source])

    def encode(self, source: int, *, part: tuple[int, int]) -> Iterator[int]:
        """Encode a part of what is not sealed of a training source; yields the number of tokens of each run of blocks."""
        ahead, seals = self.ahead(source), self.streams["train"].sequences[source].seals
        cursor = seals[-1]["cursor"] if seals else {"file": 0, "block": 0}
        for *_, answer in ahead.answers(Runs(ahead.source, file=cursor["file"], block=cursor["block"], part=part)):
            yield sum(answer.result())

    def __enter__(self) -> "Workshop":
        return self

    def __exit__(self, *error: object) -> None:
        """End the processes, and delete what they made when nothing more is needed of it."""
        if self.engine is not None:
            self.engine.close()
        if self.plan["train"] and next_shard(self.streams) is None:
            for sequence in self.streams["train"].sequences:
                remove_encoded(sequence.folder)

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
            self.watchlist.look_again(folder, number, source=read_from)
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


# Deleting prepared shards that nothing needs any more.

USERS = "users"
# Shards of which nobody noted the users are kept for so long after they were last written or read.
KEPT_DAYS = 30.0


def note_user(plan: dict, run: Path | None) -> None:
    """Say that a run directory reads the shards of a plan; None: they were prepared for none yet."""
    line = "" if run is None else json.dumps(str(run.absolute())) + "\n"
    for folder in folders_of(plan):
        with suppress(OSError):  # a cache that this user may only read is pruned by another one
            folder.mkdir(parents=True, exist_ok=True)
            users = folder / USERS
            if not users.exists() and any(folder.glob("shard-*.json")):
                (folder / ".lock").touch()  # by an earlier version: its time tells that they are used
                continue
            with open(users, "a+", encoding="utf-8") as file:
                file.seek(0)
                if line not in file.read():
                    file.write(line)


def unused_folders(plan: dict, *, runs: Path) -> list[Path]:
    """Shard folders of the cache that neither this plan nor a run uses, whichever folder the run lies in."""
    kept = {s["key"] for role in ROLES if plan[role] for s in plan[role]["sequences"]}
    manifests = [path.read_text(errors="replace") for path in runs.glob("*/run_manifest.json")]
    shards = Path(plan["cache_dir"]) / "shards"
    folders = sorted(path for path in shards.glob("*") if path.is_dir()) if shards.is_dir() else []
    return [
        f
        for f in folders
        if f.name not in kept and not any(f.name in manifest for manifest in manifests) and not _is_used(f)
    ]


def _is_used(folder: Path) -> bool:
    """Return whether a run may read these shards: one that is there, or whose disk may only be away."""
    try:
        lines = (folder / USERS).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        newest = max((path.stat().st_mtime for path in folder.iterdir()), default=0.0)
        return time.time() - newest < KEPT_DAYS * 86400
    except (OSError, UnicodeDecodeError):
        return True
    return any(map(_may_be_there, lines))


def _may_be_there(line: str) -> bool:
    try:
        run = Path(json.loads(line))
        return (run / "run_manifest.json").exists() or not run.parent.exists()
    except (ValueError, TypeError, RecursionError, OSError):
        return True  # a damaged line was a run


def prune(plan: dict, *, runs: Path) -> tuple[int, int]:
    """(folders, bytes) deleted. A folder that some process is writing is left alone."""
    count = freed = 0
    for folder in unused_folders(plan, runs=runs):
        with file_lock(folder / ".lock", blocking=False) as held:
            if held:
                freed += folder_bytes(folder)
                shutil.rmtree(folder, ignore_errors=True)  # NFS keeps what is open in some process
                count += 1
    return count, freed


# Preparation that runs ahead of training in a child process, and how the ranks wait for it.

RETRIES = "retries"  # a file of the preparation's folder
POLL_S = 0.05
START_GRACE_S = 120.0  # in which a rank that attached believes that the process which prepares is still being started


def start_preparation(
    recipe: Any,
    tokenizer: Any,
    *,
    sources: tuple[list, list],
    from_step: int = 0,
    watchlist: str | Path | None = None,
    run: Path | None = None,
) -> "Preparation":
    """Prepare the recipe's rows in a child process, unless they all are there; returns at once.

    sources: (train, validation) as open_sources gives them. from_step: where training goes on, which decides what is made
    first when data.keep_shards is set. run: the directory for which `--prune` keeps the shards. watchlist: a saved Watchlist for which the training text is searched on the way; shards
    that are sealed already are not read again for it (`prepare_now` does that). Raises what make_plan raises.
    """
    plan = make_plan(recipe, tokenizer, sources=sources, watchlist=watchlist)
    note_user(plan, run)
    discard_damaged(plan)
    if damaged := damaged_shards(plan, streams_of(plan), verify=False):
        print(f"data: {len(damaged)} prepared shards are damaged and made again first", file=sys.stderr, flush=True)
        with locks(plan):
            for _ in Workshop(plan, tokenizer, sources=sources).repair(verify=False):
                pass
    preparation = Preparation(plan)
    if plan["keep_shards"] or next_shard(streams_of(plan)) is not None:
        preparation.start({"plan": plan, "recipe": recipe, "tokenizer": tokenizer, "from_step": from_step})
    return preparation


def prepare_now(
    recipe: Any,
    tokenizer: Any,
    *,
    sources: tuple[list, list],
    verify: bool = False,
    report: Callable | None = None,
    watchlist: str | Path | None = None,
) -> "Preparation":
    """Prepare everything in this process; report(role, source, stream) is called after each shard.

    watchlist: a saved Watchlist for which all the training text is searched, that of sealed shards too.
    """
    plan = make_plan(recipe, tokenizer, sources=sources, watchlist=watchlist)
    note_user(plan, None)
    discard_damaged(plan)
    with locks(plan), Workshop(plan, tokenizer, sources=sources) as workshop:
        for made in chain(workshop.repair(verify=verify), workshop.prepare(), workshop.look_again()):
            if report is not None:
                report(*made)
    preparation = Preparation(plan)
    for marker in preparation.folder.glob("part-*"):
        remove_file(marker)
    return preparation


# Preparation by several machines: each encodes its part into the shared cache, the last one packs and seals.

# Tokens that are encoded for one that is packed: best_fit_crop leaves out up to so much. What is short is encoded at the end.
SPARE = {"best_fit_crop": 1.5}


def prepare_part(
    recipe: Any,
    tokenizer: Any,
    *,
    sources: tuple[list, list],
    part: tuple[int, int],
    watchlist: str | Path | None = None,
    report: Callable[[int], None] = lambda tokens: None,
) -> list[int]:
    """Encode part k of n (from 1) of the training text, and return the parts that are still to come.

    Any part may be made again, or twice at once. When no part is to come, `prepare_now` finds all of the text encoded.
    report: called with the number of tokens after each run of blocks.
    """
    number, parts = part
    plan = make_plan(recipe, tokenizer, sources=sources, watchlist=watchlist)
    note_user(plan, None)
    markers = {k: Preparation(plan).folder / f"part-{k}-of-{parts}" for k in range(1, parts + 1)}
    remove_file(markers[number])
    with Workshop(plan, tokenizer, sources=sources) as workshop:
        for source, about in enumerate(plan["train"]["sequences"]):
            left = missing_rows(workshop.streams["train"], source) * plan["row_tokens"] / parts
            left *= SPARE.get(about["settings"].get("packing"), 1.0)
            if left > 0:
                for tokens in workshop.encode(source, part=(number - 1, parts)):
                    report(tokens)
                    left -= tokens
                    if left <= 0:
                        break
    with file_lock(markers[number].with_name("parts.lock")):  # so that of two that end at once one is the last
        markers[number].touch()
        sealed = next_shard(streams_of(plan)) is None
        return [k for k, marker in markers.items() if not marker.exists() and not sealed]


def missing_rows(stream: Stream, source: int) -> float:
    """Return how many more rows of a source are to be sealed, in whole shards; infinite where all of it is."""
    sequence = stream.sequences[source]
    if sequence.end is not None:
        return 0
    if stream.mixture.total_rows is None:
        return math.inf
    return stream.mixture.used(stream.mixture.total_rows)[source] + sequence.shard_rows - sequence.rows


def discard_damaged(plan: dict) -> None:
    """Delete damaged seals of the plan's shards, said in a line each, so that these shards are made again."""
    for folder in folders_of(plan):
        if not damaged_seals(folder):
            continue  # without the lock: another run may be at work there for hours
        with file_lock(folder / ".lock"):
            for path in damaged_seals(folder):
                remove_file(path)
                print(
                    f"data: {path}: is not as it was written; made again from the source", file=sys.stderr, flush=True
                )


@contextmanager
def locks(plan: dict) -> Iterator[None]:
    """Hold the locks of all sequences of a plan, always taken in the same order."""
    with ExitStack() as stack:
        for folder in folders_of(plan):
            stack.enter_context(file_lock(folder / ".lock"))
        yield


class Preparation:
    """A plan, and the process that carries it out. waited_s: seconds this rank has waited for shards."""

    def __init__(self, plan: dict):
        self.plan, self.waited_s = plan, 0.0
        self.folder = Path(plan["cache_dir"]) / "preparations" / digest(plan)
        self.child: subprocess.Popen | None = None
        self.task: dict | None = None
        self.opened = time.monotonic()

    def description(self) -> dict:
        """Return what another rank needs to attach; JSON."""
        return self.plan

    @classmethod
    def attach(cls, description: dict) -> "Preparation":
        return cls(description)

    def start(self, task: dict) -> None:
        """Start the child with its task; if another one works on this very plan, it is left to it."""
        self.task = task
        self.folder.mkdir(parents=True, exist_ok=True)
        # Waiting ranks hold it for an instant to probe it: hence the second.
        held = lock(self.folder / ".lock", wait_s=1.0)
        if held is None:
            return
        with held:
            remove_file(self.folder / "failure.json")
            remove_file(self.folder / RETRIES)
            paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TOKENIZERS_PARALLELISM": "true"}
            environment.pop("TANDEM_STATUS", None)  # the run's own, in which the first to end has the word
            # The child inherits the lock, where locks are: held without a gap from here until it ends, however it ends.
            with open(self.folder / "log.txt", "wb") as log:
                self.child = subprocess.Popen(
                    [sys.executable, "-m", "pipeline.data", "--ahead", str(self.folder)],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    pass_fds=held.descriptors(),
                    start_new_session=True,  # Ctrl-C is for the training, which then still gets its last rows.
                )
            assert self.child.stdin is not None
            with self.child.stdin as pipe:  # by pipe: the child runs this very recipe, not one read from a file again
                pickle.dump(task, pipe)

    def is_running(self) -> bool:
        """Return whether some process is preparing this plan."""
        if self.child is not None:
            return self.child.poll() is None
        self.folder.mkdir(parents=True, exist_ok=True)
        held = lock(self.folder / ".lock")
        if held is None:
            return True
        held.close()
        # Of a lock that only this machine knows nothing can be said of a process on another one; its run ends with it.
        return is_stand_in(held) and self.task is None and not (self.folder / "failure.json").exists()

    def wait_until(self, there: Callable[[], bool], *, what: str) -> None:
        """Wait until `there()` is true. Raises what the preparing process failed with, or DataError when it is gone."""
        if there():
            return
        started = time.monotonic()
        with waiting(f"data: preparing {what}", detail=self.progress, after_s=1.0):
            while not there():
                time.sleep(POLL_S)
                if self.is_running():
                    beat()  # it may fetch a large file for long; this rank does not hang
                elif not there():
                    self._go_on_or_raise(what)
        self.waited_s += time.monotonic() - started

    def num_retries(self) -> int:
        """Return how often the preparing process has read something again since it was started."""
        return retries_in(self.folder / RETRIES)

    def progress(self) -> str:
        """Return how far each training source is."""
        stream = streams_of(self.plan)["train"]
        return ", ".join(
            f"{about['name']}: {short_count(sequence.rows * self.plan['row_tokens'])} tokens are ready"
            for about, sequence in zip(self.plan["train"]["sequences"], stream.sequences, strict=True)
        )

    def _go_on_or_raise(self, what: str) -> None:
        path = self.folder / "failure.json"
        if path.exists():
            failure = read_json(path)
            raise getattr(errors, failure["class"], DataError)(failure["message"])
        if self.child is None and self.task is not None:
            self.start(self.task)  # It was another run's child, and ended with that run.
            return
        if self.child is None and time.monotonic() - self.opened < START_GRACE_S:
            return
        raise DataError(
            f"{self.folder}: the process that prepares the data ended before {what} was ready; its last words are in log.txt "
            "there. Run the same command again: preparation goes on where it stopped."
        )

    def close(self) -> None:
        """End the child, if there is one; what is sealed stays."""
        if self.child is not None and self.child.poll() is None:
            self.child.terminate()
            self.child.wait()


def short_count(count: float) -> str:
    """Return the count in the unit that shows it: 950, 12.3K, 1.2M, 10.5B."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= 0.99995 * size:  # 999,960 is 1,000.0K, which is 1.0M
            return f"{count / size:,.1f}{unit}"
    return f"{count:.0f}"


# data.keep_shards: token shards that come and go with the reader, for disks that cannot hold a run's data.

WINDOW_POLL_S = 0.2


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
            time.sleep(WINDOW_POLL_S)
        shard, after = shard_of(stream, source, nexts[source])
        if shard >= len(sequence.seals):
            workshop.extend("train", source)
            if shard >= len(sequence.seals):  # It ended there: the next rows are its first again, or another source's.
                continue
        elif not shard_path(sequence.folder, shard).exists():
            workshop.make_again("train", source, shard)
        nexts[source] = after


# The child process that prepares while training reads: takes its task from stdin, leaves a failure as failure.json.


def run_ahead(folder: Path) -> int:
    """Carry out the task {plan, recipe, tokenizer, from_step} that comes on stdin; returns the exit status."""
    content = sys.stdin.buffer.read()
    _end_with(os.getppid())
    if hasattr(os, "nice"):
        os.nice(5)  # Training goes first; when it waits for rows, the processor is free anyway.
    own = None if locks_are_inherited() else lock(folder / ".lock", wait_s=START_GRACE_S)  # noqa: F841 - held to the end
    task = pickle.loads(content)
    keep_retries_in(folder / RETRIES)
    try:
        carry_out(folder, task)
    except TandemError as error:
        return _failed(folder, error)
    except OSError as error:
        message = f"{error.filename or folder}: {error.strerror}, so the shards cannot be written. Free some space or move data.cache_dir; then run the same command again."
        name = "DiskFullError" if error.errno in (28, 122) else "CannotWriteError"
        write_json(folder / "failure.json", {"class": name, "message": message})
        return 74
    except BaseException as error:
        if panic := of_panic(error):
            return _failed(folder, panic)
        raise
    return 0


def _failed(folder: Path, error: TandemError) -> int:
    write_json(folder / "failure.json", {"class": type(error).__name__, "message": str(error)})
    return error.status


def _end_with(parent: int) -> None:
    """End when the training has ended: shards are whole or absent, so any moment will do."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def carry_out(folder: Path, task: dict[str, Any]) -> None:
    from pipeline.sources.open import open_sources

    recipe, plan, tokenizer = task["recipe"], task["plan"], task["tokenizer"]
    sources = open_sources(recipe, kind=plan["kind"])
    found = make_plan(recipe, tokenizer, sources=sources)
    for role in ROLES:
        if (found[role] or {}).get("sequences") != (plan[role] or {}).get("sequences"):
            raise DataError(
                f"{recipe.path or 'recipe'}: the {role} sources are not what they were when the run started a moment ago. "
                "Leave the files as they are while a run reads them, and run the same command again."
            )
    with locks(plan), Workshop(plan, tokenizer, sources=sources, retries=folder / RETRIES) as workshop:
        if plan["keep_shards"]:
            prepare_sliding(workshop, folder, from_row=task["from_step"] * plan["rows_per_step"])
        else:
            for _ in workshop.prepare():
                pass
