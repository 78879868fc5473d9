"""Restore a published run: what was pushed of it in a run directory, verified, whole or not at all."""

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.hub.client import bound_waits, retried
from pipeline.process.commands import command
from pipeline.process.errors import (
    CannotWriteError,
    DamagedFileError,
    DataError,
    ServiceError,
)
from pipeline.process.storage import new_folder, read_json, remove_file
from pipeline.recipe.schema import Hub
from pipeline.run_dir.checkpoints import SEAL, by_step, problems, read_seal, sealed_files
from pipeline.run_dir.run_directory import RunDirectory

STATE = "last-checkpoint"  # as transformers' hub_strategy="checkpoint" names it


def pull(repo_id: str, *, runs: str = "runs", revision: str | None = None) -> RunDirectory:
    """Download a repository into runs/<name of the run>: its model under model/ and, where it was pushed, its newest
    checkpoint, from which the run continues; both verified.

    Raises CannotWriteError when a run of that name exists, DataError when the repository is no pushed run or its files
    are not those that were sealed, ServiceError when the Hub refuses or stays away.
    """
    from huggingface_hub import HfApi

    bound_waits()
    found = retried(lambda: HfApi().model_info(repo_id, revision=revision), what=f"reading {repo_id}")
    commit = found.sha
    with download_folder(Path(runs)) as snapshot:
        download(repo_id, commit, snapshot)
        target = Path(runs) / run_name(snapshot, repo_id, needs=(SEAL,))
        if target.exists():
            raise CannotWriteError(
                f"{target}: the run exists, and pulling would mix two. Rename or remove it, or pull into another "
                "folder with --runs."
            )
        # The run appears under its name when all of it is there and verified.
        with new_folder(target) as restored:
            run = RunDirectory(restored)
            place_records(snapshot, run)
            run.model.mkdir()
            _move_sealed_files(snapshot, run.model, repo_id)
            _refuse_damaged(run.model, repo_id)
            place_state(snapshot, run, repo_id)
            facts: dict[str, Any] = {"pulled_from": {"id": repo_id, "commit": commit}}
            manifest = run.read_manifest()
            if manifest.get("status") == "finished":  # the run itself notes the time when the push is over
                facts["finished"] = manifest.get("finished", manifest.get("ended", time.time()))
            run.update_manifest(**facts)
    return RunDirectory(target)


@contextmanager
def download_folder(runs: Path) -> Iterator[Path]:
    """Yield an empty folder on the disk of the run directories, removed afterwards.

    There a checkpoint is renamed, not copied.
    """
    runs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tmp-pull-", dir=runs) as folder:
        snapshot = Path(folder) / "snapshot"  # a level below where runs are looked for
        snapshot.mkdir()
        yield snapshot


def download(repo_id: str, commit: str | None, folder: Path, *, only: list[str] | None = None) -> None:
    """Download the files of a commit, or those that match, into the folder."""
    from huggingface_hub import snapshot_download

    try:
        retried(
            lambda: snapshot_download(repo_id, revision=commit, local_dir=folder, allow_patterns=only),
            what=f"downloading {repo_id}",
        )
    except ValueError as error:  # a name of a file that leads out of the folder
        raise DataError(f"{repo_id}: {error} Do not use it.") from None


def run_name(snapshot: Path, repo_id: str, *, needs: tuple[str, ...] = ()) -> str:
    """Return the name of the run that was pushed. Raises DataError when it was none of ours, or cannot be a folder's
    name here."""
    # A model of anybody has a config.json; a pushed run has its records and seal too.
    missing = [name for name in ("run_manifest.json", "recipe.yaml", *needs) if not (snapshot / name).exists()]
    if missing:
        raise DataError(
            f"{repo_id}: {', '.join(missing)} missing, so it is no run that was pushed with this program. "
            "A model alone needs no pull: give its id as the model."
        )
    try:
        manifest = read_json(snapshot / "run_manifest.json")
    except DamagedFileError as error:
        raise DataError(f"{repo_id}: {error}") from None
    name = str(manifest.get("name"))
    # It becomes a folder's name here, and anybody may have written it.
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*", name):
        raise DataError(
            f"{repo_id}: its manifest names the run {name!r}, which cannot be a folder. Take its files from the Hub "
            "by hand."
        )
    return name


def place_records(snapshot: Path, run: RunDirectory) -> None:
    """Move the run's other records to where a run keeps it."""
    for target in run.records():
        if (snapshot / target.name).exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(snapshot / target.name, target)


def _move_sealed_files(source: Path, target: Path, repo_id: str) -> None:
    """Move what the seal names; the card, and what others put there, stays behind."""
    for name, path in files_of(source, repo_id).items():
        if not (target / name).resolve().is_relative_to(target.resolve()):
            raise DataError(f"{repo_id}: its seal names a file outside the model ({name}). Do not use it.")
        if path.exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(path, target / name)


