"""Shards made once and shared: at once, by parts, or ahead of the step; published, and taken from where others
published them; and pruned.
"""

import json
import math
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import chain, count, takewhile
from pathlib import Path
from typing import Any

from pipeline.data.packing import AHEAD, SequenceWriter
from pipeline.data.preparation import (
    KEY_LENGTH,
    RETRIES,
    ROLES,
    START_GRACE_S,
    USERS,
    Preparation,
    damaged_shards,
    discard_damaged,
    folders_of,
    locks,
    make_plan,
    next_shard,
    note_user,
    sequence_folder,
    streams_of,
)
from pipeline.data.stream import (
    FORMAT,
    Shard,
    Stream,
    end_path,
    is_damaged,
    map_tensors,
    read_end,
    read_seal,
    seal_path,
    seen_path,
    shard_path,
    state_path,
)
from pipeline.data.workers import (
    EncodedReader,
    Engine,
    RayTasks,
    Runs,
    Work,
    WorkerPool,
    has_encoded,
    note_part,
    parts_noted,
    processes_for,
    remove_encoded,
)
from pipeline.hardware.processor import keep_freed_memory
from pipeline.metrics import digest
from pipeline.process.commands import end_with, yield_to_training
from pipeline.process.errors import (
    DamagedFileError,
    DataError,
    InputMissingError,
    ServiceError,
    TandemError,
    from_rust_panic,
)
from pipeline.process.network import HUB_DATASET, as_os_error, keep_retries_in, opened, set_http_timeouts
from pipeline.process.storage import (
    file_lock,
    folder_bytes,
    fsync_file,
    fsync_folder,
    lock,
    read_sealed_json,
    remove_file,
    sha256_file,
    write_json,
    write_sealed_json,
)
from pipeline.sources.hub_files import retried

# Prepared shards in a store or a dataset of the Hub: `--publish` sends them, data.shards_from takes them instead of
# making them.
#
# ADDRESS/<key>/                 a sequence's files as they lie in the cache (stream.py); all that their bytes follow
# from is in the key (preparation.py) ADDRESS/<key>/published.json   sent behind the files that it lists: the key and
# their sha256. What it does not list is not there
#
# What was taken is checked against that list, its own seal and the plan. Who may write at the address decides what is
# trained on.

LIST = "published.json"
FILES_A_COMMIT = 99  # and the list: the Hub advises no more than 100


class Store:
    """A folder of an object store."""

    def __init__(self, address: str):
        self.store, self.root = opened(address)

    def fetch(self, name: str, path: Path) -> bool:
        """Write a file of the address to a path here; return whether there is one."""
        try:
            self.store.get_file(f"{self.root}/{name}", str(path))
        except FileNotFoundError:
            return False
        return True

    def create(self) -> None:
        """Do nothing: a bucket is its owner's to make."""

    def write(self, files: dict[str, Path]) -> None:
        for name, path in files.items():
            with open(path, "rb") as source, self.store.open(f"{self.root}/{name}", "wb") as target:
                shutil.copyfileobj(source, target, 2**22)


class HubDataset:
    """A folder of a dataset repository on the Hub; a new one is private."""

    def __init__(self, address: str):
        set_http_timeouts()
        found = HUB_DATASET.fullmatch(address)
        assert found
        self.repo_id, self.folder = found[1], f"{found[3]}/".lstrip("/")
        self.repo: Any = {"repo_type": "dataset", "revision": found[2]}

    def fetch(self, name: str, path: Path) -> bool:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import RemoteEntryNotFoundError

        with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # the Hub's cache would keep it a second time

            def get() -> bool:
                try:
                    os.replace(hf_hub_download(self.repo_id, self.folder + name, local_dir=folder, **self.repo), path)
                except RemoteEntryNotFoundError:
                    return False
                return True

            return retried(get, what=f"{self.repo_id}/{self.folder}{name}", where="prepared shards")

    def create(self) -> None:
        from huggingface_hub import HfApi

        HfApi().create_repo(self.repo_id, repo_type="dataset", private=True, exist_ok=True)

    def write(self, files: dict[str, Path]) -> None:
        from huggingface_hub import CommitOperationAdd, HfApi

        added = [CommitOperationAdd(self.folder + name, str(path)) for name, path in files.items()]
        HfApi().create_commit(self.repo_id, added, commit_message=f"Add {len(added)} files of shards", **self.repo)


