"""The opening of a run: its directory, whether it may continue, and the checkpoint that it continues from (its own, or
by run.fork_from another run's)."""

import importlib.metadata
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from pipeline.hardware.processor import process_start
from pipeline.process.errors import (
    CannotWriteError,
    DamagedFileError,
    DataError,
    InputMissingError,
    RecipeError,
)
from pipeline.process.secrets import redacted
from pipeline.process.storage import remove_file, write_text
from pipeline.recipe import Recipe, dump_recipe, read_recipe
from pipeline.recipe.identity import differences, resume_keys
from pipeline.recipe.located_yaml import load_mapping
from pipeline.run.fork import can_fork, parent_of
from pipeline.run_dir.checkpoints import by_step, clean, newest_whole, problems, step_of
from pipeline.run_dir.failures import record_failures_in
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.training.distributed import on_rank_0
from pipeline.training.log_row import has_evaluation

VERSIONS = (
    "torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors", "huggingface_hub", "numpy",
    "pyarrow",
)  # fmt: skip


@dataclass
class OpenRun:
    """A run that may train: its directory, the checkpoint to continue from, and the number of this attempt.

    The lock stays with rank 0's process for as long as it lives.
    """

    directory: RunDirectory
    checkpoint: Path | None
    attempt: int
    finished: bool

    @property
    def step(self) -> int:
        return (step_of(self.checkpoint) or 0) if self.checkpoint else 0

    @property
    def forks(self) -> bool:
        """Return whether it continues from its parent's checkpoint: later it has its own."""
        return self.checkpoint is not None and self.checkpoint.parent != self.directory.checkpoints


def restore_run(recipe: Recipe) -> Recipe:
    """Fetch a run and its base that are not here from the Hub or the mirror, on rank 0 for all ranks.

    What this start takes from an earlier one is resolved after it. Return the recipe, read again where its base came:
    sizes and tokenizer are the base's.
    """
    directory = RunDirectory.of(recipe.run)

    def restore() -> bool:
        if recipe.hub.strategy == "checkpoint" and recipe.run.resume == "auto":
            from pipeline.hub.pull import restore_from_hub

            restore_from_hub(recipe.hub, directory)
        if recipe.run.mirror:
            from pipeline.contrib.mirror import restore_base, restore_from_mirror

            where = recipe.where("run.mirror")
            restore_from_mirror(recipe.run.mirror, directory, resume=recipe.run.resume, where=where)
            return restore_base(recipe.run.mirror, directory, start=recipe.model.start_from, where=where)
        return False

    if on_rank_0(restore):
        return read_recipe(recipe.arguments, stage=recipe.stage, earlier=recipe.earlier)
    return recipe


def open_run(recipe: Recipe) -> OpenRun:
    """Find or create the run directory and decide, on rank 0 for all ranks, what this start does.

    Raises RecipeError with the differences when the directory holds another run, CannotWriteError when it is in use.
    """
    run = on_rank_0(lambda: _open(recipe))
    if not run.finished:
        record_failures_in(run.directory)
    return run


def _open(recipe: Recipe) -> OpenRun:
    directory = RunDirectory.of(recipe.run)
    manifest = directory.read_manifest()
    if not manifest and directory.has_trained():
        raise DataError(
            f"{directory.manifest}: is missing, and the folder holds a run that has trained, so going on could mix "
            "two runs. Put the file back from a copy, or give this run another run.name."
        )
    # 1. Another recipe in the same folder is refused before anything is touched.
    begun = "must_match" in manifest and directory.has_trained()
    if begun or "finished" in manifest:
        _refuse_another_run(recipe, directory, manifest)
    if "finished" in manifest:
        if _back_to(recipe, directory) is not None:
            raise RecipeError(
                f"{recipe.where('run.resume')}: {directory.path} has finished, and its results stay. To go another "
                f"way from step {recipe.run.resume}, start a new run with "
                f"run.fork_from={directory.name}@{recipe.run.resume}."
            )
        clean(directory.checkpoints)  # what a rotation could not remove; nobody writes there any more
        print(
            f"{directory.path}: the run has finished; its model is in {directory.model}. For another run change the "
            "recipe or run.name."
        )
        return OpenRun(directory, None, manifest["attempts"], finished=True)
    # 2. The parent of a fork, while a mistake in it still costs nothing.
    forks = recipe.run.fork_from is not None
    find_parent = partial(
        parent_of,
        recipe.run,
        resume_keys(recipe),
        max_steps=recipe.train.get("max_steps"),
        where=recipe.where("run.fork_from"),
    )
    parent = None
    if forks and not by_step(directory.checkpoints):
        parent = find_parent()
    # 3. From here on this process alone writes the folder.
    directory.hold()
    record_failures_in(directory)
    remove_file(directory.failure)
    checkpoint = _choose_checkpoint(recipe, directory)
    if checkpoint is None and forks:
        checkpoint, facts = parent or find_parent()  # again when its own were damaged, every one
        directory.update_manifest(forked_from=facts)
    return _record_attempt(recipe, directory, manifest, checkpoint, begun=begun)


