"""Publish a finished run, and look afterwards whether what stands on the Hub is what was sent."""

import shutil
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pipeline.artifacts.atomic import sha256_file, write_text
from pipeline.artifacts.checkpoints import problems
from pipeline.artifacts.errors import DataError, InputMissingError, RecipeError, ServiceError
from pipeline.artifacts.run_directory import RunDirectory
from pipeline.hub.card import model_card
from pipeline.hub.retries import retried
from pipeline.hub.secrets import refusals
from pipeline.report.run_data import RunData, read_run


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """A verified upload. files: name in the repository -> sha256."""

    repo_id: str
    commit: str
    url: str
    files: dict[str, str]


def push(run: RunDirectory, *, repo_id: str | None = None, private: bool | None = None) -> Pushed:
    """Create the repository when it is new, upload in one commit, download again and compare.

    repo_id, private: default the recipe's hub.id and hub.private. Raises RecipeError when no repository is named,
    InputMissingError without a finished model, DataError when the model is damaged or a byte must not leave this machine,
    ServiceError when the Hub refuses, stays away, or gives back other bytes than it was sent.
    """
    data = read_run(str(run.path))
    hub = data.recipe.get("hub") or {}
    repo_id = repo_id or hub.get("id")
    private = hub.get("private", True) if private is None else private
    if not repo_id:
        raise RecipeError(
            f"{run.recipe}: hub.id names no repository, so there is nowhere to push. Give --id NAMESPACE/NAME."
        )
    with tempfile.TemporaryDirectory(prefix="tandem-push-") as folder:
        files = collect(data, repo_id=repo_id, folder=Path(folder))
        if lines := refusals(files):
            raise DataError(
                f"{data.run.path}: nothing was uploaded, because it would leave this machine:\n  "
                + "\n  ".join(lines)
                + "\nRemove it, then push again."
            )
        sums = {name: sha256_file(path) for name, path in files.items()}
        repo_id, commit, url = _upload(files, repo_id=repo_id, private=private, run=data.name)
    verify(sums, repo_id=repo_id, commit=commit)
    print(f"{url}: {len(sums)} files, downloaded again and equal")
    pushed = Pushed(repo_id=repo_id, commit=commit, url=url, files=sums)
    data.run.update_manifest(hub={"id": repo_id, "commit": commit, "time": time.time()})
    return pushed


def collect(data: RunData, *, repo_id: str, folder: Path) -> dict[str, Path]:
    """What is published, name in the repository -> file: model/, recipe, manifest, report, and the card made in `folder`."""
    model = data.run.model
    if not (model / "config.json").exists():
        raise InputMissingError(
            f"{model}: there is no finished model, so there is nothing to push. Let the run end: start its command again."
        )
    if found := problems(model):
        raise DataError(
            f"{model}: the model is damaged ({'; '.join(found)}) and is not pushed. Remove the folder and run the training command again: it writes it anew."
        )
    files = {str(p.relative_to(model)): p for p in sorted(model.rglob("*")) if p.is_file()}
    for path in (data.run.recipe, data.run.manifest, data.run.report / "report.md", data.run.evals):
        if path.exists():
            # A copy: a report or evaluation written meanwhile must not change what was hashed.
            files[path.name] = Path(shutil.copy2(path, folder / path.name))
    write_text(folder / "README.md", model_card(data, repo_id=repo_id))
    return files | {"README.md": folder / "README.md"}


def _upload(files: dict[str, Path], *, repo_id: str, private: bool, run: str) -> tuple[str, str, str]:
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi()
    created = retried(lambda: api.create_repo(repo_id, private=private, exist_ok=True), what=f"creating {repo_id}")
    is_private = retried(lambda: api.model_info(created.repo_id), what=f"reading {created.repo_id}").private
    if private and not is_private:
        raise ServiceError(
            f"{created.repo_id}: the repository exists and is public, and the recipe asks for a private one (hub.private), so nothing was "
            "uploaded. Make it private on the Hub, name another repository, or push with --public."
        )

    def commit():
        # Made anew for each attempt: an operation remembers what it has uploaded.
        operations = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in files.items()]
        return api.create_commit(created.repo_id, operations=operations, commit_message=f"Upload run {run}")

    done = retried(commit, what=f"uploading to {created.repo_id}")
    return created.repo_id, done.oid, str(created)


def verify(sums: dict[str, str], *, repo_id: str, commit: str) -> None:
    """Download every file of the commit into an empty folder and compare; ServiceError names those that differ."""
    from huggingface_hub import hf_hub_download

    wrong = []
    with tempfile.TemporaryDirectory(prefix="tandem-verify-") as folder:
        for name, expected in sums.items():
            download = partial(hf_hub_download, repo_id, name, revision=commit, local_dir=folder)
            path = retried(download, what=f"downloading {name}")
            if sha256_file(path) != expected:
                wrong.append(name)
            Path(path).unlink()
    if wrong:
        raise ServiceError(
            f"{repo_id}@{commit}: the Hub gives back other bytes than were sent for {', '.join(wrong)}. Push again; do not use this commit."
        )
