"""Restore a published run: its model, recipe and manifest in a run directory, whole or not at all."""

import re
import shutil
import tempfile
from pathlib import Path

from pipeline.artifacts.atomic import new_folder, read_json
from pipeline.artifacts.checkpoints import SEAL, problems
from pipeline.artifacts.errors import CannotWriteError, DataError, ServiceError
from pipeline.artifacts.run_directory import RunDirectory
from pipeline.hub.client import bound_waits
from pipeline.hub.retries import retried


def pull(repo_id: str, *, runs: str = "runs", revision: str | None = None) -> RunDirectory:
    """Download a repository into runs/<name of the run>, with its model, verified, under model/.

    Raises CannotWriteError when a run of that name exists, DataError when the repository is no pushed run or its files are
    not those that were sealed, ServiceError when the Hub refuses or stays away.
    """
    from huggingface_hub import HfApi, snapshot_download

    bound_waits()
    commit = retried(lambda: HfApi().model_info(repo_id, revision=revision), what=f"reading {repo_id}").sha
    with tempfile.TemporaryDirectory(prefix="tandem-pull-") as folder:
        snapshot = Path(folder)
        retried(lambda: snapshot_download(repo_id, revision=commit, local_dir=snapshot), what=f"downloading {repo_id}")
        target = Path(runs) / _run_name(snapshot, repo_id)
        if target.exists():
            raise CannotWriteError(
                f"{target}: the run exists, and pulling would mix two. Rename or remove it, or pull into another folder with --runs."
            )
        with new_folder(target) as restored:
            _place(snapshot, RunDirectory(restored), repo_id)
        run = RunDirectory(target)
    run.update_manifest(pulled_from={"id": repo_id, "commit": commit})
    return run


def _run_name(snapshot: Path, repo_id: str) -> str:
    missing = [
        name for name in ("run_manifest.json", "recipe.yaml", "config.json", SEAL) if not (snapshot / name).exists()
    ]
    if missing:
        raise DataError(
            f"{repo_id}: {', '.join(missing)} missing, so it is no run that was pushed with this program. "
            "A model alone needs no pull: name it where a model is asked for."
        )
    name = str(read_json(snapshot / "run_manifest.json").get("name"))
    # It becomes a folder's name here, and a stranger may have written it.
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*", name):
        raise DataError(
            f"{repo_id}: its manifest names the run {name!r}, which cannot be a folder. Take its files from the Hub by hand."
        )
    return name


def _place(snapshot: Path, run: RunDirectory, repo_id: str) -> None:
    """Move the files to where a run keeps them; what the seal does not name stays behind."""
    for name, target in (
        ("recipe.yaml", run.recipe),
        ("run_manifest.json", run.manifest),
        *((name, run.report / name) for name in ("report.md", "report.html", "curves.png")),
        ("evals.json", run.evals),
    ):
        if (snapshot / name).exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(snapshot / name, target)
    run.model.mkdir()
    for name in [*read_json(snapshot / SEAL)["files"], SEAL]:
        source, target = snapshot / name, run.model / name
        if not target.resolve().is_relative_to(run.model.resolve()):
            raise DataError(f"{repo_id}: its seal names a file outside the model ({name}). Do not use it.")
        if source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(source, target)
    if found := problems(run.model):
        raise ServiceError(
            f"{repo_id}: the files are not those that were sealed ({'; '.join(found)}). Pull again; if it stays so, the upload was damaged."
        )