def _record_attempt(
    recipe: Recipe, directory: RunDirectory, manifest: dict[str, Any], checkpoint: Path | None, *, begun: bool
) -> OpenRun:
    """Write down what this start runs with: the recipe as it is now, and what an earlier start had otherwise."""
    text, attempt = dump_recipe(recipe), manifest.get("attempts", 0) + 1
    changed = _recipe_changes(directory, text)
    write_text(directory.recipe, text)
    directory.update_manifest(
        name=recipe.run.name,
        recipe_name=_recipe_name(recipe, directory, manifest),
        stage=recipe.stage,
        note=recipe.run.note,
        tags=recipe.run.tags,
        created=manifest.get("created", datetime.now(UTC).isoformat(timespec="seconds")),
        must_match=manifest["must_match"] if begun else resume_keys(recipe),
        attempts=attempt,
        status="running",
        command=[redacted(argument) for argument in sys.argv],
        versions=versions(),
        git=_git_state(),
        host={"system": platform.platform(), "cpus": os.cpu_count()},
        world_size=int(os.environ.get("WORLD_SIZE", 1)),
    )
    directory.keep_in_place()
    run = OpenRun(directory, checkpoint, attempt, finished=False)
    facts: dict[str, Any] = {"began": process_start()}
    if changed:
        facts["changed"] = changed
    directory.add_event("attempt", step=run.step, attempt=attempt, **facts)
    going_on = "starting"
    if checkpoint:
        going_on = f"going on from {checkpoint.name} (attempt {attempt})"
    print(f"run {directory.path}: {going_on}", flush=True)
    for line in changed:
        print(f"  changed: {line}", flush=True)
    return run


def _recipe_name(recipe: Recipe, directory: RunDirectory, manifest: dict[str, Any]) -> str:
    """Return the stem of the recipe's file; of the run's own recipe.yaml that of the file it was made from."""
    path = Path(recipe.path or "recipe")
    own = path.resolve() == directory.recipe.resolve()
    return manifest["recipe_name"] if own and "recipe_name" in manifest else path.stem


def _recipe_changes(directory: RunDirectory, text: str) -> list[str]:
    if not directory.recipe.is_file():
        return []
    try:
        before = dotted(load_mapping(directory.recipe))
    except DamagedFileError:
        return [f"{directory.recipe} could not be read, so what differs from the last start is not known"]
    return differences(before, dotted(yaml.safe_load(text)))


