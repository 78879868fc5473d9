"""Whole checkpoints: written under another name, sealed with the hash of every file, renamed, and verified before use."""

import errno
import math
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.process.errors import DamagedFileError
from pipeline.process.storage import move_folder, new_folder, read_json, remove_folder, sha256_file, sum_of, write_json

SEAL = "MANIFEST.json"
# What transformers looks for in a model's folder has one of these endings.
LOADABLE_SUFFIXES = (".safetensors", ".bin", ".json", ".py", ".jinja", ".model", ".txt", ".msgpack", ".h5")
_NAME = re.compile(r"checkpoint-(\d+)")


@contextmanager
def whole_folder(path: str | Path, **facts) -> Iterator[Path]:
    """new_folder that ends with MANIFEST.json: the size and sha256 of every file, and `facts` (step, run ...)."""
    with new_folder(path) as temporary:
        yield temporary
        seal(temporary, **facts)


def seal(folder: Path, *, written: dict[str, dict[str, Any]] | None = None, **facts) -> None:
    """Write MANIFEST.json over everything that is in the folder now. written: bytes and sha256 by name, from who wrote these files: a
    network file system may show a size of some seconds ago. Raises FileNotFoundError where it lists one of them not at all."""
    written = written or {}
    files = {
        name: written.get(name) or {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and (name := str(path.relative_to(folder))) != SEAL
    }
    for name in written.keys() - files.keys():
        raise FileNotFoundError(errno.ENOENT, "was written and is not in its folder", str(folder / name))
    manifest = {**facts, "files": files}
    write_json(folder / SEAL, {**manifest, "sha256": sum_of(manifest)})


def read_seal(folder: str | Path) -> dict[str, Any]:
    """Return MANIFEST.json, whoever wrote it: `files` maps names to bytes and sha256, `step` is a step where there is one.

    Raises DamagedFileError when it is anything else, FileNotFoundError where there is none.
    """
    path = Path(folder) / SEAL
    manifest = read_json(path)
    own_sum = manifest.pop("sha256", None)
    if own_sum != sum_of(manifest):
        raise DamagedFileError(f"{path}: has other content than was written. Put the folder back from a copy.")
    files, step = manifest.get("files"), manifest.get("step", 0)
    good = (
        isinstance(files, dict)
        and all(_is_file_name(name) and _are_facts(facts) for name, facts in files.items())
        and type(step) is int
        and 0 <= step < 2**63
    )
    if not good:
        raise DamagedFileError(f"{path}: is no list of files as this program writes it. Take the files from elsewhere.")
    return manifest


def _is_file_name(name: str) -> bool:
    """Return whether a file system can have it at all; where it leads to is for the caller to judge."""
    try:
        parts = os.fsencode(name).split(b"/")
    except UnicodeEncodeError:
        return False
    return bool(name) and "\0" not in name and all(len(part) <= 255 for part in parts)


def _are_facts(facts: Any) -> bool:
    return isinstance(facts, dict) and type(facts.get("bytes")) is int and isinstance(facts.get("sha256"), str)


def problems(folder: str | Path) -> list[str]:
    """Return what is damaged in a sealed folder: empty when every listed file is there with its size and hash.

    Files that are not listed do no damage: `strays` names them.
    """
    folder = Path(folder)
    try:
        files = read_seal(folder)["files"]
    except FileNotFoundError:
        return [f"{SEAL} is missing"]
    except DamagedFileError:
        return [f"{SEAL} has other content than was written"]
    except OSError as error:
        return [unreadable(SEAL, error)]
    found = []
    for name, expected in files.items():
        path = folder / name
        try:
            if not path.is_file():
                found.append(f"{name} is missing")
            elif path.stat().st_size != expected["bytes"]:
                found.append(f"{name} has {path.stat().st_size} bytes instead of {expected['bytes']}")
            elif sha256_file(path) != expected["sha256"]:
                found.append(f"{name} has other content than was written")
        except OSError as error:
            found.append(unreadable(name, error))
    return found


def sealed_files(folder: Path) -> dict[str, Path]:
    """Return the files that MANIFEST.json lists, itself included, by their names in the folder."""
    return {name: folder / name for name in [*read_seal(folder)["files"], SEAL]}


def strays(folder: Path) -> list[str]:
    """Return the names of files in a sealed folder that it was not written with: a file manager's .DS_Store, notes."""
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return sorted(found - set(sealed_files(folder)))


def loadable_strays(folder: Path) -> list[str]:
    """Return the strays that from_pretrained might take for a part of the model, such as adapter_config.json."""
    return [
        name
        for name in strays(folder)
        if Path(name).suffix in LOADABLE_SUFFIXES and not Path(name).name.startswith(".")
    ]


def has_whole_model(folder: Path) -> bool:
    """Return whether from_pretrained loads what was written, however damaged the training state beside it is."""
    damaged = {problem.split(" ", 1)[0] for problem in problems(folder)}
    state = ("optimizer", "scheduler.", "trainer_state.", "position.", "rng-")
    return all(name.startswith(state) for name in damaged)


def unreadable(name: str, error: OSError) -> str:
    """Return a file whose blocks are bad is damaged like any other; whatever else keeps it from being read says nothing of it."""
    if error.errno not in (errno.EIO, errno.EBADMSG, errno.EUCLEAN):
        raise error
    return f"{name} cannot be read ({error.strerror})"


def step_of(folder: Path) -> int | None:
    match = _NAME.fullmatch(folder.name)
    return int(match.group(1)) if match else None


def by_step(checkpoints: Path) -> list[Path]:
    """Return the checkpoint folders in the order of their steps; numbers decide, never file times."""
    if not checkpoints.is_dir():
        return []
    return sorted(
        (p for p in checkpoints.iterdir() if p.is_dir() and step_of(p) is not None), key=lambda p: step_of(p) or 0
    )


def newest_whole(checkpoints: Path, quarantine: Path) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint that verifies, and a line for each damaged one on the way, which is moved aside."""
    notes: list[str] = []
    folders = by_step(checkpoints)
    while folders:
        folder = folders.pop()
        found = problems(folder)
        if not found:
            if names := strays(folder):
                belong = "does not belong" if len(names) == 1 else "do not belong"
                notes.append(f"{folder}: {', '.join(names)} {belong} to the checkpoint; ignored.")
            return folder, notes
        target = quarantined(folder, quarantine)
        instead = "; the checkpoint before it is tried" if folders else ""
        notes.append(f"{folder}: {'; '.join(found)}. Moved to {target}{instead}.")
    return None, notes


def quarantined(folder: Path, quarantine: Path) -> Path:
    """Move a checkpoint out of the way, beside those that were moved before; returns its new place."""
    quarantine.mkdir(parents=True, exist_ok=True)
    target = quarantine / folder.name
    number = 1
    while target.exists():
        number += 1
        target = quarantine / f"{folder.name}.{number}"
    move_folder(folder, target)
    return target


def rotate(
    checkpoints: Path, *, keep: int | None, every: int | None = None, scores: dict[int, float] | None = None
) -> None:
    """Delete checkpoints beyond the `keep` newest; called only after a new one is sealed.

    Those stay whose step is a multiple of `every`, and the one with the lowest of `scores` (by step; of those that lie
    here). keep=None deletes nothing.
    """
    if keep is None:
        return
    folders = {step_of(folder) or 0: folder for folder in by_step(checkpoints)}
    scored = {step: score for step, score in (scores or {}).items() if step in folders and math.isfinite(score)}
    kept = set(list(folders)[-max(keep, 1) :]) | {step for step in folders if every and step % every == 0}
    if scored:
        kept.add(min(scored, key=lambda step: (scored[step], -step)))
    for step, folder in folders.items():
        if step not in kept:
            remove_folder(folder)


def clean(checkpoints: Path) -> None:
    """Remove what an interrupted save or rotation left behind."""
    if checkpoints.is_dir():
        for folder in checkpoints.iterdir():
            if folder.name.startswith((".tmp-", ".trash-")):
                shutil.rmtree(folder, ignore_errors=True)
