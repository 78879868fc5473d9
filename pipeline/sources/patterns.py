"""Files that the patterns of a recipe name: paths, globs and folders of this machine, and addresses of a store."""

import glob
import logging
import os
import re
from collections import Counter
from itertools import takewhile
from pathlib import Path, PurePosixPath

from pipeline.process.errors import InputMissingError, RecipeError
from pipeline.process.network import is_address
from pipeline.process.storage import cache_dir
from pipeline.sources.files import (
    DESCRIPTIONS,
    IGNORED,
    READABLE,
    SHOWN,
    SourceFile,
    is_saved,
    refuse_archives,
    refuse_unreadable,
    some,
    visible,
)
from pipeline.sources.raw_rows import is_code, is_data, kind_of

LOG = logging.getLogger(__name__)


def local_files(
    patterns: str | list[str], *, where: str, folder: str | None, split: str = "train", cache: Path | None = None
) -> list[SourceFile]:
    """Return the files that the patterns name, sorted by label, each once.

    A pattern is a path, a glob (** too) or a folder, whose readable files are all taken; it is looked for in `folder`
    (the recipe's), then in the working folder. Of a folder that `save_to_disk` wrote, and of any where the split is
    not train, the split's files alone are taken. Raises InputMissingError for patterns without a file, all of them at
    once, and RecipeError for files of a kind that cannot be read and for a split of files that have none.

    Files at the address of a store (s3://bucket/corpus/*.parquet) are fetched into `cache` first, by default the
    user's.
    """
    if isinstance(patterns, str):
        patterns = [patterns]
    if not patterns:
        raise RecipeError(f"{where}.files is an empty list, so there is nothing to read. Write a path or a glob.")
    if any(map(is_address, patterns)):
        from pipeline.sources.stores import stored_files

        return stored_files(patterns, where=where, cache=cache or cache_dir())
    bases = bases_of(folder)
    missing, found = [], {}
    for pattern in patterns:
        paths, reason = _matches(pattern, bases, split, where)
        if reason:
            missing.append(reason)
        found.update({path.resolve(): path for path in paths})  # once, also by way of links
    if missing:
        raise InputMissingError("\n".join(f"{where}.files: {reason}" for reason in missing))
    refuse_unreadable([str(path) for path in found.values()], of="", where=f"{where}.files")
    from pipeline.sources.splits import refuse_tables

    refuse_tables(list(found), where=where)
    return labelled(list(found.values()))


def bases_of(folder: str | None) -> list[Path]:
    """Return where a relative path is looked for: in the recipe's folder, then in the working folder."""
    return [Path(folder), Path.cwd()] if folder else [Path.cwd()]


def looked_in(bases: list[Path]) -> str:
    """Return the sentence of where a relative path was looked for."""
    places = dict.fromkeys(str(base.absolute()) for base in bases)
    return f"Looked in {' and in '.join(places)}."


def _matches(pattern: str, bases: list[Path], split: str, where: str) -> tuple[list[Path], str]:
    """Return files of one pattern, or a sentence that says why there are none."""
    expanded = os.path.expanduser(pattern)
    is_absolute = os.path.isabs(expanded)
    places = [Path("/")] if is_absolute else bases
    for base in places:
        # A folder: the files of a split, as `datasets` finds them, or all that can be read.
        candidate = base / expanded
        if candidate.is_dir():
            if split != "train" and not is_saved(candidate):
                from pipeline.sources.splits import split_files

                return split_files(candidate, config=None, split=split, name=str(candidate), where=where), ""
            inside = _readable_files(candidate, split, where)
            if inside:
                return inside, ""
            refuse_archives(visible(candidate), of=f"the folder {candidate} has ", where=where)
            nothing = f"the folder {candidate} has no readable file, so there is nothing to read."
            return [], f"{nothing} Readable are {READABLE}."
        # A file, whose name may look like a glob, or a glob.
        matched = [candidate] if candidate.is_file() else _matched(candidate, where)
        if matched:
            if split != "train":
                raise RecipeError(
                    f"{where}.split is {split!r}, and {pattern} names files one by one, which have no splits. Name "
                    "their folder, or leave split out."
                )
            return matched, ""
    what = "matches no file" if glob.has_magic(expanded) else "does not exist"
    looked = "" if is_absolute else f" {looked_in(bases)}"
    return [], (
        f"{pattern!r} {what}, so there is nothing to read.{looked} Write a path or glob of files that are there."
    )


