"""Which files a source has: globs resolved to a sorted list, with labels that do not depend on where the folder lies."""

import glob
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.artifacts.errors import InputMissingError, RecipeError
from pipeline.sources.raw_rows import kind_of

READABLE = "parquet, jsonl, json (one object a line), txt; the last three also as .gz or .zst"
Part = Literal["all", "train", "validation"]
Ends = tuple[bytes, bytes | None]  # The first and the last bytes of a file, as far as they are known.


@dataclass
class SourceFile:
    """One planned file. label: its name in messages, origins and the manifest, the same on every machine.

    path: where it lies here; a file of the Hub gets it when it is fetched, and `peek` gives its first and last bytes before
    (heads.py). part and period: when a source has one file
    only, which of its rows are meant (`held_out.py`).
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

    def local_path(self) -> Path:
        """Where the content lies here, fetched first if need be."""
        if self.path is None:
            assert self.fetch is not None, f"{self.label} has neither a path nor a place to fetch it from"
            self.path = self.fetch()
        return self.path


def local_files(patterns: str | list[str], *, where: str, folder: str | None) -> list[SourceFile]:
    """The files that the patterns name, sorted by label, each once.

    A pattern is a path, a glob (** too) or a folder, whose readable files are all taken; it is looked for in `folder` (the
    recipe's), then in the working folder. Raises InputMissingError for patterns without a file, all of them at once, and
    RecipeError for files of a kind that cannot be read.
    """
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    if not patterns:
        raise RecipeError(f"{where}.files is an empty list, so there is nothing to read. Write a path or a glob.")
    bases = [Path(folder), Path.cwd()] if folder else [Path.cwd()]
    missing, unreadable, found = [], [], {}
    for pattern in patterns:
        paths, reason = _matches(pattern, bases)
        if reason:
            missing.append(reason)
        for path in paths:
            if kind_of(path.name) is None:
                unreadable.append(str(path))
            found[path.resolve()] = path
    if missing:
        raise InputMissingError("\n".join(f"{where}.files: {reason}" for reason in missing))
    if unreadable:
        shown = ", ".join(unreadable[:5]) + (" ..." if len(unreadable) > 5 else "")
        raise RecipeError(f"{where}.files: of no readable kind: {shown}. Readable are {READABLE}.")
    return _labelled(list(found.values()))


def _matches(pattern: str, bases: list[Path]) -> tuple[list[Path], str]:
    """Files of one pattern, or a sentence that says why there are none."""
    expanded = os.path.expanduser(pattern)
    for base in [Path("/")] if os.path.isabs(expanded) else bases:
        candidate = base / expanded
        if candidate.is_dir():
            inside = sorted(
                path
                for path in candidate.rglob("*")
                if path.is_file() and kind_of(path.name) and not path.name.startswith(".")
            )
            if not inside:
                return (
                    [],
                    f"the folder {candidate} has no readable file, so there is nothing to read. Readable are {READABLE}.",
                )
            return inside, ""
        if candidate.is_file():
            return [candidate], ""
        matched = sorted(Path(path) for path in glob.glob(str(candidate), recursive=True) if Path(path).is_file())
        if matched:
            return matched, ""
    what = "matches no file" if glob.has_magic(expanded) else "does not exist"
    looked = (
        ""
        if os.path.isabs(expanded)
        else f" Looked in {' and in '.join(dict.fromkeys(str(base.absolute()) for base in bases))}."
    )
    return [], f"{pattern!r} {what}, so there is nothing to read.{looked} Write a path or glob of files that are there."


def _labelled(paths: list[Path]) -> list[SourceFile]:
    """Labels are the paths below the deepest folder that holds them all: they survive a move of the data."""
    absolute = {path: path.absolute() for path in paths}
    root = Path(os.path.commonpath([path.parent for path in absolute.values()]))
    files = [SourceFile(label=absolute[path].relative_to(root).as_posix(), path=absolute[path]) for path in paths]
    return sorted(files, key=lambda file: file.label)