def files_of(folder: Path, repo_id: str) -> dict[str, Path]:
    """Return the same as sealed_files; raise DataError when somebody else wrote the seal."""
    try:
        return sealed_files(folder)
    except DamagedFileError as error:
        raise DataError(f"{repo_id}: {SEAL}{str(error).removeprefix(str(folder / SEAL))}") from None


def place_state(snapshot: Path, run: RunDirectory, repo_id: str) -> Path | None:
    """Move the checkpoint that was pushed to the run's checkpoints; None when none was."""
    state = snapshot / STATE
    if not (state / SEAL).exists():
        return None
    _refuse_damaged(state, repo_id)
    target = run.checkpoint(read_seal(state).get("step", 0))
    with new_folder(target) as folder:
        _move_sealed_files(state, folder, repo_id)
    return target


def _refuse_damaged(folder: Path, repo_id: str) -> None:
    if found := problems(folder):
        raise ServiceError(
            f"{repo_id}: the files are not those that were sealed ({'; '.join(found)}). Pull again; if it stays so, "
            "the upload was damaged."
        )


def what_it_can(run: RunDirectory) -> str:
    """Return what a pulled run is good for, and what is missing."""
    lines = [f"{run.path}: restored. Talk to it: {command('chat', run.path)}"]
    checkpoint, manifest = run.whole_checkpoint(), run.read_manifest()
    if checkpoint is None:
        lines.append("No checkpoint was pushed with it (hub push --with-state), so it cannot continue training.")
    elif "finished" not in manifest:
        stage = command(manifest.get("stage", "pretrain"), run.recipe, f"run.directory={run.path.parent}")
        lines.append(f"Continue from {checkpoint.name}: {stage}")
    return "\n".join(lines)


def restore_from_hub(hub: Hub, run: RunDirectory) -> None:
    """Fetch the pushed checkpoint of a run that has none here, under hub.strategy checkpoint and run.resume auto.

    What is there afterwards is what a start on the old machine would find; a run that has finished is pulled whole.
    Raises ServiceError when the Hub does not say what it has: to begin anew would repeat the run and write over its
    state.
    """
    if hub.id is None or by_step(run.checkpoints) or "finished" in run.read_manifest():
        return
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        print(f"HF_HUB_OFFLINE is set, so {hub.id} was not searched for a checkpoint of this run.", flush=True)
        return
    bound_waits()
    commit = _commit_with_state(hub.id, (hub.revision or "main").replace("{run}", run.name))
    if commit is None:
        return
    # Records and checkpoint without the model, which the next end of the run writes anew.
    with download_folder(run.path.parent) as snapshot:
        download(hub.id, commit, snapshot, only=[f"{STATE}/*", *(path.name for path in run.records())])
        theirs = run_name(snapshot, hub.id)
        if theirs != run.name:
            print(
                f"{hub.id}: holds a checkpoint of the run {theirs}, and this run is {run.name}, which begins "
                "anew and will replace it.",
                flush=True,
            )
            return
        if read_json(snapshot / "run_manifest.json").get("status") == "finished" and not run.path.exists():
            pull(hub.id, runs=str(run.path.parent), revision=commit)
            print(f"{run.path}: the finished run was restored from {hub.id}@{commit[:7]}", flush=True)
            return
        _place(snapshot, run, hub.id)
    step = by_step(run.checkpoints)[-1].name
    run.update_manifest(pulled_from={"id": hub.id, "commit": commit})
    print(f"{run.path}: {step} was restored from {hub.id}@{commit[:7]}", flush=True)


def _commit_with_state(repo_id: str, branch: str) -> str | None:
    """Return the newest commit; None when there is no such repository or branch, or no state in it."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    def ask() -> str | None:
        try:
            info = HfApi().model_info(repo_id, revision=branch)
        except (RepositoryNotFoundError, RevisionNotFoundError):
            return None
        names = {sibling.rfilename for sibling in info.siblings or []}
        return info.sha if f"{STATE}/{SEAL}" in names else None

    try:
        return retried(ask, what=f"asking {repo_id} for a checkpoint of this run")
    except ServiceError as error:
        raise ServiceError(
            f"{error} The run has no checkpoint here; to begin anew in any case, whatever the Hub has: "
            "run.resume=never."
        ) from None


def _place(snapshot: Path, run: RunDirectory, repo_id: str) -> None:
    trained_here = run.has_trained()  # its own records go further than those that were pushed with a checkpoint
    place_state(snapshot, run, repo_id)
    if not trained_here:
        for path in run.records():
            remove_file(path)
        place_records(snapshot, run)