def open_place(address: str) -> Store | HubDataset:
    return HubDataset(address) if address.startswith("hf:") else Store(address)


def publish(plan: dict, address: str) -> tuple[int, int]:
    """Send every shard of a plan that the address does not have; return files and bytes sent. Raises ServiceError when
    it does not take them."""
    place, sent = open_place(address), list[Path]()
    try:
        with as_os_error(), locks(plan), tempfile.TemporaryDirectory() as temporary:
            place.create()
            for folder in folders_of(plan):
                try:
                    there = _listed(place, folder.name, Path(temporary))
                except DamagedFileError:
                    there = {}  # all is sent again
                sums = _sums(folder)
                new = [path for path in sums if there.get(path.name) != sums[path]]
                for first in range(0, len(new), FILES_A_COMMIT):
                    some = new[first : first + FILES_A_COMMIT]
                    there |= {path.name: sums[path] for path in some}
                    write_sealed_json(Path(temporary) / LIST, {"key": folder.name, "files": there})
                    place.write({f"{folder.name}/{path.name}": path for path in [*some, Path(temporary) / LIST]})
                    sent += some
    except (OSError, ServiceError, InputMissingError) as error:
        raise ServiceError(
            f"{address}: does not take the prepared shards ({error}). They lie in {plan['cache_dir']}; look at the "
            f"address and the credentials, and run the same command again: what a {LIST} there lists is not sent "
            "again."
        ) from error
    return len(sent), sum(path.stat().st_size for path in sent)


def _sums(folder: Path) -> dict[Path, str]:
    """Return the sha256 of the files of a sequence without a gap, each seal behind its shard, whose sum it has."""
    numbers = takewhile(lambda n: seal_path(folder, n).exists() and not is_damaged(folder, n, verify=False), count())
    sealed = {shard_path(folder, n): read_seal(folder, n)["sha256"] for n in numbers}
    files = [path(folder, n) for n in range(len(sealed)) for path in (state_path, shard_path, seal_path)]
    return {path: sealed.get(path) or sha256_file(path) for path in (*files, end_path(folder)) if path.exists()}


def _listed(place: Store | HubDataset, key: str, temporary: Path) -> dict[str, str]:
    """Return the sha256 of the files of a list, by name; none where there is no list. Raises DamagedFileError for a
    damaged and for a foreign one."""
    if not place.fetch(f"{key}/{LIST}", temporary / LIST):
        return {}
    try:
        found = read_sealed_json(temporary / LIST)
    except DamagedFileError:
        raise DamagedFileError(f"{key}/{LIST} is not as it was written") from None
    if found.get("key") != key or not isinstance(found.get("files"), dict):
        raise DamagedFileError(f"{key}/{LIST} is of other shards, {found.get('key')}")
    return found["files"]


class PublishedShards:
    """Shards at an address, taken for a preparation one by one until one is missing or refused; the rest of that
    sequence is made here."""

    def __init__(self, address: str):
        self.address, self.place = address, open_place(address)
        self.lists: dict[str, dict[str, str]] = {}
        self.taken = 0
        self.exhausted: set[str] = set()

    def take(self, folder: Path, number: int, *, settings: dict) -> bool:
        """Return whether the shard of that number, or behind the last one the end, now lies in the folder, whose lock
        the caller holds."""
        key, temporary = folder.name, folder / ".taken"  # one name: what a killed process left is written over
        if key in self.exhausted:
            return False
        try:
            with as_os_error():
                temporary.mkdir(exist_ok=True)
                if key not in self.lists:
                    self.lists[key] = _listed(self.place, key, temporary)
                if self._take(folder, number, settings, temporary):
                    self.taken += 1
                    return True
        except (OSError, DamagedFileError, ServiceError, InputMissingError) as error:
            reason = str(error).rstrip(".")
            print(f"data: {self.address}: {reason}; from there on shards are made here", file=sys.stderr, flush=True)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        self.exhausted.add(key)
        return False

    def _take(self, folder: Path, number: int, settings: dict, temporary: Path) -> bool:
        key, listed, end = folder.name, self.lists[folder.name], end_path(folder).name
        names = [path(folder, number).name for path in (state_path, shard_path, seal_path)]
        if names[-1] not in listed:
            if number == 0 or end not in listed:
                return False
            names = [end]
        for name in (names := [name for name in names if name in listed]):
            there = self.place.fetch(f"{key}/{name}", temporary / name)
            if not there or sha256_file(temporary / name) != listed[name]:
                raise DamagedFileError(f"{key}/{name} is {'not as it was published' if there else 'missing'}")
        if names == [end]:
            belongs = read_end(temporary)["shards"] == number
        else:
            belongs = _belongs(temporary, number, settings, sha256=listed.get(shard_path(folder, number).name))
        if not belongs:
            raise DamagedFileError(f"{key}/{names[-1]} is no seal of these shards")
        for name in names:  # the seal last
            fsync_file(temporary / name)
            os.replace(temporary / name, folder / name)
            fsync_folder(folder)
        return True


