"""Files of a source: globs resolved to a sorted list, with labels that do not depend on where the folder lies."""

import glob
import hashlib
import logging
import os
import posixpath
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pipeline.process.errors import InputMissingError, RecipeError, ServiceError
from pipeline.process.progress import count_text, waiting
from pipeline.process.storage import cache_dir, file_lock, fsync_file
from pipeline.process.stores import as_os_error, is_address, is_refused, opened
from pipeline.sources.raw_rows import is_data, kind_of
from pipeline.sources.splits import (
    DESCRIPTIONS,
    IGNORED,
    is_saved,
    named_files,
    refuse_archives,
    saved_files,
    some,
    split_files,
)

LOG = logging.getLogger(__name__)
READABLE = "parquet, arrow (feather, ipc), jsonl and json (one object a line, or one array), csv, tsv, txt, md; from jsonl on also as .gz or .zst"
Part = Literal["all", "train", "validation"]
Ends = tuple[bytes, bytes | None]  # The first and the last bytes of a file, as far as they are known.


@dataclass
class SourceFile:
    """One planned file. label: its name in messages, origins and the manifest, the same on every machine.

     path: where it lies here; a file of the Hub gets it when it is fetched, and `peek` gives its first and last bytes before
    . part and period: when a source has one file
     only, which of its rows are meant.
    """

    label: str
    sha256: str = ""
    bytes: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    path: Path | None = None
    fetch: Callable[[], Path] | None = None
    peek: Callable[[], Ends | None] | None = None
    part: Part = "all"
    period: int = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "peek": None}  # a function of this process; another one has no beginning to look at

    def local_path(self) -> Path:
        """Return where the content lies here, fetched first if need be."""
        if self.path is None:
            assert self.fetch is not None, f"{self.label} has neither a path nor a place to fetch it from"
            self.path = self.fetch()
        return self.path


def local_files(
    patterns: str | list[str], *, where: str, folder: str | None, split: str = "train", cache: Path | None = None
) -> list[SourceFile]:
    """Return the files that the patterns name, sorted by label, each once.

    A pattern is a path, a glob (** too) or a folder, whose readable files are all taken; it is looked for in `folder` (the
    recipe's), then in the working folder. Of a folder that `save_to_disk` wrote, and of any where the split is not train,
    the split's files alone are taken. Raises InputMissingError for patterns without a file, all of them at once, and
    RecipeError for files of a kind that cannot be read and for a split of files that have none.

    Files at the address of a store (s3://bucket/corpus/*.parquet) are fetched into `cache` first, by default the user's.
    """
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    if not patterns:
        raise RecipeError(f"{where}.files is an empty list, so there is nothing to read. Write a path or a glob.")
    if any(map(is_address, patterns)):
        return stored_files(patterns, where=where, cache=cache or cache_dir())
    bases = bases_of(folder)
    missing, found = [], {}
    for pattern in patterns:
        paths, reason = _matches(pattern, bases, split, where)
        if reason:
            missing.append(reason)
        found.update({path.resolve(): path for path in paths})
    if missing:
        raise InputMissingError("\n".join(f"{where}.files: {reason}" for reason in missing))
    refuse_unreadable([str(path) for path in found.values()], of="", where=f"{where}.files")
    return _labelled(list(found.values()))


def stored_files(addresses: list[str], *, where: str, cache: Path) -> list[SourceFile]:
    """Return the files of a store that the addresses name, each fetched once: their content decides what is prepared from them.

    An address is a file, a glob (** too) or a folder. Raises InputMissingError for one without a file, ServiceError for a store
    that does not answer, RecipeError for files of a kind that cannot be read.
    """
    if not all(map(is_address, addresses)):
        raise RecipeError(
            f"{where}.files: has addresses and paths of this machine. Write two sources, one of each, or fetch the files."
        )
    found: dict[str, tuple[Any, dict[str, Any]]] = {}
    for address in addresses:
        with _asked(address, where):
            store, path = opened(address)
            listed = store.glob(
                path if glob.has_magic(path) else f"{path}/**" if store.isdir(path) else path, detail=True
            )
            files = {
                name: facts for name, facts in listed.items() if facts["type"] == "file" and _is_wanted(name, path)
            }
            if not files:  # also what is listed of a store that does not answer
                store.ls(posixpath.dirname(path.partition("*")[0].partition("?")[0].partition("[")[0]))
        if not files:
            raise InputMissingError(
                f"{where}.files: {address!r} names no file, so there is nothing to read. Look at what the bucket holds."
            )
        scheme = address.partition("://")[0]  # two stores may have a bucket of one name
        found |= {f"{scheme}/{name}": (store, facts) for name, facts in files.items()}
    refuse_unreadable([name.partition("/")[2] for name in found], of="", where=f"{where}.files")
    root = posixpath.commonpath([posixpath.dirname(name) for name in found])
    made = []
    for key, (store, facts) in sorted(found.items()):
        label, (scheme, _, name) = PurePosixPath(key).relative_to(root).as_posix(), key.partition("/")
        with _asked(f"{scheme}://{name}", where):
            made.append(SourceFile(label=label, path=_fetched(store, name, facts, cache / "stores")))
    return made


