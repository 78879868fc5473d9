"""Files of a source: globs resolved to a sorted list, with labels that do not depend on where the folder is."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.process.errors import RecipeError
from pipeline.sources.raw_rows import kind_of

# `datasets` does not read these of a folder unless they are named; a README.md is the card.
IGNORED = (
    "README.md",
    "config.json",
    "dataset_info.json",
    "dataset_infos.json",
    "dummy_data.zip",
    "dataset_dict.json",
)
DESCRIPTIONS = STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"  # of save_to_disk
ARCHIVES = (".zip", ".tar", ".tgz", ".7z", ".rar")
SHOWN = 8


def is_saved(folder: Path) -> bool:
    """Return whether `save_to_disk` wrote the folder."""
    return (folder / SPLITS).is_file() or ((folder / STATE).is_file() and (folder / INFO).is_file())


def refuse_archives(paths: list[str], *, of: str, where: str) -> None:
    """Raise RecipeError where some of the paths are archives."""
    found = [path for path in paths if any(end in ARCHIVES for end in Path(path.lower()).suffixes[-2:])]
    if found:
        raise RecipeError(
            f"{where}: {of}archives, which are not unpacked: {some(found)}. Unpack them and name the files; of a Hub "
            "dataset, try revision: refs/convert/parquet."
        )


def some(paths: list[str]) -> str:
    text = ", ".join(paths[:SHOWN])
    return f"{text} and {len(paths) - SHOWN} more" if len(paths) > SHOWN else text


def shown(root: Path) -> str:
    return some(visible(root)) or "no files"


def visible(root: Path) -> list[str]:
    found = []
    for path in root.rglob("*"):
        inside = path.relative_to(root)
        is_hidden = any(part.startswith((".", "__")) for part in inside.parts)
        if path.is_file() and not is_hidden and path.name not in IGNORED:
            found.append(inside.as_posix())
    return sorted(found)


READABLE = (
    "parquet, arrow (feather, ipc), jsonl and json (one object a line, or one array), csv, tsv, txt, md, source "
    "code; from jsonl on also as .gz or .zst"
)
Part = Literal["all", "train", "validation"]


@dataclass
class SourceFile:
    """One planned file. label: its name in messages, origins and the manifest, the same on every machine.

    path: where it is here; a file of the Hub gets it when it is fetched. check_ends: returns what is wrong with one
    that is not fetched yet, by its first and last bytes. part, period, offset: of files whose rows are
    split, which are meant (open.is_held_out), the file's first one being row `offset` of them all. order: of a pass
    after the first, what the rows of each block are permuted by.
    """

    label: str
    sha256: str = ""
    bytes: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    path: Path | None = None
    fetch: Callable[[], Path] | None = None
    check_ends: Callable[[], str | None] | None = None
    part: Part = "all"
    period: int = 0
    offset: int = 0
    order: str = ""

    def local_path(self) -> Path:
        """Return where the content is here, fetched first if need be."""
        if self.path is None:
            assert self.fetch is not None, f"{self.label} has neither a path nor a place to fetch it from"
            self.path = self.fetch()
        return self.path


def refuse_unreadable(paths: list[str], *, of: str, where: str, cure: str = "") -> None:
    """Raise RecipeError where a file is of a kind that cannot be read. of: "NAME has ", for a dataset."""
    unreadable = [path for path in paths if kind_of(path) is None]
    if not unreadable:
        return
    refuse_archives(unreadable, of=of, where=where)
    raise RecipeError(f"{where}: {of}files of no readable kind: {some(unreadable)}. Readable are {READABLE}.{cure}")