def _belongs(folder: Path, number: int, settings: dict[str, Any], *, sha256: str | None) -> bool:
    """Return whether a shard of that content is what a sequence of these settings has at this number. Raises
    DamagedFileError."""
    seal, width = read_seal(folder, number), settings["row_tokens"]
    if seal["sha256"] != sha256 or is_damaged(folder, number, verify=False):
        return False
    try:
        shard = Shard(**map_tensors(shard_path(folder, number)))
    except (ValueError, LookupError, TypeError, RecursionError):  # whole, and no shard
        return False
    found = (seal.get("format"), seal.get("shard"), seal["positions"], len(shard.targets), len(shard.used))
    return (
        found == (FORMAT, number, seal["rows"] * width, seal["rows"], seal["rows"])
        and 0 < seal["rows"] <= settings["shard_rows"]
        and (shard.input_ids.shape, shard.input_ids.dtype.name) == ((seal["rows"], width + 1), settings["dtype"])
    )


Made = tuple[str, int, Stream]  # role, source, stream of a shard that was just made
GoOn = Callable[[], bool]


class Workshop:
    """Writers for the sequences of a plan, and what encodes their text. sources: (train, validation); the caller holds
    the plan's locks. retries: a file that counts what other processes read again."""

    def __init__(self, plan: dict, tokenizer: Any, *, sources: tuple[list, list], retries: Path | None = None):
        self.plan, self.tokenizer, self.retries = plan, tokenizer, retries
        self.engine: Engine | None = None
        self.ends_parts = False  # what parts have encoded is deleted too when it is no more needed here
        self.sources = {"train": sources[0], "validation": sources[1], "documents": sources[1]}
        self.streams = streams_of(plan)
        self.writers: dict[Path, SequenceWriter] = {}
        self.published = PublishedShards(plan["shards_from"]) if plan["shards_from"] else None
        self.watchlist = None
        if plan["watchlist"]:
            from pipeline.data.decontamination import Watchlist

            self.watchlist = Watchlist.load(plan["watchlist"])

    def writer(self, role: str, source: int, from_shard: int | None = None) -> SequenceWriter:
        about = self.plan[role]["sequences"][source]
        is_new = role == "train" and from_shard is None  # the text of others was looked at when they were sealed
        return SequenceWriter(
            sequence_folder(self.plan, about),
            source=self.sources[role][source],
            tokenizer=self.tokenizer,
            settings=about["settings"],
            num_proc=self.plan["num_proc"],
            from_shard=from_shard,
            watchlist=self.watchlist if is_new else None,
            ahead=self.ahead(source) if is_new and self.uses_workers(source) else None,
        )

    def uses_workers(self, source: int) -> bool:
        """Return whether other processes encode a training source, or have encoded something of it."""
        folder = self.streams["train"].sequences[source].folder
        alone = processes_for(self.plan["num_proc"], self.sources["train"][source]) == 1
        return self.plan["engine"] == "ray" or not alone or has_encoded(folder)

    def ahead(self, source: int) -> EncodedReader:
        """Return what gives the blocks of a training source as other processes encode them."""
        if self.engine is None:
            keep_freed_memory()  # shard after shard takes the same arrays, and this process feeds on all others
            sequences = zip(self.plan["train"]["sequences"], self.sources["train"], strict=True)
            folders = {sequence_folder(self.plan, about): (each, about["settings"]) for about, each in sequences}
            self.work = Work(folders, self.tokenizer, watchlist=self.watchlist, retries=self.retries)
            count = max(processes_for(self.plan["num_proc"], each) for each in self.sources["train"])
            self.engine = RayTasks(self.work) if self.plan["engine"] == "ray" else WorkerPool(self.work, count)
        folder = sequence_folder(self.plan, self.plan["train"]["sequences"][source])
        return EncodedReader(self.engine, self.work, folder)

    def encode(self, source: int, *, part: tuple[int, int]) -> Iterator[int]:
        """Encode a part of what is not sealed of a training source; yields the number of tokens of each run of
        blocks."""
        ahead, seals = self.ahead(source), self.streams["train"].sequences[source].seals
        cursor = seals[-1]["cursor"] if seals else {"file": 0, "block": 0}
        for *_, answer in ahead.results(Runs(ahead.source, file=cursor["file"], block=cursor["block"], part=part)):
            yield sum(answer.result())

    def __enter__(self) -> "Workshop":
        return self

    def __exit__(self, *error: object) -> None:
        """End the processes, and delete what they made when nothing more is needed of it; say what was taken."""
        if (published := self.published) and published.taken:
            print(
                f"data: {published.taken} shards and ends of sources were taken from {published.address}", flush=True
            )
        try:
            for writer in self.writers.values():
                writer.close()
        finally:
            if self.engine is not None:
                self.engine.close()
        if self.plan["train"] and next_shard(self.streams) is None:
            for sequence in self.streams["train"].sequences:
                remove_encoded(sequence.folder, of_parts=self.ends_parts or sequence.end is not None)

    def prepare(self, go_on: GoOn = lambda: True) -> Iterator[Made]:
        """Make every shard that the plan needs and lacks, yielding after each; go_on is asked in between."""
        while go_on() and (work := next_shard(self.streams)) is not None:
            role, source = work
            self.extend(role, source)
            yield role, source, self.streams[role]

    def extend(self, role: str, source: int) -> None:
        """Seal the next shard of a source, or its end: the published one where there is one."""
        sequence, settings = self.streams[role].sequences[source], self.plan[role]["sequences"][source]["settings"]
        folder = sequence.folder
        if not (self.published and self.published.take(folder, len(sequence.seals), settings=settings)):
            if folder not in self.writers:
                self.writers[folder] = self.writer(role, source)
            ahead = missing_rows(self.streams[role], source) / sequence.shard_rows - 2
            self.writers[folder].extend(ahead=math.ceil(min(max(ahead, 0), AHEAD)))
        for stream in self.streams.values():
            stream.refresh()

    def repair(self, *, verify: bool) -> Iterator[Made]:
        """Make again the sealed shards whose file is missing or of another size than sealed; with verify, content."""
        for role, source, number in damaged_shards(self.plan, self.streams, verify=verify):
            self.make_again(role, source, number)
            yield role, source, self.streams[role]

    def search_again(self) -> Iterator[Made]:
        """Look for the watch-list in the text of training shards that were sealed without it, which reads their
        sources."""
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
    """(source, shard) of the sealed training shards that the run needs and whose text was not held against the
    watch-list."""
    return [
        (source, number)
        for source, sequence in enumerate(stream.sequences)
        for number in range(stream.shards_needed(source))
        if not seen_path(sequence.folder, number, watchlist_id).exists()
    ]


