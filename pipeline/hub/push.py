"""Publish a model of a run in one commit, and check afterwards that what is on the Hub is what was sent."""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants
from huggingface_hub.errors import BadRequestError, RevisionNotFoundError

from pipeline.hub.client import bound_waits, retried
from pipeline.hub.content import collect, is_of_a_run, refusals, write_card
from pipeline.hub.pull import STATE
from pipeline.hub.verification import compare_sums, verify
from pipeline.process.commands import command
from pipeline.process.errors import (
    CannotWriteError,
    DataError,
    InputMissingError,
    RecipeError,
    ServiceError,
)
from pipeline.process.storage import read_json, sha256_file
from pipeline.report.run_data import RunData, read_run
from pipeline.run_dir.checkpoints import SEAL, read_seal, seal
from pipeline.run_dir.hub_queue import MODEL, HubQueue, Item, is_training_state, link_files
from pipeline.run_dir.run_directory import RunDirectory


class Upload:
    """A branch of a repository that takes commits. Every request is made again while the Hub is away."""

    def __init__(self, repo_id: str, *, branch: str, private: bool):
        self.api, self.repo_id, self.branch, self.private = HfApi(), repo_id, branch, private

    def open(self) -> None:
        """Create the repository and the branch where they are missing; ServiceError when it is public and must not
        be."""
        self.repo_id = retried(self._create, what=f"creating {self.repo_id}")
        info = retried(lambda: self.api.model_info(self.repo_id), what=f"reading {self.repo_id}")
        if self.private and not info.private:
            raise ServiceError(
                f"{self.repo_id}: the repository exists and is public, and hub.private is true, so nothing was "
                "uploaded. Make it private on the Hub, name another repository, or push with --public."
            )

        self.is_new = self.branch != "main" and retried(self._create_branch, what=f"reading {self.branch}")

    def _create(self) -> str:
        return self.api.create_repo(self.repo_id, private=self.private, exist_ok=True).repo_id

    def _create_branch(self) -> bool:
        """Return whether the branch is new: then it has the files of main, which are another run's."""
        try:
            self.api.model_info(self.repo_id, revision=self.branch)
            return False
        except RevisionNotFoundError:
            self.api.create_branch(self.repo_id, branch=self.branch, exist_ok=True)
            return True

    def commit(self, files: dict[str, Path], *, message: str, replaces: list[str]) -> str:
        """Make one commit with these files, without those of an earlier push that are not among them; return it."""

        def commit() -> str:
            info = self.api.model_info(self.repo_id, revision=self.branch)
            there = {sibling.rfilename for sibling in info.siblings or []}
            # What an earlier push left there, and nothing that a person added.
            left = {name for name in there - set(files) if self.is_new or name in replaces or is_of_a_run(name)}
            left -= {".gitattributes"}
            # Made anew for each attempt: an operation remembers what it has uploaded.
            add = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in files.items()]
            remove = [CommitOperationDelete(path_in_repo=name) for name in sorted(left)]
            try:
                made = self.api.create_commit(
                    self.repo_id, operations=[*add, *remove], commit_message=message, revision=self.branch
                )
            except ValueError as error:  # the client asks the Hub about the card's metadata before it sends anything
                if not isinstance(error.__cause__, BadRequestError):
                    raise
                raise DataError(
                    f"{self.repo_id}: the Hub does not take the card ({' '.join(str(error).split())}). Correct "
                    "hub.license, hub.language or run.tags."
                ) from None
            return made.oid

        return retried(commit, what=f"uploading to {self.repo_id}")


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """A verified upload. files: name in the repository -> sha256."""

    repo_id: str
    commit: str
    url: str
    files: dict[str, str]


def push(
    run: RunDirectory,
    *,
    repo_id: str | None = None,
    private: bool | None = None,
    with_state: bool = False,
    trust_code: bool = False,
) -> Pushed:
    """Publish the finished model and what waits before it, or, before the end, the checkpoints that wait.

    repo_id, private: default the recipe's hub.id and hub.private. with_state: also the newest checkpoint, for going on
    from, as under hub.strategy checkpoint. trust_code: load the published model also with code that is not this
    program's. Raises RecipeError when no repository is named, InputMissingError without a model, CannotWriteError
    while the run publishes by itself, DataError when the model is damaged or a byte must not leave this machine,
    ServiceError when the Hub refuses, stays away, or gives back other bytes than it was sent.
    """
    data = read_run(str(run.path))
    hub = data.recipe.get("hub") or {}
    repo_id = repo_id or hub.get("id")
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
        state = run.whole_checkpoint() if with_state or hub.get("strategy") == "checkpoint" else None
        if with_state and state is None:
            raise InputMissingError(
                f"{run.checkpoints}: there is no whole checkpoint, so there is no state to push. Push without "
                "--with-state."
            )
        item = queue.model() if (run.model / SEAL).exists() else None
        if item is None and state is not None:
            item = queue.checkpoint()
        if item is None:
            raise InputMissingError(
                f"{run.model}: there is no finished model, so there is nothing to push. Let the run end: start its "
                "command again."
            )
        pushed = publish(queue, item, data=data, repo_id=repo_id, state=state, private=private, trust_code=trust_code)
    if item.name == MODEL:
        run.update_manifest(hub={"id": pushed.repo_id, "commit": pushed.commit, "time": time.time()})
    return pushed


