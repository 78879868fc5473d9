"""Prepared shards in a store or a dataset of the Hub: `--publish` sends them, data.shards_from takes them instead of making them.

ADDRESS/<key>/                 a sequence's files as they lie in the cache (shards.py); all that their bytes follow from is in the key (plan.py)
ADDRESS/<key>/published.json   sent last: the key and the sha256 of every file. What it does not list is not there

What was taken is checked against that list, its own seal and the plan. Who may write at the address decides what is trained on.
"""

import hashlib
import shutil
import sys
import tempfile
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from pipeline.data.plan import folders_of
from pipeline.data.preparation import locks
from pipeline.data.shards import (
    FORMAT,
    Shard,
    end_path,
    is_damaged,
    map_tensors,
    read_end,
    read_seal,
    seal_path,
    shard_path,
    state_path,
)
from pipeline.process.errors import DamagedFileError, ServiceError
from pipeline.process.network import HUB_DATASET, as_os_error, opened
from pipeline.process.storage import read_sealed_json, sha256_file, write_bytes, write_sealed_json

LIST = "published.json"
FILES_A_COMMIT = 100  # of the Hub, which advises no more


class Store:
    """A folder of an object store."""

    def __init__(self, address: str):
        self.store, self.root = opened(address)

    def read(self, name: str) -> bytes | None:
        try:
            return self.store.cat_file(f"{self.root}/{name}")
        except FileNotFoundError:
            return None

    def create(self) -> None:
        """Do nothing: a bucket is its owner's to make."""

    def write(self, files: dict[str, Path]) -> None:
        for name, path in files.items():
            with open(path, "rb") as source, self.store.open(f"{self.root}/{name}", "wb") as target:
                shutil.copyfileobj(source, target, 2**22)


class Dataset:
    """A folder of a dataset repository on the Hub; a new one is private."""

    def __init__(self, address: str):
        from pipeline.process.network import limit_silence

        limit_silence()
        found = HUB_DATASET.fullmatch(address)
        assert found
        self.repo_id, self.revision, self.folder = found[1], found[2], found[3].strip("/")
        self.repo: Any = {"repo_type": "dataset", "revision": self.revision}

    def read(self, name: str) -> bytes | None:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import RemoteEntryNotFoundError

        with tempfile.TemporaryDirectory() as folder:  # and not the Hub's cache, which would keep it a second time
            try:
                path = hf_hub_download(self.repo_id, self._name(name), local_dir=folder, **self.repo)
            except RemoteEntryNotFoundError:
                return None
            return Path(path).read_bytes()

    def create(self) -> None:
        from huggingface_hub import HfApi

        HfApi().create_repo(self.repo_id, repo_type="dataset", private=True, exist_ok=True)

    def write(self, files: dict[str, Path]) -> None:
        from huggingface_hub import CommitOperationAdd, HfApi

        api = HfApi()
        files_added = [CommitOperationAdd(self._name(name), str(path)) for name, path in files.items()]
        for first in range(0, len(files_added), FILES_A_COMMIT):
            added = files_added[first : first + FILES_A_COMMIT]
            api.create_commit(
                self.repo_id, added, commit_message=f"Add {len(added)} files of prepared shards", **self.repo
            )

    def _name(self, name: str) -> str:
        return f"{self.folder}/{name}" if self.folder else name


def place_at(address: str) -> Store | Dataset:
    return Dataset(address) if address.startswith("hf:") else Store(address)


def publish(plan: dict, address: str) -> tuple[int, int]:
    """Send every shard of a plan that the address does not have; return files and bytes sent. Raises ServiceError when it does not take them."""
    place, sent = place_at(address), list[Path]()
    try:
        with as_os_error(), locks(plan), tempfile.TemporaryDirectory() as temporary:
            place.create()
            for folder in folders_of(plan):
                try:
                    there = _listed(place.read(f"{folder.name}/{LIST}"), folder.name)
                except DamagedFileError:
                    there = {}  # all is sent again
                files = _files(folder)
                sums = {path.name: sha256_file(path) for path in files}
                new = {f"{folder.name}/{path.name}": path for path in files if there.get(path.name) != sums[path.name]}
                if new:
                    write_sealed_json(Path(temporary) / LIST, {"key": folder.name, "files": sums})
                    place.write({**new, f"{folder.name}/{LIST}": Path(temporary) / LIST})
                    sent += new.values()
    except OSError as error:
        raise ServiceError(
            f"{address}: does not take the prepared shards ({error}). They lie in {plan['cache_dir']}; look at the address and the credentials, "
            "and run the same command again: what has been sent is not sent again."
        ) from error
    return len(sent), sum(path.stat().st_size for path in sent)


