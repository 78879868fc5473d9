"""The runs that a run comes from, by its manifest: the one whose weights it began with, and the one that it forks."""

from pathlib import Path
from typing import Any

from pipeline.run_dir.checkpoints import read_seal
from pipeline.run_dir.run_directory import RunDirectory


def name_of_model(folder: Path) -> str:
    """Return the run's name for <run>/model and <run>/checkpoints/checkpoint-<step>, for another folder its own."""
    run = folder
    if folder.parent.name == "checkpoints":
        run = folder.parent.parent
    elif folder.name == "model":
        run = folder.parent
    return run.name or str(folder)


def base_run(run: Path, manifest: dict[str, Any]) -> RunDirectory | None:
    """Return the run whose model this one began with, where it is still here and its model has the recorded hash."""
    begun_with = _start_of(manifest)
    weights = _hashes(begun_with)
    if not weights:
        return None
    model = Path(begun_with["from"])
    here = run.resolve().parent
    # As it was named, or in this run's folder: <name>/model or <name>/checkpoints/checkpoint-<step>.
    for candidate in (model, here / Path(*model.parts[-2:]), here / Path(*model.parts[-3:])):
        folder = candidate.parent
        if folder.name == "checkpoints":
            folder = folder.parent
        base = RunDirectory(folder)
        if _has_weights(candidate, weights) and base.manifest.exists():
            return base
    return None


def forked_run(run: Path, manifest: dict[str, Any]) -> RunDirectory | None:
    """Return the run that this one forks (run.fork_from), where it is still here: as named, or in this run's folder."""
    name = (manifest.get("forked_from") or {}).get("run")
    if not name:
        return None
    for path in (Path(name), run.resolve().parent / Path(name).name):
        if RunDirectory(path).manifest.exists():
            return RunDirectory(path)
    return None


def parents_of(run: RunDirectory) -> tuple[list[RunDirectory], list[str]]:
    """Return the runs it comes from directly that are here, and the names of the runs and models that are not."""
    manifest = run.read_manifest()
    begun_with, fork = _start_of(manifest), (manifest.get("forked_from") or {}).get("run")
    found, absent = [], []
    if start := begun_with.get("from"):
        base = base_run(run.path, manifest)
        if base:
            found.append(base)
        elif _hashes(begun_with):  # of a folder the weights' hashes are recorded, of a Hub id the commit
            absent.append(name_of_model(Path(start)))
        else:
            absent.append(start)
    if fork:
        parent = forked_run(run.path, manifest)
        if parent:
            found.append(parent)
        else:
            absent.append(Path(fork).name)
    return found, absent


def _start_of(manifest: dict[str, Any]) -> dict[str, str]:
    return (manifest.get("inputs") or {}).get("start_from") or {}


def _hashes(begun_with: dict[str, str]) -> dict[str, str]:
    return {name: digest for name, digest in begun_with.items() if name.endswith(".safetensors")}


def _has_weights(model: Path, hashes: dict[str, str]) -> bool:
    try:
        files = read_seal(model)["files"]
    except (OSError, ValueError):  # damaged, or a path that no file system has
        return False
    return all((files.get(name) or {}).get("sha256") == digest for name, digest in hashes.items())