def _matched(pattern: Path, where: str) -> list[Path]:
    """Return the files of a glob, without those that describe a saved dataset."""
    # The folder that the glob begins in, links followed: below / and /proc it would walk the whole machine.
    fixed = os.path.realpath(Path(*takewhile(lambda part: not glob.has_magic(part), pattern.parts)))
    if glob.has_magic(str(pattern)) and (fixed == "/" or re.match(r"/(proc|sys|dev(?!/shm/))(/|$)", fixed)):
        raise RecipeError(
            f"{where}.files: {str(pattern)!r} looks through {fixed}, where links of the system lead round without "
            "end. Name the folder that the data lie in."
        )
    found = [Path(path) for path in sorted(glob.glob(str(pattern), recursive=True)) if os.path.isfile(path)]
    return [path for path in found if path.name not in DESCRIPTIONS or not is_saved(path.parent)]


def _readable_files(folder: Path, split: str, where: str) -> list[Path]:
    """Return all readable files below the folder, but of saved datasets the split's alone; what `datasets` ignores is
    left out."""
    found: list[Path] = []
    code: list[Path] = []
    others: Counter[str] = Counter()
    for parent, folders, names in os.walk(folder):
        if "run_manifest.json" in names:
            folders.clear()  # of a run that was started in the folder of its data: its records are no texts
        elif is_saved(Path(parent)):
            from pipeline.sources.splits import saved_files

            found += saved_files(Path(parent), split=split, where=where)
            folders.clear()
        else:
            folders[:] = [name for name in folders if not name.startswith((".", "__"))]  # os.walk goes into these
            for name in names:
                if name.startswith(".") or name in IGNORED:
                    continue
                if is_data(name):
                    found.append(Path(parent, name))
                elif is_code(name):
                    code.append(Path(parent, name))
                else:
                    others[_ending(name)] += 1
    # A folder of code has notes with it; one of data or texts has a script or two.
    if len(code) > len(found) and all(kind_of(path.name) == "txt" for path in found):
        found += code
    else:
        others.update(_ending(path.name) for path in code)
    if found and others:
        most = sorted(others.items(), key=lambda kind: (-kind[1], kind))[:SHOWN]
        kinds = ", ".join(f"{kind}: {count:,}" for kind, count in most)
        text = (
            "%s: the folder %s has files of kinds that are not read (%s). Unpack or convert those that hold text, say "
            "to txt."
        )
        LOG.warning(text, where, folder, kinds)
    return _of_a_corpus(found, folder, where)


def _ending(name: str) -> str:
    suffixes = PurePosixPath(name.lower()).suffixes[-2:]
    if suffixes[:1] != [".tar"]:  # of which .tar.gz is the whole ending
        suffixes = suffixes[-1:]
    return "".join(suffixes) or "no ending"


def _of_a_corpus(paths: list[Path], folder: Path, where: str) -> list[Path]:
    """Return the files without those that only accompany a corpus: notes and tables of another kind than parquet or
    jsonl."""
    if not any(kind_of(path.name) in ("parquet", "jsonl") for path in paths):
        return paths
    beside = []
    for path in paths:
        is_note = kind_of(path.name) in ("csv", "arrow") or ".md" in path.name.lower()
        if is_note and not is_saved(path.parent):
            beside.append(path)
    if beside:
        text = (
            "%s: beside parquet or jsonl files the folder %s has %s, which are left out. To train on them name them "
            "in files."
        )
        LOG.warning(text, where, folder, some([str(path.relative_to(folder)) for path in sorted(beside)]))
    return [path for path in paths if path not in beside]


def labelled(paths: list[Path]) -> list[SourceFile]:
    """Return the files with their labels: paths below the deepest folder that holds them all, which survive a move of
    the data."""
    absolute = [path.absolute() for path in paths]
    root = Path(os.path.commonpath([path.parent for path in absolute]))
    files = [SourceFile(label=path.relative_to(root).as_posix(), path=path) for path in absolute]
    return sorted(files, key=lambda file: file.label)
