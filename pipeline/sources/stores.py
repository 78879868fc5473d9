"""Files of object stores and at URLs: listed, and each fetched once into the cache."""

import glob
import hashlib
import posixpath
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from pipeline.process.errors import InputMissingError, RecipeError, ServiceError, first_line
from pipeline.process.network import as_os_error, is_address, is_refused, opened
from pipeline.process.progress import count_text, waiting
from pipeline.process.storage import file_lock, fsync_file
from pipeline.sources.files import IGNORED, SourceFile, refuse_unreadable
from pipeline.sources.raw_rows import is_data


def stored_files(addresses: list[str], *, where: str, cache: Path) -> list[SourceFile]:
    """Return the files of a store that the addresses name, each fetched once: their content decides what is prepared
    from them.

    An address is a file, a glob (** too) or a folder. Raises InputMissingError for one without a file, ServiceError
    for a store that does not answer, RecipeError for files of a kind that cannot be read.
    """
    if not all(map(is_address, addresses)):
        raise RecipeError(
            f"{where}.files: has addresses and paths of this machine. Write two sources, one of each, or fetch the "
            "files."
        )
    found: dict[str, tuple[Any, dict[str, Any]]] = {}
    for address in addresses:
        with _asked(address, where):
            store, path = opened(address)
            is_glob = glob.has_magic(path) and not store.exists(path)  # a name may have brackets
            pattern = path if is_glob else glob.escape(path)
            if not is_glob and store.isdir(path):
                pattern += "/**"
            files = {}
            for name, facts in store.glob(pattern, detail=True).items():
                if facts["type"] == "file" and (is_glob or _is_wanted(name, path)):
                    files[name] = facts
            if not files:  # also what is listed of a store that does not answer
                store.ls(posixpath.dirname(path.partition("*")[0].partition("?")[0].partition("[")[0]))
        if not files:
            raise InputMissingError(
                f"{where}.files: {address!r} names no file, so there is nothing to read. Look at what the bucket "
                "holds."
            )
        scheme = address.partition("://")[0]  # two stores may have a bucket of one name
        found |= {f"{scheme}/{name}": (store, facts) for name, facts in files.items()}
    refuse_unreadable([name.partition("/")[2] for name in found], of="", where=f"{where}.files")
    root = posixpath.commonpath([posixpath.dirname(name) for name in found])
    places = {}
    for key, (store, facts) in found.items():
        places[key] = _place_of(store, key.partition("/")[2], facts, cache / "stores")
    cache.mkdir(parents=True, exist_ok=True)
    made = []
    for key, (store, facts) in sorted(found.items()):
        label, (scheme, _, name) = PurePosixPath(key).relative_to(root).as_posix(), key.partition("/")
        with _asked(f"{scheme}://{name}", where):
            made.append(SourceFile(label=label, path=_fetched(store, name, facts, places[key])))
    return made


def _is_wanted(name: str, asked: str) -> bool:
    base = PurePosixPath(name).name
    return name == asked or (is_data(base) and not base.startswith(".") and base not in IGNORED)


@contextmanager
def _asked(address: str, where: str) -> Iterator[None]:
    """Raise what a store answers as a sentence."""
    try:
        with as_os_error():
            yield
    except FileNotFoundError as error:
        raise InputMissingError(f"{where}.files: {address} does not exist. Look at what the bucket holds.") from error
    except PermissionError as error:
        raise InputMissingError(
            f"{where}.files: this user may not read {address}. Set the store's credentials, as its own tools take "
            "them."
        ) from error
    except OSError as error:
        if error.errno:  # of this machine's disk
            raise
        reason = first_line(error)[:300]
        if is_refused(error):
            raise InputMissingError(
                f"{where}.files: {address}: {reason}. Look at what the bucket holds and who may read it."
            ) from error
        raise ServiceError(
            f"{where}.files: the store does not give {address} ({reason}). Check the network and its credentials, "
            "then run the same command again."
        ) from error


def _place_of(store: Any, name: str, facts: dict[str, Any], cache: Path) -> Path:
    """Return where the file is kept here; one of another size or time is another file."""
    version = (
        f"{store.protocol} {name} {facts['size']} "
        f"{facts.get('mtime') or facts.get('last_commit') or facts.get('blob_id')}"
    )
    return cache / hashlib.sha256(version.encode()).hexdigest()[:16] / PurePosixPath(name).name


def _is_whole(target: Path, facts: dict[str, Any]) -> bool:
    return target.exists() and target.stat().st_size == facts["size"]  # a power cut may have shortened it


def _part_of(target: Path) -> Path:
    return target.with_name(f".{target.name}.part")


def _fetched(store: Any, name: str, facts: dict[str, Any], target: Path) -> Path:
    """Return the file's place, where it is whole now."""
    if _is_whole(target, facts):
        return target
    with file_lock(target.parent / ".lock"):  # every rank asks
        if not _is_whole(target, facts):
            part = _part_of(target)  # that of a killed start is written over
            with waiting(f"fetching {name} ({count_text(facts['size'])}B)"):
                store.get_file(name, str(part))
            if part.stat().st_size != facts["size"]:
                part.unlink()
                raise OSError(f"{facts['size']} bytes were announced, fewer came")
            fsync_file(part)
            part.replace(target)
    return target
