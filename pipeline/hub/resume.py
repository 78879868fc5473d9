"""A run goes on where it has no checkpoint: the newest whole one that it pushed is fetched before anything else is done."""

import os
from pathlib import Path

from pipeline.artifacts.atomic import remove_file
from pipeline.artifacts.checkpoints import SEAL, by_step
from pipeline.artifacts.errors import ServiceError
from pipeline.artifacts.run_directory import RunDirectory, read_manifest
from pipeline.hub.client import bound_waits
from pipeline.hub.contents import STATE, records
from pipeline.hub.pull import beside, download, place_records, place_state, pull, run_name
from pipeline.hub.retries import retried
from pipeline.recipe import Recipe

# A state that arrived damaged is one commit; beyond some, something else is wrong.
COMMITS = 10


def restore_from_hub(recipe: Recipe, run: RunDirectory) -> None:
    """Under hub.strategy checkpoint and run.resume auto: when the run has no checkpoint here and has pushed one, fetch it.

    What is there afterwards is what a start on the old machine would find; a run that has finished is pulled whole. A state
    that does not verify is named, and the commit before it is tried. Raises ServiceError when the Hub does not say what it
    has: to begin anew would repeat the run and write over its state.
    """
    hub = recipe.hub
    if hub.id is None or hub.strategy != "checkpoint" or recipe.run.resume != "auto":
        return
    if by_step(run.checkpoints) or "finished" in run.read_manifest():
        return
    branch = (hub.revision or "main").replace("{run}", run.name)
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        print(f"HF_HUB_OFFLINE is set, so {hub.id} was not asked for a checkpoint of this run.", flush=True)
        return
    bound_waits()
    for commit in _commits_with_state(hub.id, branch):
        with beside(run.path.parent) as snapshot:
            download(hub.id, commit, snapshot, only=[f"{STATE}/*", *(path.name for path in records(run))])
            theirs = run_name(snapshot, hub.id)
            if theirs != run.name:
                print(
                    f"{hub.id}: holds a checkpoint of the run {theirs}, and this run is {run.name}, which begins anew and will replace it.",
                    flush=True,
                )
                return
            if read_manifest(snapshot / "run_manifest.json")[0].get("status") == "finished" and not run.path.exists():
                pull(hub.id, runs=str(run.path.parent), revision=commit)
                print(f"{run.path}: the finished run was restored from {hub.id}@{commit[:7]}", flush=True)
                return
            try:
                _place(snapshot, run, hub.id)
            except ServiceError as error:
                print(f"{hub.id}@{commit[:7]}: {error} The commit before it is tried.", flush=True)
                continue
        step = by_step(run.checkpoints)[-1].name
        run.update_manifest(pulled_from={"id": hub.id, "commit": commit})
        print(f"{run.path}: {step} was restored from {hub.id}@{commit[:7]}", flush=True)
        return


def _commits_with_state(repo_id: str, branch: str) -> list[str]:
    """The newest first; none when there is no such repository or branch, or no state in it."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    api = HfApi()

    def ask() -> list[str]:
        try:
            info = api.model_info(repo_id, revision=branch)
            if f"{STATE}/{SEAL}" not in {sibling.rfilename for sibling in info.siblings or []}:
                return []
            return [commit.commit_id for commit in api.list_repo_commits(repo_id, revision=branch)][:COMMITS]
        except (RepositoryNotFoundError, RevisionNotFoundError):
            return []

    try:
        return retried(ask, what=f"asking {repo_id} for a checkpoint of this run")
    except ServiceError as error:
        raise ServiceError(
            f"{error} The run has no checkpoint here; to begin anew in any case, whatever the Hub has: run.resume=never."
        ) from None


def _place(snapshot: Path, run: RunDirectory, repo_id: str) -> None:
    trained_here = run.has_trained()  # its own records go further than those that were pushed with a checkpoint
    place_state(snapshot, run, repo_id)
    if not trained_here:
        for path in records(run):
            remove_file(path)
        place_records(snapshot, run)