def _is_wanted(name: str, asked: str) -> bool:
    base = PurePosixPath(name).name
    return (
        glob.has_magic(asked) or name == asked or (is_data(base) and not base.startswith(".") and base not in IGNORED)
    )


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
            f"{where}.files: this user may not read {address}. Set the store's credentials, as its own tools take them."
        ) from error
    except OSError as error:
        if error.errno:  # of this machine's disk
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        if is_refused(error):
            raise InputMissingError(
                f"{where}.files: {address}: {reason}. Look at what the bucket holds and who may read it."
            ) from error
        raise ServiceError(
            f"{where}.files: the store does not give {address} ({reason}). Check the network and its credentials, then run the same command again."
        ) from error


def _fetched(store: Any, name: str, facts: dict[str, Any], cache: Path) -> Path:
    """Return where the file lies here; one of another size or time is another file, and a power cut may have shortened it."""
    version = f"{store.protocol} {name} {facts['size']} {facts.get('mtime') or facts.get('last_commit') or facts.get('blob_id')}"
    target = cache / hashlib.sha256(version.encode()).hexdigest()[:16] / PurePosixPath(name).name
    is_whole = lambda: target.exists() and target.stat().st_size == facts["size"]  # noqa: E731
    if is_whole():
        return target
    with file_lock(target.parent / ".lock"):  # every rank asks
        if not is_whole():
            part = target.with_name(f".{target.name}.part")  # that of a killed start is written over
            with waiting(f"fetching {name} ({count_text(facts['size'])}B)"):
                store.get_file(name, str(part))
            if part.stat().st_size != facts["size"]:
                part.unlink()
                raise OSError(f"{facts['size']} bytes were announced, fewer came")
            fsync_file(part)
            part.replace(target)
    return target


def bases_of(folder: str | None) -> list[Path]:
    """Return where a relative path is looked for: in the recipe's folder, then in the working folder."""
    return [Path(folder), Path.cwd()] if folder else [Path.cwd()]


def local_dataset(spec: Any, *, where: str, folder: str | None) -> list[SourceFile] | None:
    """Return the files of the dataset's split where `spec.id` is a folder on this machine, sorted by label; else None.

    Configuration, split and files are those that `datasets` finds in the folder, or `save_to_disk` listed.
    """
    expanded = os.path.expanduser(spec.id)
    root = next((base / expanded for base in bases_of(folder) if (base / expanded).is_dir()), None)
    if root is None:
        return None
    if spec.revision:
        raise RecipeError(f"{where}.revision is {spec.revision!r}, and {root} is a folder here. Leave revision out.")
    if spec.files:
        paths = named_files(root, spec.files, name=spec.id, where=where)
    elif is_saved(root):
        paths = saved_files(root, split=spec.split, where=where)
    else:
        paths = split_files(root, config=spec.config, split=spec.split, name=spec.id, where=where)
    refuse_unreadable([str(path) for path in paths], of=f"{spec.id} has ", where=where)
    return _labelled(paths)


def refuse_unreadable(paths: list[str], *, of: str, where: str, cure: str = "") -> None:
    """Raise RecipeError where a file is of a kind that cannot be read. of: "NAME has ", for a dataset."""
    unreadable = [path for path in paths if kind_of(path) is None]
    if not unreadable:
        return
    refuse_archives(unreadable, of=of, where=where)
    raise RecipeError(f"{where}: {of}files of no readable kind: {some(unreadable)}. Readable are {READABLE}.{cure}")


