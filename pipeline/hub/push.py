"""Publish a model of a run, and look afterwards whether what stands on the Hub is what was sent."""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from pipeline.artifacts.atomic import sha256_file
from pipeline.artifacts.checkpoints import SEAL, read_seal
from pipeline.artifacts.errors import CannotWriteError, DataError, InputMissingError, RecipeError
from pipeline.artifacts.hub_queue import MODEL, HubQueue, Item
from pipeline.artifacts.run_directory import RunDirectory
from pipeline.hub.client import bound_waits
from pipeline.hub.contents import CARD, STATE, collect, write_card
from pipeline.hub.secrets import refusals
from pipeline.hub.upload import Upload
from pipeline.hub.verification import compare_sums, verify
from pipeline.report.run_data import RunData, read_run


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

    repo_id, private: default the recipe's hub.id and hub.private. with_state: also the newest checkpoint, for going on from,
    as under hub.strategy checkpoint. trust_code: load the published model also with code that is not this program's. Raises RecipeError when no repository is named, InputMissingError without a model,
    CannotWriteError while the run publishes by itself, DataError when the model is damaged or a byte must not leave this
    machine, ServiceError when the Hub refuses, stays away, or gives back other bytes than it was sent.
    """
    data = read_run(str(run.path))
    hub = data.recipe.get("hub") or {}
    repo_id = repo_id or hub.get("id")
    if not repo_id:
        raise RecipeError(
            f"{run.recipe}: hub.id names no repository, so there is nowhere to push. Give --id NAMESPACE/NAME."
        )
    bound_waits()
    queue = HubQueue(run, strategy="checkpoint" if with_state else hub.get("strategy", "end"))
    with queue.hold(wait_s=2.0) as held:
        if not held:
            raise CannotWriteError(
                f"{queue.path}: the run publishes by itself, and two uploads would mix. Wait until it has ended."
            )
        if with_state and run.whole_checkpoint() is None:
            raise InputMissingError(
                f"{run.checkpoints}: there is no whole checkpoint, so there is no state to push. Push without --with-state."
            )
        if (run.model / SEAL).exists():
            queue.add_model(repo_id, again=True)  # with the report and the scores as they are now
        if not queue.items():
            raise InputMissingError(
                f"{run.model}: there is no finished model, so there is nothing to push. Let the run end: start its command again."
            )
        while item := queue.next():
            pushed = publish(queue, item, data=data, repo_id=repo_id, private=private, trust_code=trust_code)
    if (run.model / SEAL).exists():
        run.update_manifest(hub={"id": pushed.repo_id, "commit": pushed.commit, "time": time.time()})
    return pushed


def publish(
    queue: HubQueue,
    item: Item,
    *,
    data: RunData,
    repo_id: str,
    private: bool | None = None,
    trust_code: bool = False,
) -> Pushed:
    """Publish one item in one commit, verify it and write it down.

    An upload that an earlier process had finished, and did not live to write down, is not repeated.
    """
    from huggingface_hub import constants

    model = queue.folder(item)
    hub = data.recipe.get("hub") or {}
    with tempfile.TemporaryDirectory(prefix=".tmp-", dir=queue.path) as folder:
        files = collect(
            data, model=model, step=item.step, repo_id=repo_id, folder=Path(folder), state=queue.state(item)
        )
        if lines := refusals(files):
            raise DataError(
                f"{data.run.path}: nothing was uploaded, because it would leave this machine:\n  "
                + "\n  ".join(lines)
                + "\nRemove it, then push again."
            )
        sums = {name: sha256_file(path) for name, path in files.items()}
        upload = Upload(
            repo_id,
            branch=(hub.get("revision") or "main").replace("{run}", data.name),
            private=hub.get("private", True) if private is None else private,
        )
        upload.open()
        if upload.repo_id != repo_id:  # the Hub has put the namespace before it, which the card must name
            write_card(data, model=model, step=item.step, repo_id=upload.repo_id, folder=Path(folder))
            sums[CARD] = sha256_file(files[CARD])
        replaces = (queue.last_published(repo_id) or {}).get("files", [])
        message = f"Upload run {data.name}" + ("" if item.name == MODEL else f" at step {item.step}")
        commit, found = upload.commit(files, queue=queue, item=item, message=message, replaces=replaces)
        if found:  # with the card and the manifest of that time
            sealed = read_seal(model)["files"]
            sums = {name: value for name, value in sums.items() if name in sealed or name.startswith(f"{STATE}/")}
        how = "the Hub's sums are equal"
        stated = {name for name in sums if item.name != MODEL or name.startswith(f"{STATE}/")}
        compare_sums({name: files[name] for name in stated}, repo_id=upload.repo_id, commit=commit)
        if item.name == MODEL:
            fetched = {name: value for name, value in sums.items() if name not in stated}
            how = verify(
                fetched, model=model, repo_id=upload.repo_id, commit=commit, within=queue.path, trust_code=trust_code
            )
    if queue.all and item.name != MODEL:
        upload.tag(item.step, commit)
    url = f"{constants.ENDPOINT}/{upload.repo_id}"
    print(f"{url}: {item.name} of step {item.step}, {len(sums)} files, {how}", flush=True)
    queue.done(item, repo_id=repo_id, revision=upload.branch, commit=commit, url=url, files=sorted(files))
    return Pushed(repo_id=upload.repo_id, commit=commit, url=url, files=sums)
