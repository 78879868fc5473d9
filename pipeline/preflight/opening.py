"""Opening a run: which directory, whether it may go on, from which checkpoint, and what the manifest says of it."""

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.artifacts.atomic import write_text
from pipeline.artifacts.checkpoints import problems, step_of
from pipeline.artifacts.errors import CannotWriteError, DataError, InputMissingError, RecipeError
from pipeline.artifacts.failures import record_failures_in
from pipeline.artifacts.rows import append_row, last_attempts, read_rows
from pipeline.artifacts.run_directory import RunDirectory, find_run
from pipeline.recipe import Recipe, dump_recipe
from pipeline.recipe.identity import differences, must_match
from pipeline.training.agreement import on_rank_0

VERSIONS = (
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "tokenizers",
    "safetensors",
    "huggingface_hub",
    "numpy",
    "pyarrow",
)


@dataclass
class OpenRun:
    """A run that may train: its directory, the checkpoint to go on from, and the number of this attempt.

    The lock stays with rank 0's process for as long as it lives.
    """

    directory: RunDirectory
    checkpoint: Path | None
    attempt: int
    finished: bool

    @property
    def step(self) -> int:
        return (step_of(self.checkpoint) or 0) if self.checkpoint else 0


def open_run(recipe: Recipe) -> OpenRun:
    """Find or create the run directory and decide, on rank 0 for all ranks, what this start does.

    Raises RecipeError with the differences when the directory holds another run, CannotWriteError when it is in use.
    """
    run = on_rank_0(lambda: _open(recipe))
    if not run.finished:
        record_failures_in(run.directory)
    return run


def _open(recipe: Recipe) -> OpenRun:
    directory = RunDirectory(Path(recipe.run.directory) / str(recipe.run.name))
    manifest = directory.read_manifest()
    if "must_match" in manifest:  # else the first start was cut off before it had described the run
        _refuse_another_run(recipe, directory, manifest)
        if "finished" in manifest:
            print(
                f"{directory.path}: the run has finished; its model is in {directory.model}. For another run change the recipe or run.name."
            )
            return OpenRun(directory, None, manifest["attempts"], True)
    directory.hold()
    record_failures_in(directory)
    directory.failure.unlink(missing_ok=True)
    checkpoint = _choose_checkpoint(recipe, directory)
    attempt = manifest.get("attempts", 0) + 1
    if "must_match" not in manifest:
        write_text(directory.recipe, dump_recipe(recipe))
        directory.update_manifest(
            name=recipe.run.name,
            recipe_name=Path(recipe.path or "recipe").stem,
            stage=recipe.stage,
            note=recipe.run.note,
            tags=recipe.run.tags,
            created=_now(),
            must_match=must_match(recipe),
        )
    directory.update_manifest(attempts=attempt, status="running", command=sys.argv, **environment())
    step = (step_of(checkpoint) or 0) if checkpoint else 0
    append_row(
        directory.metrics,
        {"event": "attempt", "attempt": attempt, "step": step, "time": datetime.datetime.now().timestamp()},
    )
    if checkpoint:
        print(f"run {directory.path}: going on from {checkpoint.name} (attempt {attempt})", flush=True)
    else:
        print(f"run {directory.path}: starting", flush=True)
    return OpenRun(directory, checkpoint, attempt, False)


def _refuse_another_run(recipe: Recipe, directory: RunDirectory, manifest: dict[str, Any]) -> None:
    if recipe.run.resume == "never":
        raise CannotWriteError(
            f"{directory.path}: run.resume is never and the run exists. Give another run.name, or remove the folder."
        )
    found = differences(manifest["must_match"], must_match(recipe))
    if found:
        lines = "\n  ".join(found)
        raise RecipeError(
            f"{recipe.path}: {directory.path} holds a run whose recipe differs in keys that cannot change, and going on would mix two runs:\n  {lines}\n"
            f"Give this one another run.name, or set run.fork_from: {directory.name} to start a new run from that one's state."
        )


def _choose_checkpoint(recipe: Recipe, directory: RunDirectory) -> Path | None:
    if isinstance(recipe.run.resume, int):
        wanted = directory.checkpoint(recipe.run.resume)
        if not wanted.is_dir():
            raise InputMissingError(
                f"{wanted}: run.resume names this checkpoint and it does not exist. Use run.resume: auto for the newest."
            )
        if found := problems(wanted):
            raise DataError(
                f"{wanted}: the checkpoint is damaged ({'; '.join(found)}). Use run.resume: auto for the newest whole one."
            )
        for note in directory.set_aside_after(recipe.run.resume):
            print(note, file=sys.stderr, flush=True)
        return wanted
    checkpoint, notes = directory.newest_checkpoint()
    for note in notes:
        print(note, file=sys.stderr, flush=True)
    if checkpoint is None and recipe.run.fork_from:
        return _fork(recipe, directory)
    return checkpoint


def _fork(recipe: Recipe, directory: RunDirectory) -> Path:
    """The parent's checkpoint that run.fork_from names; parent and differing keys go to the manifest."""
    name, _, step = str(recipe.run.fork_from).partition("@")
    parent = find_run(name, recipe.run.directory)
    if parent is None:
        raise InputMissingError(
            f"{recipe.path}: run.fork_from: no run {name!r}. Name a run directory or a run of {recipe.run.directory}/."
        )
    checkpoint = parent.checkpoint(int(step)) if step else parent.newest_checkpoint()[0]
    if checkpoint is None or problems(checkpoint):
        raise InputMissingError(
            f"{recipe.path}: run.fork_from: {name} has no whole checkpoint{' at step ' + step if step else ''}."
        )
    changed = differences(parent.read_manifest()["must_match"], must_match(recipe))
    directory.path.mkdir(parents=True, exist_ok=True)
    directory.update_manifest(forked_from={"run": name, "step": step_of(checkpoint), "differences": changed})
    return checkpoint


def evaluation_is_due(recipe: Recipe, run: OpenRun) -> bool:
    """Whether the first thing to do is an evaluation: at step 0 when asked, or one that a checkpoint's step still owes."""
    if run.step == 0:
        return recipe.evals.bpb.at_start
    train = recipe.train
    on_cadence = train["eval_strategy"] == "steps" and run.step % train["eval_steps"] == 0
    if run.step != train["max_steps"] and not (on_cadence and run.step >= train["eval_delay"]):
        return False
    recorded = (r for r in last_attempts(read_rows(run.directory.metrics)) if r.get("step") == run.step)
    return not any(name.startswith(("val/", "sft/")) for row in recorded for name in row)


def environment() -> dict[str, Any]:
    """Versions, code and machine, for the manifest."""
    versions = {}
    for name in VERSIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "versions": {"python": platform.python_version(), **versions},
        "git": _git_state(),
        "host": {"system": platform.platform(), "cpus": os.cpu_count()},
        "world_size": int(os.environ.get("WORLD_SIZE", 1)),
    }


def _git_state() -> dict[str, Any] | None:
    root = Path(__file__).parents[2]
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, timeout=10)
        changed = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (
        {"commit": commit.stdout.strip(), "changed_files": len(changed.stdout.splitlines())}
        if commit.returncode == 0
        else None
    )


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
