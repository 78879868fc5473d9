"""Files of a source: globs resolved to a sorted list, with labels that do not depend on where the folder is; of a dataset's
folder those of its split."""

import contextlib
import glob
import hashlib
import logging
import os
import posixpath
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pipeline.process.errors import DataError, DiskFullError, InputMissingError, RecipeError, ServiceError, first_line
from pipeline.process.network import as_os_error, is_address, is_refused, opened
from pipeline.process.progress import count_text, waiting
from pipeline.process.storage import cache_dir, file_lock, fsync_file, read_json
from pipeline.sources.raw_rows import is_data, kind_of

LOG = logging.getLogger(__name__)

# The files of a folder that are its configuration's split, as the `datasets` library decides it. The folder is one on this
# machine, or holds the names and the card of a Hub repository (hub_files.py): the library reads no data for its rules.
# A folder that `save_to_disk` wrote lists its files itself.

# `datasets` does not read these of a folder unless they are named; a README.md is the card.
IGNORED = ("README.md", "config.json", "dataset_info.json", "dataset_infos.json", "dummy_data.zip", "dataset_dict.json")
DESCRIPTIONS = STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"  # of save_to_disk
ARCHIVES = (".zip", ".tar", ".tgz", ".7z", ".rar")
SHOWN = 8


def split_files(root: Path, *, config: str | None, split: str, name: str, where: str) -> list[Path]:
    """Return the files of the split, as `datasets` finds them in the folder.

    name: of the dataset, for messages. Raises RecipeError for a choice that the dataset does not have, with those that it
    has; InputMissingError where it has no data files.
    """
    root = root.resolve()  # `datasets` resolves it as well, and links would hide which files are below it.
    by_split = _by_split(root, config, name, where)
    if split not in by_split:
        of = f" in its configuration {config!r}" if config else ""
        raise RecipeError(
            f"{where}.split: {name} has no split {split!r}{of}; it has {', '.join(by_split)}. {_write_split(by_split, split)}"
        )
    files = by_split[split]
    if outside := [file for file in files if not Path(os.path.normpath(file)).is_relative_to(root)]:
        raise RecipeError(
            f"{where}: the card of {name} names files outside the dataset ({outside[0]}), which are not read. Choose files with `files`."
        )
    return [Path(file) for file in files]


def _write_split(splits: Iterable[str], split: str) -> str:
    """Return the sentence of what to write: the first split that has the wanted name as a part (train_sft), else any."""
    named = next((one for one in splits if split in one), None)
    return f"Write split: {named}." if named else "Write one of them."


def _by_split(root: Path, config: str | None, name: str, where: str) -> dict[str, list[str]]:
    """Return the files of each split of the configuration."""
    import datasets
    from datasets.exceptions import DataFilesNotFoundError

    with _quiet(), tempfile.TemporaryDirectory() as cache:  # where it would write, were it to prepare the data
        try:
            builder = datasets.load_dataset_builder(str(root), config, cache_dir=cache)
        except (DataFilesNotFoundError, FileNotFoundError) as error:
            refuse_archives(_visible(root), of=f"{name} has ", where=where)
            raise InputMissingError(
                f"{where}: `datasets` finds no data files in {name} ({_first_line(error).replace(str(root), name)}), so there is nothing to read. It has {shown(root)}. Choose others with `files`."
            ) from error
        except Exception as error:  # It raises ValueError, RuntimeError and AttributeError for a card it cannot follow.
            reason = _first_line(error).replace(str(root), name)
            raise RecipeError(
                _wrong_config(_configs(root), config, name, where) or _unreadable(reason, name, where)
            ) from error
    by_split = {str(split): list(files) for split, files in (builder.config.data_files or {}).items()}
    if len(builder.builder_configs) == 1:
        _note_unread(root, {file for files in by_split.values() for file in files}, name, where)
    return by_split


def _note_unread(root: Path, chosen: set[str], name: str, where: str) -> None:
    """Say which data files belong to no split: of several formats `datasets` reads the most common one alone."""
    unread = [path for path in _visible(root) if is_data(path) and str(root / path) not in chosen]
    if unread:
        LOG.warning(
            "%s: of %s %d data files belong to no split that `datasets` finds and are not read: %s. Choose files with `files`.",
            where, name, len(unread), some(unread),
        )  # fmt: skip


def _configs(root: Path) -> list[str]:
    import datasets

    try:
        return datasets.get_dataset_config_names(str(root))
    except Exception:  # The first error says it.
        return []


def _wrong_config(names: list[str], config: str | None, name: str, where: str) -> str | None:
    if config is None and len(names) > 1:
        return f"{where}.config: {name} has several configurations and none is the default: {some(names)}. Write config: {names[0]}."
    if config is not None and names and config not in names:
        near = get_close_matches(config, names, n=1)
        cure = f"Did you mean {near[0]!r}?" if near else "Write one of them, or choose files with `files`."
        return f"{where}.config: {name} has no configuration {config!r}; it has {some(names)}. {cure}"
    return None


