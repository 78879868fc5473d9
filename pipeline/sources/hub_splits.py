"""Which files of a Hub dataset are its configuration's split: as its card says, else by their names.

The rules of the `datasets` library: a card's `configs` with `data_files`; without one, a file belongs to the split whose
keyword stands in its path between separators, and when no file names a split all are train.
"""

import re
from difflib import get_close_matches
from pathlib import PurePosixPath
from typing import Any

from pipeline.artifacts.errors import InputMissingError, RecipeError
from pipeline.sources.raw_rows import is_data

KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
SEPARATORS = re.compile(r"[-._ 0-9/]+")


def chosen_paths(paths: list[str], configs: list[dict] | None, *, spec: Any, where: str) -> list[str]:
    """The paths that the source means. Raises RecipeError or InputMissingError that lists what there is instead."""
    visible = [path for path in paths if not any(part.startswith((".", "__")) for part in PurePosixPath(path).parts)]
    if spec.files:
        patterns = [spec.files] if isinstance(spec.files, str) else list(spec.files)
        return _matching(patterns, visible, where=f"{where}.files", repo=spec.id)
    config = _config(configs or [], spec, where)
    if config and config.get("data_files"):
        by_split = _data_files(config["data_files"], config.get("data_dir"))
        if spec.split not in by_split:
            raise RecipeError(
                f"{where}.split: {spec.id} has no split {spec.split!r} in its configuration {config['config_name']!r}; it has {', '.join(by_split)}. Write one of them."
            )
        return _matching(by_split[spec.split], visible, where=f"{where}.split", repo=spec.id)
    folder = f"{config['data_dir'].strip('/')}/" if config and config.get("data_dir") else ""
    return _by_name([path for path in visible if path.startswith(folder) and is_data(path)], spec, where)


def _config(configs: list[dict], spec: Any, where: str) -> dict | None:
    names = [str(config.get("config_name")) for config in configs]
    if spec.config is None:
        default = [config for config in configs if config.get("default") or config.get("config_name") == "default"]
        if len(configs) > 1 and not default:
            raise RecipeError(
                f"{where}.config: {spec.id} has several configurations and none is the default: {', '.join(names)}. Write config: {names[0]}."
            )
        return next(iter(default or configs), None)
    if spec.config not in names:
        near = get_close_matches(spec.config, names, n=1)
        cure = f"Did you mean {near[0]!r}?" if near else "Write one of them, or choose files with `files`."
        raise RecipeError(
            f"{where}.config: {spec.id} has no configuration {spec.config!r}; its card names {', '.join(names) or 'none'}. {cure}"
        )
    return configs[names.index(spec.config)]


def _data_files(data_files: Any, data_dir: str | None) -> dict[str, list[str]]:
    """Patterns by split. A card writes one pattern, a list of them, or a list of {split, path}."""
    entries = data_files if isinstance(data_files, list) else [data_files]
    by_split: dict[str, list[str]] = {}
    for entry in entries:
        split, path = (str(entry.get("split", "train")), entry["path"]) if isinstance(entry, dict) else ("train", entry)
        patterns = path if isinstance(path, list) else [path]
        by_split.setdefault(split, []).extend(f"{data_dir.strip('/')}/{p}" if data_dir else p for p in patterns)
    return by_split


def _matching(patterns: list[str], paths: list[str], *, where: str, repo: str) -> list[str]:
    from fsspec.utils import glob_translate

    found: dict[str, None] = {}
    for pattern in patterns:
        expression = re.compile(glob_translate(pattern.removeprefix("./")))
        matched = [path for path in paths if expression.match(path) or path.startswith(pattern.rstrip("/") + "/")]
        if not matched:
            shown = ", ".join(paths[:8]) + (" ..." if len(paths) > 8 else "")
            raise InputMissingError(
                f"{where}: {pattern!r} matches no file of {repo}, so there is nothing to read. It has {shown or 'no files'}."
            )
        found.update(dict.fromkeys(matched))
    return list(found)


def _by_name(paths: list[str], spec: Any, where: str) -> list[str]:
    splits = {path: split_of(path) for path in paths}
    named = {split for split in splits.values() if split}
    chosen = [path for path in paths if splits[path] == spec.split] if named else paths if spec.split == "train" else []
    if not chosen:
        have = ", ".join(sorted(named)) or ("train" if paths else "no readable files")
        raise InputMissingError(
            f"{where}.split: {spec.id} has no files of the split {spec.split!r}; it has {have}. Write one of them, or choose files with `files`."
        )
    return chosen


def split_of(path: str) -> str | None:
    """The split that a file's name tells, else one of its folders; None when none does."""
    for part in reversed(PurePosixPath(path).parts):
        words = set(SEPARATORS.split(part.lower()))
        for split, keywords in KEYWORDS.items():
            if words & set(keywords):
                return split
    return None
