"""Publish a model of a run, and look afterwards whether what stands on the Hub is what was sent."""

import dataclasses
import hashlib
import shutil
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pipeline.artifacts.atomic import read_json, sha256_file, write_text
from pipeline.artifacts.checkpoints import SEAL, problems
from pipeline.artifacts.errors import CannotWriteError, DataError, InputMissingError, RecipeError, ServiceError
from pipeline.artifacts.hub_queue import MODEL, HubQueue, Item
from pipeline.artifacts.run_directory import RunDirectory
from pipeline.hub.card import model_card
from pipeline.hub.client import bound_waits
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
    """Publish the finished model, or the newest checkpoint's model that waits for it; older ones are superseded.

    repo_id, private: default the recipe's hub.id and hub.private. Raises RecipeError when no repository is named,
    InputMissingError without a model, CannotWriteError while the run publishes by itself, DataError when the model is
    damaged or a byte must not leave this machine, ServiceError when the Hub refuses, stays away, or gives back other
    bytes than it was sent.
    """
    data = read_run(str(run.path))
    repo_id = repo_id or (data.recipe.get("hub") or {}).get("id")
    if not repo_id:
        raise RecipeError(
            f"{run.recipe}: hub.id names no repository, so there is nowhere to push. Give --id NAMESPACE/NAME."
        )
    bound_waits()
    queue = HubQueue(run)
    with queue.hold(wait_s=2.0) as held:
        if not held:
            raise CannotWriteError(
                f"{queue.path}: the run publishes by itself, and two uploads would mix. Wait until it has ended."
            )
        if (run.model / SEAL).exists():
            queue.add_model(repo_id, again=True)  # with the report and the scores as they are now
        if not (items := queue.items()):
            raise InputMissingError(
                f"{run.model}: there is no finished model, so there is nothing to push. Let the run end: start its command again."
            )
        pushed = publish(queue, items[-1], data=data, repo_id=repo_id, private=private)
    if items[-1].name == MODEL:
        run.update_manifest(hub={"id": pushed.repo_id, "commit": pushed.commit, "time": time.time()})
    return pushed


def publish(queue: HubQueue, item: Item, *, data: RunData, repo_id: str, private: bool | None = None) -> Pushed:
    """Publish one item in one commit, verify it and write it down.

    An upload that an earlier process had finished, and did not live to write down, is not repeated.
    """
    from huggingface_hub import constants

    model = queue.folder(item)
    if private is None:
        private = (data.recipe.get("hub") or {}).get("private", True)
    with tempfile.TemporaryDirectory(prefix=".tmp-", dir=queue.path) as folder:
        files = collect(data, model=model, step=item.step, repo_id=repo_id, folder=Path(folder))
        if lines := refusals(files):
            raise DataError(
                f"{data.run.path}: nothing was uploaded, because it would leave this machine:\n  "
                + "\n  ".join(lines)
                + "\nRemove it, then push again."
            )
        sums = {name: sha256_file(path) for name, path in files.items()}
        last = queue.last_published(repo_id) or {}
        message = f"Upload run {data.name}" + ("" if item.name == MODEL else f" at step {item.step}")
        full_id, commit, found = _upload(
            files,
            queue=queue,
            item=item,
            repo_id=repo_id,
            private=private,
            message=message,
            replaces=last.get("files", []),
        )
        if found:  # with the card and the manifest of that time
            sums = {name: sums[name] for name in read_json(model / SEAL)["files"]}
        if item.name == MODEL:
            verify(sums, repo_id=full_id, commit=commit, within=queue.path)
        else:
            compare_sums({name: files[name] for name in sums}, repo_id=full_id, commit=commit)
    url = f"{constants.ENDPOINT}/{full_id}"
    how = "downloaded again and equal" if item.name == MODEL else "the Hub's sums are equal"
    print(f"{url}: {item.name} of step {item.step}, {len(sums)} files, {how}", flush=True)
    queue.done(item, repo_id=repo_id, commit=commit, url=url, files=sorted(files))
    return Pushed(repo_id=full_id, commit=commit, url=url, files=sums)