def dotted(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested sections as dotted keys."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            found |= dotted(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def _refuse_another_run(recipe: Recipe, directory: RunDirectory, manifest: dict[str, Any]) -> None:
    if recipe.run.resume == "never" and ("finished" in manifest or not _has_lost_all(directory)):
        raise CannotWriteError(
            f"{directory.path}: run.resume is never and the run exists. Give another run.name, or remove the folder."
        )
    # Data may move to another folder: what was read of them counts from the first checkpoint on.
    saved, now = manifest["must_match"], resume_keys(recipe)
    if "finished" not in manifest and "inputs" in manifest and by_step(directory.checkpoints):
        saved, now = _without_places(saved), _without_places(now)  # run/inputs.py compares the files by their hashes
    found = differences(saved, now)
    if found:
        lines = "\n  ".join(found)
        with_state = ""
        if can_fork(found):
            with_state = f", and with it run.fork_from={directory.name} to start from that one's state"
        raise RecipeError(
            f"{recipe.path}: {directory.path} holds a run whose recipe differs in keys that cannot change, and going "
            f"on would mix two runs:\n  {lines}\n"
            f"Give this one another run.name{with_state}."
        )


def _without_places(keys: dict[str, Any]) -> dict[str, Any]:
    """Return the keys that must match without the paths of data on this machine."""
    kept = dict(keys)
    for name in ("data.sources", "data.validation"):
        sources = keys.get(name) or []
        kept[name] = [source if source.get("id") else {**source, "files": None} for source in sources]
    return kept


def _has_lost_all(directory: RunDirectory) -> bool:
    """Return whether checkpoints were saved here and none of them is whole any more."""
    return directory.has_saved() and directory.whole_checkpoint() is None


def _back_to(recipe: Recipe, directory: RunDirectory) -> int | None:
    """Return the step that run.resume names, if it is for this start: the same command again continues from where the
    last one came to."""
    step = recipe.run.resume
    if not isinstance(step, int):
        return None
    again = directory.recipe.is_file() and not _recipe_changes(directory, dump_recipe(recipe))
    return None if again else step


def _choose_checkpoint(recipe: Recipe, directory: RunDirectory) -> Path | None:
    back_to = _back_to(recipe, directory)
    if back_to is not None:
        wanted = directory.checkpoint(back_to)
        if not wanted.is_dir():
            raise InputMissingError(
                f"{wanted}: run.resume names this checkpoint and it does not exist. Use run.resume: auto for the "
                "newest."
            )
        if found := problems(wanted):
            raise DataError(
                f"{wanted}: the checkpoint is damaged ({'; '.join(found)}). Use run.resume: auto for the newest whole "
                "one."
            )
        _print_notes(directory.set_aside_after(back_to))
        return wanted
    checkpoint, notes = newest_whole(directory.checkpoints, directory.quarantine)
    _print_notes(notes)
    step = (step_of(checkpoint) or 0) if checkpoint else 0
    if checkpoint is None and directory.has_saved():
        if recipe.run.resume != "never":
            raise _all_checkpoints_lost(directory)
        directory.start_anew()
    if isinstance(recipe.run.resume, int) and step > recipe.run.resume:
        print(
            f"{directory.path}: the last start went back to step {recipe.run.resume} already; this one goes on from "
            "what it saved. To go back once more, start with another key changed, or move the later checkpoints away.",
            flush=True,
        )
    _print_notes(directory.set_aside_after(step))  # a model of a lost checkpoint
    return checkpoint


def _all_checkpoints_lost(directory: RunDirectory) -> DataError:
    """Return the error of a run that has trained and cannot continue: only the user may throw that away."""
    aside = sorted(path.name for path in directory.quarantine.glob("*"))
    lies = f"{directory.quarantine} is empty"
    if aside:
        lies = f"{directory.quarantine} holds {', '.join(aside)}"
    model = directory.newest_whole_model()
    rest = "no whole model is left"
    if model:
        rest = f"the newest whole model is {model} (model.start_from takes it)"
    return DataError(
        f"{directory.path}: the run has trained and no checkpoint of it is whole, so it cannot go on where it was; "
        f"{lies}; {rest}. Put a whole checkpoint back into checkpoints/, or start anew at step 0 with "
        "run.resume=never."
    )


def _print_notes(notes: list[str]) -> None:
    for note in notes:
        print(note, file=sys.stderr, flush=True)


def evaluation_is_due(run: OpenRun, train: dict[str, Any], *, at_start: bool) -> bool:
    """Return whether the first thing to do is an evaluation: at step 0 with at_start (evals.bpb.at_start), or one that
    a checkpoint's step still owes."""
    if run.step == 0:
        return at_start
    on_cadence = train["eval_strategy"] == "steps" and run.step % train["eval_steps"] == 0
    is_due = on_cadence and run.step >= train["eval_delay"]
    if run.step != train["max_steps"] and not is_due:
        return False
    return not has_evaluation(run.directory, run.step)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a run's numbers follow from."""
    found = {"python": platform.python_version()}
    for name in VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _git_state() -> dict[str, Any] | None:
    # The state of this program's code, not of the user's folder.
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():  # installed: a repository around it is somebody else's
        return None
    try:
        commit, changed = (
            subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, timeout=10)
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain"))
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if commit.returncode:
        return None
    return {"commit": commit.stdout.strip(), "changed_files": len(changed.stdout.splitlines())}