def publish(
    queue: HubQueue,
    item: Item,
    *,
    data: RunData,
    repo_id: str,
    state: Path | None,
    private: bool | None = None,
    trust_code: bool = False,
) -> Pushed:
    """Publish one item in one commit, verify it and write it down. state: the whole checkpoint that goes with a
    model; a checkpoint is its own."""
    hub = data.recipe.get("hub") or {}
    branch = (hub.get("revision") or "main").replace("{run}", data.name)
    is_model = item.name == MODEL
    # On the disk of the run: the files of a checkpoint are linked, not copied.
    with tempfile.TemporaryDirectory(prefix=".tmp-", dir=queue.path) as temporary:
        folder, model = Path(temporary), item.folder
        if not is_model:
            state, model = item.folder, folder / MODEL
            _model_of_checkpoint(item, model, run=data.run.name)
        _refuse_local_base(data.run, model)
        # 1. Every byte that would leave is read for secrets and code before anything is sent.
        files = collect(data, model=model, step=item.step, repo_id=repo_id, folder=folder, state=state)
        if lines := refusals(files):
            raise DataError(
                f"{data.run.path}: nothing was uploaded, because it would leave this machine:\n  "
                + "\n  ".join(lines)
                + "\nRemove it, then push again."
            )
        # 2. One commit, so that no reader ever sees half of it.
        upload = Upload(repo_id, branch=branch, private=hub.get("private", True) if private is None else private)
        upload.open()
        if upload.repo_id != repo_id:  # the Hub has put the namespace before it, which the card must name
            write_card(data, model=model, step=item.step, repo_id=upload.repo_id, folder=folder)
        sums = {name: sha256_file(path) for name, path in files.items()}
        message = f"Upload run {data.name}" + ("" if is_model else f" at step {item.step}")
        replaces = (queue.last_published(repo_id) or {}).get("files", [])
        commit = upload.commit(files, message=message, replaces=replaces)
        # 3. What has arrived: a checkpoint by the Hub's hashes, since it is too large to fetch again at every save; a
        # finished model downloaded, loaded and run.
        by_hash = {name: path for name, path in files.items() if not is_model or name.startswith(f"{STATE}/")}
        compare_sums(by_hash, repo_id=upload.repo_id, commit=commit)
        how = "the Hub's sums are equal"
        if is_model:
            fetched = {name: value for name, value in sums.items() if name not in by_hash}
            how = verify(
                fetched, model=model, repo_id=upload.repo_id, commit=commit, within=queue.path, trust_code=trust_code
            )
    url = f"{constants.ENDPOINT}/{upload.repo_id}"
    print(f"{url}: {item.name} of step {item.step}, {len(sums)} files, {how}", flush=True)
    queue.done(item, repo_id=repo_id, revision=branch, commit=commit, url=url, files=sorted(files))
    return Pushed(repo_id=upload.repo_id, commit=commit, url=url, files=sums)


def _refuse_local_base(run: RunDirectory, model: Path) -> None:
    """Raise DataError for an adapter whose base only this machine has."""
    file = model / "adapter_config.json"
    if file.exists() and Path(base := read_json(file)["base_model_name_or_path"]).is_absolute():
        raise DataError(
            f"{model}: is an adapter of {base}, which is on this machine alone, so nobody could load it. Write the "
            f"whole model and publish that: {command('hub', 'export', run.path, '--merge')}"
        )


def _model_of_checkpoint(item: Item, folder: Path, *, run: str) -> None:
    """Link the checkpoint's model into a new folder, sealed with the hashes that the checkpoint was written with."""
    files = {name: facts for name, facts in read_seal(item.folder)["files"].items() if not is_training_state(name)}
    folder.mkdir()
    link_files(item.folder, folder, files)
    seal(folder, written=files, step=item.step, run=run)
