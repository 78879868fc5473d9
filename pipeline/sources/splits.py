"""Files of a folder that are a split: as the `datasets` library decides it, or as `save_to_disk` listed them.

The folder is one on this machine, or holds the names and the card of a Hub repository (hub_files.py): the library
reads no data for its rules.
"""

import logging
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any

from pipeline.process.errors import DataError, InputMissingError, RecipeError, first_line
from pipeline.process.storage import read_json
from pipeline.sources.files import SHOWN, SPLITS, STATE, refuse_archives, shown, some, visible
from pipeline.sources.raw_rows import is_data

LOG = logging.getLogger(__name__)


def split_files(root: Path, *, config: str | None, split: str, name: str, where: str) -> list[Path]:
    """Return the files of the split, as `datasets` finds them in the folder.

    name: of the dataset, for messages. Raises RecipeError for a choice that the dataset does not have, with those that
    it has; InputMissingError where it has no data files.
    """
    root = root.resolve()  # `datasets` resolves it as well, and links would hide which files are below it.
    by_split = _by_split(root, config, name, where)
    if split not in by_split:
        of = f" in its configuration {config!r}" if config else ""
        raise RecipeError(
            f"{where}.split: {name} has no split {split!r}{of}; it has {', '.join(by_split)}. "
            f"{_write_split(by_split, split)}"
        )
    # A card may name any path: on a machine with other data its files are not the dataset's.
    files = by_split[split]
    outside = [file for file in files if not Path(os.path.normpath(file)).is_relative_to(root)]
    if outside:
        raise RecipeError(
            f"{where}: the card of {name} names files outside the dataset ({outside[0]}), which are not read. Choose "
            "files with `files`."
        )
    return [Path(file) for file in files]


def _write_split(splits: Iterable[str], split: str) -> str:
    """Return the sentence of what to write: the first split that has the wanted name as a part (train_sft), else
    any."""
    for name in splits:
        if split in name:
            return f"Write split: {name}."
    return "Write one of them."


def _by_split(root: Path, config: str | None, name: str, where: str) -> dict[str, list[str]]:
    """Return the files of each split of the configuration."""
    import datasets
    from datasets.exceptions import DataFilesNotFoundError

    with _quiet(), tempfile.TemporaryDirectory() as cache:  # where it would write, were it to prepare the data
        try:
            builder = datasets.load_dataset_builder(str(root), config, cache_dir=cache)
        except (DataFilesNotFoundError, FileNotFoundError) as error:
            refuse_archives(visible(root), of=f"{name} has ", where=where)
            raise InputMissingError(
                f"{where}: `datasets` finds no data files in {name} ({_first_line(error).replace(str(root), name)}), "
                f"so there is nothing to read. It has {shown(root)}. Choose others with `files`."
            ) from error
        # It raises ValueError, RuntimeError and AttributeError for a card it cannot follow.
        except Exception as error:
            reason = _first_line(error).replace(str(root), name)
            raise RecipeError(
                _wrong_config(_configs(root), config, name, where) or _unreadable(reason, name, where)
            ) from error
    by_split = {str(split): list(files) for split, files in (builder.config.data_files or {}).items()}
    if len(builder.builder_configs) == 1:
        _note_unread(root, set(chain.from_iterable(by_split.values())), name, where)
    return by_split


def _note_unread(root: Path, chosen: set[str], name: str, where: str) -> None:
    """Say which data files belong to no split: of several formats `datasets` reads the most common one alone."""
    unread = [path for path in visible(root) if is_data(path) and str(root / path) not in chosen]
    if unread:
        LOG.warning(
            "%s: of %s %d data files belong to no split that `datasets` finds and are not read: %s. Choose files "
            "with `files`.",
            where,
            name,
            len(unread),
            some(unread),
        )


def _configs(root: Path) -> list[str]:
    import datasets

    try:
        return datasets.get_dataset_config_names(str(root))
    except Exception:  # The first error says it.
        return []


def _wrong_config(names: list[str], config: str | None, name: str, where: str) -> str | None:
    if config is None and len(names) > 1:
        return (
            f"{where}.config: {name} has several configurations and none is the default: {some(names)}. Write config: "
            f"{names[0]}."
        )
    if config is not None and names and config not in names:
        near = get_close_matches(config, names, n=1)
        cure = f"Did you mean {near[0]!r}?" if near else "Write one of them, or choose files with `files`."
        return f"{where}.config: {name} has no configuration {config!r}; it has {some(names)}. {cure}"
    return None


def _unreadable(reason: str, name: str, where: str) -> str:
    if "scripts are no longer supported" in reason:
        return (
            f"{where}: {name} is loaded by a script, which is not run here, as `datasets` does not any more. Many "
            "such datasets have a branch of parquet files: revision: refs/convert/parquet."
        )
    return f"{where}: `datasets` cannot tell the files of {name} ({reason}). Choose them with `files`."


def saved_files(folder: Path, *, split: str, where: str) -> list[Path]:
    """Return the arrow files of a saved Dataset, or those of the split of a saved DatasetDict.

    Only those that its state lists: `map` and `filter` leave their caches in the same folder. Raises RecipeError for a
    split that there is not, InputMissingError for a file that is gone, DataError for rows that are to be chosen by
    indices.
    """
    # A DatasetDict has a folder for each split; a Dataset is a folder with a state of its own.
    if (folder / SPLITS).is_file():
        splits = _read(folder / SPLITS, where).get("splits") or []
        if split not in splits:
            raise RecipeError(
                f"{where}.split: {folder} has no split {split!r}; it has {', '.join(splits)}. "
                f"{_write_split(splits, split)}"
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
            f"{where}: {folder} was saved with a selection or order of its rows beside them (indices), which only old "
            "versions of `datasets` write and which is not read here. Save it again with "
            "load_from_disk(...).flatten_indices().save_to_disk(...) of the version that wrote it."
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


def _first_line(error: Exception) -> str:
    return first_line(error).partition(" with any supported extension ")[0][:200]  # It lists 200 of them.


TABLES = {"_delta_log": "Delta", "_transactions": "Lance", "metadata/snap-*.avro": "Iceberg"}  # by what they hold


def refuse_tables(paths: list[Path], *, where: str) -> None:
    """Raise RecipeError for a file of a table whose files also hold rows that were overwritten or deleted."""
    for folder in sorted({parent for path in paths for parent in path.parents}):
        for pattern, kind in TABLES.items():
            if any(folder.glob(pattern)):
                raise RecipeError(
                    f"{where}: {folder} is a table of {kind}, whose files also hold rows that were overwritten or "
                    "deleted. Write its rows as parquet with a program that reads the table, and name that."
                )