def _unreadable(reason: str, name: str, where: str) -> str:
    if "scripts are no longer supported" in reason:
        return f"{where}: {name} is loaded by a script, which is not run here, as `datasets` does not any more. Many such datasets have a branch of parquet files: revision: refs/convert/parquet."
    return f"{where}: `datasets` cannot tell the files of {name} ({reason}). Choose them with `files`."


def is_saved(folder: Path) -> bool:
    """Return whether `save_to_disk` wrote the folder."""
    return (folder / SPLITS).is_file() or ((folder / STATE).is_file() and (folder / INFO).is_file())


def saved_files(folder: Path, *, split: str, where: str) -> list[Path]:
    """Return the arrow files of a saved Dataset, or those of the split of a saved DatasetDict.

    Only those that its state lists: `map` and `filter` leave their caches in the same folder. Raises RecipeError for a
    split that there is not, InputMissingError for a file that is gone, DataError for rows that are to be chosen by indices.
    """
    if (folder / SPLITS).is_file():
        splits = _read(folder / SPLITS, where).get("splits") or []
        if split not in splits:
            raise RecipeError(
                f"{where}.split: {folder} has no split {split!r}; it has {', '.join(splits)}. {_write_split(splits, split)}"
            )
        folder = folder / split
        state = _read(folder / STATE, where)
    else:
        state = _read(folder / STATE, where)
        if split not in ("train", state.get("_split")):  # train, the default, asks for nothing
            raise RecipeError(
                f"{where}.split: {folder} is one dataset without splits, and {split!r} is asked for. Leave split out."
            )
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise DataError(
            f"{where}: {folder} was saved with a selection or order of its rows beside them (indices), which only old versions of `datasets` write and which is not read here. Save it again with load_from_disk(...).flatten_indices().save_to_disk(...) of the version that wrote it."
        )
    files = [folder / file["filename"] for file in state.get("_data_files") or []]
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        lacks = f"lacks {', '.join(missing[:SHOWN])}" if missing else "lists no files"
        raise InputMissingError(f"{where}: the saved dataset {folder} {lacks}, so it is not whole. Save it again.")
    return files