# Deleting prepared shards that nothing needs any more.

# Shards of which nobody noted the users are kept for so long after they were last written or read.
KEPT_DAYS = 30.0


def unused_folders(plan: dict, *, runs: Path) -> list[Path]:
    """Shard folders of the cache that neither this plan nor a run uses, whichever folder the run lies in."""
    kept = {s["key"] for role in ROLES if plan[role] for s in plan[role]["sequences"]}
    manifests = [path.read_text(errors="replace") for path in runs.glob("*/run_manifest.json")]
    shards = Path(plan["cache_dir"]) / "shards"
    folders = sorted(path for path in shards.glob("*") if path.is_dir()) if shards.is_dir() else []
    unknown = [f for f in folders if f.name not in kept and not any(f.name in manifest for manifest in manifests)]
    return [folder for folder in unknown if not _is_used(folder)]


def _is_used(folder: Path) -> bool:
    """Return whether a run may read these shards: one that is there, or whose disk may only be away; or parts encode
    for them."""
    try:
        if time.time() - parts_noted(folder) < KEPT_DAYS * 86400:
            return True
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
        with file_lock(folder / ".lock", wait_s=0.0) as held:
            if held:
                freed += folder_bytes(folder)
                shutil.rmtree(folder, ignore_errors=True)  # NFS keeps what is open in some process
                count += 1
    return count, freed


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
        workshop.ends_parts = True
        for made in chain(workshop.repair(verify=verify), workshop.prepare(), workshop.search_again()):
            if report is not None:
                report(*made)
    preparation = Preparation(plan)
    for marker in parts_folder(plan).glob("part-*"):
        remove_file(marker)
    return preparation