def _matches(pattern: str, bases: list[Path], split: str, where: str) -> tuple[list[Path], str]:
    """Return files of one pattern, or a sentence that says why there are none."""
    expanded = os.path.expanduser(pattern)
    for base in [Path("/")] if os.path.isabs(expanded) else bases:
        candidate = base / expanded
        if candidate.is_dir():
            if split != "train" and not is_saved(candidate):
                return split_files(candidate, config=None, split=split, name=str(candidate), where=where), ""
            inside = _readable_files(candidate, split, where)
            if not inside:
                return (
                    [],
                    f"the folder {candidate} has no readable file, so there is nothing to read. Readable are {READABLE}.",
                )
            return inside, ""
        matched = [candidate] if candidate.is_file() else _matched(candidate, where)
        if matched:
            if split != "train":
                raise RecipeError(
                    f"{where}.split is {split!r}, and {pattern} names files one by one, which have no splits. Name their folder, or leave split out."
                )
            return matched, ""
    what = "matches no file" if glob.has_magic(expanded) else "does not exist"
    looked = (
        ""
        if os.path.isabs(expanded)
        else f" Looked in {' and in '.join(dict.fromkeys(str(base.absolute()) for base in bases))}."
    )
    return [], f"{pattern!r} {what}, so there is nothing to read.{looked} Write a path or glob of files that are there."


def _matched(pattern: Path, where: str) -> list[Path]:
    """Return the files of a glob, without those that describe a saved dataset."""
    fixed = os.path.realpath(Path(*takewhile(lambda part: not glob.has_magic(part), pattern.parts)))
    if glob.has_magic(str(pattern)) and (fixed == "/" or re.match(r"/(proc|sys|dev(?!/shm/))(/|$)", fixed)):
        raise RecipeError(
            f"{where}.files: {str(pattern)!r} looks through {fixed}, where links of the system lead round without end. Name the folder that the data lie in."
        )
    found = [Path(path) for path in sorted(glob.glob(str(pattern), recursive=True)) if os.path.isfile(path)]
    return [path for path in found if path.name not in DESCRIPTIONS or not is_saved(path.parent)]


def _readable_files(folder: Path, split: str, where: str) -> list[Path]:
    """Return all readable files below the folder, but of saved datasets the split's alone; what `datasets` ignores is left out."""
    found: list[Path] = []
    for parent, folders, names in os.walk(folder):
        if (
            "run_manifest.json" in names
        ):  # of a run that was started in the folder of its data: its records are no texts
            folders.clear()
        elif is_saved(Path(parent)):
            found += saved_files(Path(parent), split=split, where=where)
            folders.clear()
        else:
            folders[:] = [name for name in folders if not name.startswith((".", "__"))]
            found += [Path(parent, n) for n in names if is_data(n) and not n.startswith(".") and n not in IGNORED]
    return _of_a_corpus(found, folder, where)


def _of_a_corpus(paths: list[Path], folder: Path, where: str) -> list[Path]:
    """Return the files without those that only lie beside a corpus: notes and tables of another kind than parquet or jsonl."""
    if not any(kind_of(path.name) in ("parquet", "jsonl") for path in paths):
        return paths
    beside = [
        path
        for path in paths
        if (kind_of(path.name) in ("csv", "arrow") or ".md" in path.name.lower()) and not is_saved(path.parent)
    ]
    if beside:
        LOG.warning(
            "%s: beside parquet or jsonl files the folder %s has %s, which are left out. To train on them name them in files.",
            where,
            folder,
            some([str(path.relative_to(folder)) for path in sorted(beside)]),
        )
    return [path for path in paths if path not in beside]


def _labelled(paths: list[Path]) -> list[SourceFile]:
    """Labels are the paths below the deepest folder that holds them all: they survive a move of the data."""
    absolute = {path: path.absolute() for path in paths}
    root = Path(os.path.commonpath([path.parent for path in absolute.values()]))
    files = [SourceFile(label=absolute[path].relative_to(root).as_posix(), path=absolute[path]) for path in paths]
    return sorted(files, key=lambda file: file.label)