def _read(path: Path, where: str) -> dict[str, Any]:
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise InputMissingError(
            f"{where}: {path} cannot be read ({_first_line(error)}), so the saved dataset is not whole. Save it again."
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Show no bars of the resolving of data files among the start's own lines."""
    import datasets

    if datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()


def refuse_archives(paths: list[str], *, of: str, where: str) -> None:
    """Raise RecipeError where some of the paths are archives."""
    found = [path for path in paths if any(end in ARCHIVES for end in Path(path.lower()).suffixes[-2:])]
    if found:
        raise RecipeError(
            f"{where}: {of}archives, which are not unpacked: {some(found)}. Unpack them and name the files; of a Hub dataset, try revision: refs/convert/parquet."
        )


def some(paths: list[str]) -> str:
    return ", ".join(paths[:SHOWN]) + (f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else "")


def shown(root: Path) -> str:
    return some(_visible(root)) or "no files"


def _visible(root: Path) -> list[str]:
    paths = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    seen = [path for path in paths if not any(part.startswith((".", "__")) for part in Path(path).parts)]
    return [path for path in seen if Path(path).name not in IGNORED]


def _first_line(error: Exception) -> str:
    return first_line(error).partition(" with any supported extension ")[0][:200]  # It lists 200 of them.


READABLE = "parquet, arrow (feather, ipc), jsonl and json (one object a line, or one array), csv, tsv, txt, md; from jsonl on also as .gz or .zst"
Part = Literal["all", "train", "validation"]
Ends = tuple[bytes, bytes | None]  # The first and the last bytes of a file, as far as they are known.


@dataclass
class SourceFile:
    """One planned file. label: its name in messages, origins and the manifest, the same on every machine.

    path: where it is here; a file of the Hub gets it when it is fetched, and before that `peek` gives its first and last
    bytes. part, period: of a source's only file, which of its rows are meant. order: of a pass
    after the first, what the rows of each block are permuted by.
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
    order: str = ""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "peek": None}  # a function of this process; another one has no beginning to look at

    def local_path(self) -> Path:
        """Return where the content is here, fetched first if need be."""
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
    return labelled(list(found.values()))


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
            is_glob = glob.has_magic(path) and not store.exists(path)  # a name may have brackets
            pattern = path if is_glob else glob.escape(path) + ("/**" if store.isdir(path) else "")
            listed = store.glob(pattern, detail=True)
            files = {
                name: facts
                for name, facts in listed.items()
                if facts["type"] == "file" and (is_glob or _is_wanted(name, path))
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
    places = {
        key: _place_of(store, key.partition("/")[2], facts, cache / "stores") for key, (store, facts) in found.items()
    }
    missing = [(facts["size"], places[key]) for key, (_, facts) in found.items() if not _is_whole(places[key], facts)]
    needed = sum(max(0, size - _size_of_part(place)) for size, place in missing)
    cache.mkdir(parents=True, exist_ok=True)
    if needed > (free := shutil.disk_usage(cache).free):
        raise DiskFullError(
            f"{where}.files: {count_text(needed)}B are to be fetched, and {cache} has {count_text(free)}B free. Free some space, name fewer "
            "files, or move data.cache_dir to a larger disk."
        )
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
            f"{where}.files: this user may not read {address}. Set the store's credentials, as its own tools take them."
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
            f"{where}.files: the store does not give {address} ({reason}). Check the network and its credentials, then run the same command again."
        ) from error


def _place_of(store: Any, name: str, facts: dict[str, Any], cache: Path) -> Path:
    """Return where the file is kept here; one of another size or time is another file."""
    version = f"{store.protocol} {name} {facts['size']} {facts.get('mtime') or facts.get('last_commit') or facts.get('blob_id')}"
    return cache / hashlib.sha256(version.encode()).hexdigest()[:16] / PurePosixPath(name).name


def _is_whole(target: Path, facts: dict[str, Any]) -> bool:
    return target.exists() and target.stat().st_size == facts["size"]  # a power cut may have shortened it


def _part_of(target: Path) -> Path:
    return target.with_name(f".{target.name}.part")


def _size_of_part(target: Path) -> int:
    """Return how much of the file lies here already, of a killed start or of another one that fetches it now."""
    with contextlib.suppress(FileNotFoundError):
        return _part_of(target).stat().st_size
    return 0


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


def bases_of(folder: str | None) -> list[Path]:
    """Return where a relative path is looked for: in the recipe's folder, then in the working folder."""
    return [Path(folder), Path.cwd()] if folder else [Path.cwd()]


def looked_in(bases: list[Path]) -> str:
    """Return the sentence of where a relative path was looked for."""
    return f"Looked in {' and in '.join(dict.fromkeys(str(base.absolute()) for base in bases))}."


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
            if inside:
                return inside, ""
            refuse_archives(_visible(candidate), of=f"the folder {candidate} has ", where=where)
            nothing = f"the folder {candidate} has no readable file, so there is nothing to read."
            return [], f"{nothing} Readable are {READABLE}."
        matched = [candidate] if candidate.is_file() else _matched(candidate, where)
        if matched:
            if split != "train":
                raise RecipeError(
                    f"{where}.split is {split!r}, and {pattern} names files one by one, which have no splits. Name their folder, or leave split out."
                )
            return matched, ""
    what = "matches no file" if glob.has_magic(expanded) else "does not exist"
    looked = "" if os.path.isabs(expanded) else f" {looked_in(bases)}"
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
    others: Counter[str] = Counter()
    for parent, folders, names in os.walk(folder):
        if "run_manifest.json" in names:
            folders.clear()  # of a run that was started in the folder of its data: its records are no texts
        elif is_saved(Path(parent)):
            found += saved_files(Path(parent), split=split, where=where)
            folders.clear()
        else:
            folders[:] = [name for name in folders if not name.startswith((".", "__"))]
            names = [n for n in names if not n.startswith(".") and n not in IGNORED]
            found += [Path(parent, n) for n in names if is_data(n)]
            others.update(_ending(n) for n in names if not is_data(n))
    if found and others:
        most = sorted(others.items(), key=lambda kind: (-kind[1], kind))[:SHOWN]
        kinds = ", ".join(f"{kind}: {count:,}" for kind, count in most)
        text = "%s: the folder %s has files of kinds that are not read (%s). Unpack or convert those that hold text, say to txt."
        LOG.warning(text, where, folder, kinds)
    return _of_a_corpus(found, folder, where)


def _ending(name: str) -> str:
    suffixes = PurePosixPath(name.lower()).suffixes[-2:]
    return "".join(suffixes if suffixes[:1] == [".tar"] else suffixes[-1:]) or "no ending"


def _of_a_corpus(paths: list[Path], folder: Path, where: str) -> list[Path]:
    """Return the files without those that only accompany a corpus: notes and tables of another kind than parquet or jsonl."""
    if not any(kind_of(path.name) in ("parquet", "jsonl") for path in paths):
        return paths
    notes = [path for path in paths if kind_of(path.name) in ("csv", "arrow") or ".md" in path.name.lower()]
    beside = [path for path in notes if not is_saved(path.parent)]
    if beside:
        text = "%s: beside parquet or jsonl files the folder %s has %s, which are left out. To train on them name them in files."
        LOG.warning(text, where, folder, some([str(path.relative_to(folder)) for path in sorted(beside)]))
    return [path for path in paths if path not in beside]


def labelled(paths: list[Path]) -> list[SourceFile]:
    """Return the files with their labels: paths below the deepest folder that holds them all, which survive a move of the data."""
    absolute = {path: path.absolute() for path in paths}
    root = Path(os.path.commonpath([path.parent for path in absolute.values()]))
    files = [SourceFile(label=absolute[path].relative_to(root).as_posix(), path=absolute[path]) for path in paths]
    return sorted(files, key=lambda file: file.label)