# Preparation by several machines: each encodes its part into the shared cache, the last one packs and seals.

# Tokens that are encoded for one that is packed: best_fit_crop leaves out up to so much. What is short is encoded at
# the end.
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
    markers = {k: parts_folder(plan) / f"part-{k}-of-{parts}" for k in range(1, parts + 1)}
    remove_file(markers[number])
    with Workshop(plan, tokenizer, sources=sources) as workshop:
        for source, about in enumerate(plan["train"]["sequences"]):
            left = missing_rows(workshop.streams["train"], source) * plan["row_tokens"] / parts
            left *= SPARE.get(about["settings"].get("packing"), 1.0)
            if left > 0:
                note_part(workshop.streams["train"].sequences[source].folder)
                for tokens in workshop.encode(source, part=(number - 1, parts)):
                    report(tokens)
                    left -= tokens
                    if left <= 0:
                        break
    # So that of two that end at once one is the last.
    with file_lock(markers[number].with_name("parts.lock")):
        markers[number].touch()
        sealed = next_shard(streams_of(plan)) is None
        return [k for k, marker in markers.items() if not marker.exists() and not sealed]


def parts_folder(plan: dict) -> Path:
    """Return where the parts that are done are noted: hosts may differ in all but the sequences, as in num_proc."""
    sequences = {role: plan[role] and plan[role]["sequences"] for role in ROLES}
    return Path(plan["cache_dir"]) / "preparations" / digest(sequences, KEY_LENGTH)


def missing_rows(stream: Stream, source: int) -> float:
    """Return how many more rows of a source are to be sealed, in whole shards; infinite where all of it is."""
    sequence = stream.sequences[source]
    if sequence.end is not None:
        return 0
    if stream.mixture.total_rows is None:
        return math.inf
    return stream.mixture.used(stream.mixture.total_rows)[source] + sequence.shard_rows - sequence.rows


# The child process that prepares while training reads: takes its task from stdin, leaves a failure as failure.json.


def run_ahead(folder: Path) -> int:
    """Carry out the task {plan, recipe, tokenizer} that comes on stdin; returns the exit status."""
    content = sys.stdin.buffer.read()
    end_with(os.getppid())  # sealed shards are whole, so any moment will do
    signal.signal(signal.SIGTERM, _stop)
    yield_to_training()
    own = lock(folder / ".lock", wait_s=START_GRACE_S)  # held to the end
    if own is None:
        return 0  # another process prepares this plan
    task = pickle.loads(content)
    keep_retries_in(folder / RETRIES)
    try:
        carry_out(folder, task)
    except TandemError as error:
        return _failed(folder, error)
    except OSError as error:
        message = (
            f"{error.filename or folder}: {error.strerror}, so the shards cannot be written. Free some space or move "
            "data.cache_dir; then run the same command again."
        )
        name = "DiskFullError" if error.errno in (28, 122) else "CannotWriteError"
        write_json(folder / "failure.json", {"class": name, "message": message})
        return 74
    except BaseException as error:
        if panic := from_rust_panic(error):
            return _failed(folder, panic)
        raise
    return 0


def _stop(*signal_and_frame: object) -> None:
    os._exit(0)


def _failed(folder: Path, error: TandemError) -> int:
    write_json(folder / "failure.json", {"class": type(error).__name__, "message": str(error)})
    return error.status


def carry_out(folder: Path, task: dict[str, Any]) -> None:
    from pipeline.sources.open import open_sources

    recipe, plan, tokenizer = task["recipe"], task["plan"], task["tokenizer"]
    sources = open_sources(recipe, kind=plan["kind"])
    found = make_plan(recipe, tokenizer, sources=sources)
    for role in ROLES:
        if (found[role] or {}).get("sequences") != (plan[role] or {}).get("sequences"):
            raise DataError(
                f"{recipe.path or 'recipe'}: the {role} sources are not what they were when the run started a moment "
                "ago. Leave the files as they are while a run reads them, and run the same command again."
            )
    with locks(plan), Workshop(plan, tokenizer, sources=sources, retries=folder / RETRIES) as workshop:
        for _ in workshop.repair(verify=False):
            pass
        for _ in workshop.prepare():
            pass