def collect(data: RunData, *, model: Path, step: int, repo_id: str, folder: Path) -> dict[str, Path]:
    """What is published, name in the repository -> file: the model, recipe, manifest, report, and the card made in `folder`."""
    if found := problems(model):
        raise DataError(
            f"{model}: the model is damaged ({'; '.join(found)}) and is not pushed. Remove the folder and run the training command again: it writes it anew."
        )
    files = {str(p.relative_to(model)): p for p in sorted(model.rglob("*")) if p.is_file()}
    report = [data.run.report / name for name in ("report.md", "report.html", "curves.png")]
    for path in (data.run.recipe, data.run.manifest, *report, data.run.evals):
        if path.exists():
            # A copy: a report or evaluation written meanwhile must not change what was hashed.
            files[path.name] = Path(shutil.copy2(path, folder / path.name))
    if model != data.run.model:
        # The run goes on while this is published: what it measured later says nothing about this model.
        rows = [row for row in data.rows if row.get("step", 0) <= step]
        data = dataclasses.replace(data, rows=rows, evals=[e for e in data.evals if (e.get("step") or 0) <= step])
    write_text(folder / "README.md", model_card(data, model=model, step=step, repo_id=repo_id))
    return files | {"README.md": folder / "README.md"}


def _upload(
    files: dict[str, Path],
    *,
    queue: HubQueue,
    item: Item,
    repo_id: str,
    private: bool,
    message: str,
    replaces: list[str],
) -> tuple[str, str, bool]:
    """One commit with these files, without those of `replaces` that are not among them.

    Gives the repository, the commit, and whether it was found there: the answer to an earlier attempt may have been lost.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi()
    created = retried(lambda: api.create_repo(repo_id, private=private, exist_ok=True), what=f"creating {repo_id}")
    info = retried(lambda: api.model_info(created.repo_id), what=f"reading {created.repo_id}")
    if private and not info.private:
        raise ServiceError(
            f"{created.repo_id}: the repository exists and is public, and the recipe asks for a private one (hub.private), so nothing was "
            "uploaded. Make it private on the Hub, name another repository, or push with --public."
        )
    left = {sibling.rfilename for sibling in info.siblings or []} & set(replaces) - set(files)
    before = item.before

    def commit() -> tuple[str, bool]:
        nonlocal before
        if before is not None and (there := _made_since(before, created.repo_id, files[SEAL])):
            return there, True
        if before is None:
            before = info.sha
            queue.note(item, before=before)
        # Made anew for each attempt: an operation remembers what it has uploaded.
        add = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in files.items()]
        remove = [CommitOperationDelete(path_in_repo=name) for name in sorted(left)]
        return api.create_commit(created.repo_id, operations=[*add, *remove], commit_message=message).oid, False

    return created.repo_id, *retried(commit, what=f"uploading to {created.repo_id}")


def _made_since(before: str, repo_id: str, seal: Path) -> str | None:
    """The newest commit when it is not `before` and holds the model that `seal` seals."""
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import RemoteEntryNotFoundError

    newest = HfApi().model_info(repo_id).sha
    if newest is None or newest == before:
        return None
    with tempfile.TemporaryDirectory(prefix="tandem-push-") as folder:
        try:
            theirs = hf_hub_download(repo_id, SEAL, revision=newest, local_dir=folder)
        except RemoteEntryNotFoundError:  # not its base, which is also a Hub that was not reached
            return None
        return newest if Path(theirs).read_bytes() == seal.read_bytes() else None


def verify(sums: dict[str, str], *, repo_id: str, commit: str, within: Path) -> None:
    """Download every file of the commit into an empty folder and compare; ServiceError names those that differ.

    within: where the folder is made; in the queue, what a killed process leaves behind is cleared away.
    """
    from huggingface_hub import hf_hub_download

    wrong = []
    with tempfile.TemporaryDirectory(prefix=".tmp-", dir=within) as folder:
        for name, expected in sums.items():
            download = partial(hf_hub_download, repo_id, name, revision=commit, local_dir=folder)
            path = retried(download, what=f"downloading {name}")
            if sha256_file(path) != expected:
                wrong.append(name)
            Path(path).unlink()
    _refuse(wrong, repo_id, commit)


def compare_sums(files: dict[str, Path], *, repo_id: str, commit: str) -> None:
    """As verify, by the hashes that the Hub states: a checkpoint is too large to fetch again at every save."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    wrong = []
    for name, path in files.items():
        url = hf_hub_url(repo_id, name, revision=commit)
        stated = retried(partial(get_hf_file_metadata, url), what=f"reading the hash of {name}").etag
        # Large files are stated by their sha256, small ones as git does.
        if stated != (sha256_file(path) if len(stated or "") == 64 else _git_sum(path)):
            wrong.append(name)
    _refuse(wrong, repo_id, commit)


def _git_sum(path: Path) -> str:
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _refuse(wrong: list[str], repo_id: str, commit: str) -> None:
    if wrong:
        raise ServiceError(
            f"{repo_id}@{commit}: the Hub gives back other bytes than were sent for {', '.join(wrong)}. Push again; do not use this commit."
        )
