"""Prepared shards in a store or a dataset of the Hub: `--publish` sends them, data.shards_from takes them instead of making them.

ADDRESS/<key>/                 a sequence's files as they lie in the cache (shards.py); all that their bytes follow from is in the key (plan.py)
ADDRESS/<key>/published.json   sent behind the files that it lists: the key and their sha256. What it does not list is not there

What was taken is checked against that list, its own seal and the plan. Who may write at the address decides what is trained on.
"""

import os
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
from pipeline.process.errors import DamagedFileError, InputMissingError, ServiceError
from pipeline.process.network import HUB_DATASET, as_os_error, limit_silence, opened
from pipeline.process.storage import fsync_file, fsync_folder, read_sealed_json, sha256_file, write_sealed_json
from pipeline.sources.hub_files import retried

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
        limit_silence()
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
    """Send every shard of a plan that the address does not have; return files and bytes sent. Raises ServiceError when it does not take them."""
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
            f"{address}: does not take the prepared shards ({error}). They lie in {plan['cache_dir']}; look at the address and the credentials, "
            f"and run the same command again: what a {LIST} there lists is not sent again."
        ) from error
    return len(sent), sum(path.stat().st_size for path in sent)


def _sums(folder: Path) -> dict[Path, str]:
    """Return the sha256 of the files of a sequence without a gap, each seal behind its shard, whose sum it has."""
    numbers = takewhile(lambda n: seal_path(folder, n).exists() and not is_damaged(folder, n, verify=False), count())
    sealed = {shard_path(folder, n): read_seal(folder, n)["sha256"] for n in numbers}
    files = [path(folder, n) for n in range(len(sealed)) for path in (state_path, shard_path, seal_path)]
    return {path: sealed.get(path) or sha256_file(path) for path in (*files, end_path(folder)) if path.exists()}


def _listed(place: Store | HubDataset, key: str, temporary: Path) -> dict[str, str]:
    """Return the sha256 of the files of a list, by name; none where there is no list. Raises DamagedFileError for a damaged and for a foreign one."""
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
    """Shards at an address, taken for a preparation one by one until one is missing or refused; the rest of that sequence is made here."""

    def __init__(self, address: str):
        self.address, self.place = address, open_place(address)
        self.lists: dict[str, dict[str, str]] = {}
        self.taken = 0
        self.exhausted: set[str] = set()

    def take(self, folder: Path, number: int, *, settings: dict) -> bool:
        """Return whether the shard of that number, or behind the last one the end, now lies in the folder, whose lock the caller holds."""
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
    """Return whether a shard of that content is what a sequence of these settings has at this number. Raises DamagedFileError."""
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
