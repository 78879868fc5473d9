"""Prepared shards in a store or a dataset of the Hub: `--publish` sends them, data.shards_from takes them.

ADDRESS/<key>/ holds a folder of shards as it is in the cache, and published.json, sent behind the files that it lists
with their sha256: what it does not list is not there. What was taken is checked against that list, its own seal and the
plan. Who may write at the address decides what is trained on.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from pipeline.data.row_plan import folders_of, locks
from pipeline.data.shards import FORMAT, end_path, is_damaged, read_end, read_seal, seal_path, shard_path, state_path
from pipeline.process.errors import DamagedFileError, InputMissingError, ServiceError
from pipeline.process.network import HUB_DATASET, as_os_error, opened, set_http_timeouts
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
        set_http_timeouts()
        found = HUB_DATASET.fullmatch(address)
        assert found
        self.repo_id, self.folder = found[1], f"{found[3]}/".lstrip("/")
        self.repo: Any = {"repo_type": "dataset", "revision": found[2]}

    def fetch(self, name: str, path: Path) -> bool:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import RemoteEntryNotFoundError

        name = self.folder + name
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # the Hub's cache would keep it a second time

            def get() -> bool:
                try:
                    os.replace(hf_hub_download(self.repo_id, name, local_dir=folder, **self.repo), path)
                except RemoteEntryNotFoundError:
                    return False
                return True

            return retried(get, what=f"{self.repo_id}/{name}", where="prepared shards")

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
    sent = list[Path]()
    try:
        with as_os_error(), locks(plan), tempfile.TemporaryDirectory() as temporary:
            place, listing = open_place(address), Path(temporary) / LIST
            place.create()
            for folder in folders_of(plan):
                try:
                    there = _listed(place, folder.name, listing)
                except DamagedFileError:
                    there = {}  # all is sent again
                sums = _sums(folder)
                new = [path for path in sums if there.get(path.name) != sums[path]]
                for first in range(0, len(new), FILES_A_COMMIT):
                    some = new[first : first + FILES_A_COMMIT]
                    there |= {path.name: sums[path] for path in some}
                    write_sealed_json(listing, {"key": folder.name, "files": there})
                    place.write({f"{folder.name}/{path.name}": path for path in [*some, listing]})
                    sent += some
    except (OSError, ServiceError, InputMissingError) as error:
        raise ServiceError(
            f"{address}: does not take the prepared shards ({error}). Run the same command again: what a {LIST} there "
            "lists is not sent again."
        ) from error
    return len(sent), sum(path.stat().st_size for path in sent)


def _sums(folder: Path) -> dict[Path, str]:
    """Return the sha256 of the files of a folder without a gap, each seal behind its shard, whose sum it has."""
    sums: dict[Path, str] = {}

    def add(path: Path) -> None:
        if path.exists():
            sums[path] = sha256_file(path)

    number = 0
    while seal_path(folder, number).exists() and not is_damaged(folder, number, verify=False):
        add(state_path(folder, number))
        sums[shard_path(folder, number)] = read_seal(folder, number)["sha256"]
        add(seal_path(folder, number))
        number += 1
    add(end_path(folder))
    return sums


def _listed(place: Store | HubDataset, key: str, path: Path) -> dict[str, str]:
    """Return the sha256 of the files of a list by name, none where there is no list. path: where to write the list.

    Raises DamagedFileError for a damaged list and for one of other shards.
    """
    if not place.fetch(f"{key}/{LIST}", path):
        return {}
    try:
        found = read_sealed_json(path)
    except DamagedFileError:
        raise DamagedFileError(f"{key}/{LIST} is not as it was written") from None
    if found.get("key") != key:
        raise DamagedFileError(f"{key}/{LIST} is of other shards, {found.get('key')}")
    return found["files"]


class PublishedShards:
    """Shards at an address, taken one by one until one is missing or refused; the rest of that source is made here."""

    def __init__(self, address: str):
        self.address, self.place = address, open_place(address)
        self.lists: dict[str, dict[str, str]] = {}
        self.num_taken = 0
        self.exhausted: set[str] = set()

    def close(self) -> None:
        """Print how much was taken."""
        if self.num_taken:
            print(f"data: {self.num_taken} shards and ends of sources were taken from {self.address}", flush=True)

    def take(self, folder: Path, number: int, *, settings: dict) -> bool:
        """Return whether the shard of that number, or behind the last one the end, now is in the folder, whose lock
        the caller holds."""
        key, temporary = folder.name, folder / ".taken"  # one name: what a killed process left is written over
        if key in self.exhausted:
            return False
        is_taken = False
        try:
            with as_os_error():
                temporary.mkdir(exist_ok=True)
                if key not in self.lists:
                    self.lists[key] = _listed(self.place, key, temporary / LIST)
                is_taken = self._take(folder, number, settings, temporary)
        except (OSError, DamagedFileError, ServiceError, InputMissingError) as error:
            reason = str(error).rstrip(".")
            print(f"data: {self.address}: {reason}; from there on shards are made here", file=sys.stderr, flush=True)
        shutil.rmtree(temporary, ignore_errors=True)
        if is_taken:
            self.num_taken += 1
        else:
            self.exhausted.add(key)
        return is_taken

    def _take(self, folder: Path, number: int, settings: dict, temporary: Path) -> bool:
        # 1. The files of that shard, or of the end where no further shard is listed.
        key, listed = folder.name, self.lists[folder.name]
        names = [path(folder, number).name for path in (state_path, shard_path, seal_path)]
        if names[-1] not in listed:
            names = [end_path(folder).name]
            if number == 0 or names[0] not in listed:
                return False
        names = [name for name in names if name in listed]
        # 2. Each is what the list says, and the seal is of these shards.
        for name in names:
            if not self.place.fetch(f"{key}/{name}", temporary / name):
                raise DamagedFileError(f"{key}/{name} is missing")
            if sha256_file(temporary / name) != listed[name]:
                raise DamagedFileError(f"{key}/{name} is not as it was published")
        if names == [end_path(folder).name]:
            belongs = read_end(temporary)["shards"] == number
        else:
            belongs = _belongs(temporary, number, settings)
        if not belongs:
            raise DamagedFileError(f"{key}/{names[-1]} is no seal of these shards")
        # 3. Into the cache, the seal last: it says that the shard is whole.
        for name in names:
            fsync_file(temporary / name)
            os.replace(temporary / name, folder / name)
            fsync_folder(folder)
        return True


def _belongs(folder: Path, number: int, settings: dict[str, Any]) -> bool:
    """Return whether a shard is what a source of these settings has at this number."""
    seal = read_seal(folder, number)
    found = (seal.get("format"), seal.get("shard"), seal["positions"])
    wanted = (FORMAT, number, seal["rows"] * settings["row_tokens"])
    return found == wanted and seal["rows"] <= settings["shard_rows"] and not is_damaged(folder, number, verify=True)