def _files(folder: Path) -> list[Path]:
    """Return the files of a sequence without a gap, each seal behind its shard."""
    numbers = takewhile(lambda n: seal_path(folder, n).exists() and shard_path(folder, n).exists(), count())
    files = [path(folder, n) for n in numbers for path in (state_path, shard_path, seal_path)]
    return [path for path in (*files, end_path(folder)) if path.exists()]


def _listed(content: bytes | None, key: str) -> dict[str, str]:
    """Return the sha256 of the files of a list, by name; none where there is no list. Raises DamagedFileError for a damaged and for a foreign one."""
    if content is None:
        return {}
    with tempfile.TemporaryDirectory() as temporary:
        (Path(temporary) / LIST).write_bytes(content)
        try:
            found = read_sealed_json(Path(temporary) / LIST)
        except DamagedFileError:
            raise DamagedFileError(f"{key}/{LIST} is not as it was written") from None
    if found.get("key") != key or not isinstance(found.get("files"), dict):
        raise DamagedFileError(f"{key}/{LIST} is of other shards, {found.get('key')}")
    return found["files"]


class PublishedShards:
    """Shards at an address, taken for a preparation one by one until one is missing or refused; the rest of that sequence is made here."""

    def __init__(self, address: str):
        self.address, self.place = address, place_at(address)
        self.lists: dict[str, dict[str, str]] = {}
        self.taken: dict[str, int] = {}
        self.over: set[str] = set()

    def take(self, folder: Path, number: int, *, settings: dict) -> bool:
        """Return whether the shard of that number, or behind the last one the end, now lies in the folder."""
        key = folder.name
        if key in self.over:
            return False
        try:
            with as_os_error():
                if key not in self.lists:
                    self.lists[key] = _listed(self.place.read(f"{key}/{LIST}"), key)
                if self._take(folder, number, settings):
                    self.taken[key] = self.taken.get(key, 0) + 1
                    return True
        except (OSError, DamagedFileError) as error:
            print(f"data: {self.address}: {error}; from there on shards are made here", file=sys.stderr, flush=True)
        self.over.add(key)
        return False

    def _take(self, folder: Path, number: int, settings: dict) -> bool:
        listed = self.lists[folder.name]
        paths = [path(folder, number) for path in (state_path, shard_path, seal_path)]
        if paths[-1].name not in listed:
            if number == 0 or end_path(folder).name not in listed:
                return False
            paths = [end_path(folder)]
        contents = {path: self._content(folder.name, path.name) for path in paths if path.name in listed}
        with tempfile.TemporaryDirectory() as temporary:
            for path, content in contents.items():
                (Path(temporary) / path.name).write_bytes(content)
            if not _belongs(Path(temporary), number, settings, is_end=len(paths) == 1):
                raise DamagedFileError(f"{folder.name}/{paths[-1].name} is no seal of these shards")
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in contents.items():  # the seal last
            write_bytes(path, content)
        return True

    def _content(self, key: str, name: str) -> bytes:
        content = self.place.read(f"{key}/{name}")
        if content is None or hashlib.sha256(content).hexdigest() != self.lists[key][name]:
            raise DamagedFileError(f"{key}/{name} is {'missing' if content is None else 'not as it was published'}")
        return content


def _belongs(folder: Path, number: int, settings: dict[str, Any], *, is_end: bool) -> bool:
    """Return whether a shard, or the end, is what a sequence of these settings has at this number. Raises DamagedFileError."""
    if is_end:
        return read_end(folder)["shards"] == number
    seal, width = read_seal(folder, number), settings["row_tokens"]
    if is_damaged(folder, number, verify=True):
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
