"""The runs that a run comes from: the one whose weights it began with, and the one that it forks (run.fork_from)."""

from pathlib import Path
from typing import Any

from pipeline.process.errors import InputMissingError, RecipeError
from pipeline.recipe.resolve import differences, must_match
from pipeline.recipe.schema import Recipe
from pipeline.run_dir.checkpoints import problems, read_seal, step_of
from pipeline.run_dir.run_directory import RunDirectory, find_run

# run.fork_from: a new run from another one's state.

# A fork loads the parent's weights and optimizer state, and its step numbers count rows of this size, so many a step.
FIXED_IN_A_FORK = (
    "model.", "tokenizer.", "data.row_tokens", "data.batch_tokens", "optimizer.schedule.batch_", "optimizer.type",
    "train.optim:",
)  # fmt: skip


def can_fork(differing: list[str]) -> bool:
    """Return whether a fork could take up the state of a run that differs in these keys (lines of
    identity.differences)."""
    return not any(line.startswith(FIXED_IN_A_FORK) for line in differing)


def parent_of(recipe: Recipe) -> tuple[Path, dict[str, Any]]:
    """Return the parent's checkpoint that run.fork_from names, and what the manifest says of it: run, step and
    differing keys.

    Raises RecipeError for differences that the parent's state or its row numbers cannot follow.
    """
    name, _, step = str(recipe.run.fork_from).partition("@")
    parent = find_run(name, recipe.run.directory)
    if parent is None:
        raise InputMissingError(
            f"{recipe.path}: run.fork_from: no run {name!r}. Name a run directory or a run of {recipe.run.directory}/."
        )
    checkpoint = parent.checkpoint(int(step)) if step else parent.whole_checkpoint()
    if checkpoint is None or problems(checkpoint):
        raise InputMissingError(
            f"{recipe.path}: run.fork_from: {name} has no whole checkpoint{' at step ' + step if step else ''}."
        )
    changed = differences(parent.read_manifest()["must_match"], must_match(recipe))
    if not can_fork(changed):
        lines = "\n  ".join(line for line in changed if line.startswith(FIXED_IN_A_FORK))
        raise RecipeError(
            f"{recipe.path}: run.fork_from: a fork takes up {name}'s weights, optimizer and place in the data, and "
            f"these keys would not fit them:\n  {lines}\n"
            f"Put them back, or start a new run from its weights alone: model.start_from={name}."
        )
    at = step_of(checkpoint) or 0
    refuse_without_steps(recipe, at)
    return checkpoint, {"run": name, "step": at, "differences": changed}


def refuse_without_steps(recipe: Recipe, step: int) -> None:
    """Raises RecipeError when a fork from that step has nothing left to train; a horizon in epochs is known with the
    data."""
    horizon = recipe.train.get("max_steps")
    if horizon and horizon <= step:
        raise RecipeError(
            f"{recipe.where('run.fork_from')}: goes on from step {step}, and this run ends at step {horizon}: the "
            "parent's weights would come out unchanged. Fork from an earlier step, or train longer."
        )


# Of a run that lies here: where its parents are, by what its manifest says.


def name_of_model(folder: Path) -> str:
    """Return the run's name for <run>/model and <run>/checkpoints/checkpoint-<step>, for another folder its own."""
    steps = 2 if folder.parent.name == "checkpoints" else 1 if folder.name == "model" else 0
    return folder.parts[-1 - steps] if len(folder.parts) > steps else str(folder)


def base_run(run: Path, manifest: dict[str, Any]) -> RunDirectory | None:
    """Return the run whose model this one began with, where it still lies and its model has the recorded hash."""
    begun_with = _start_of(manifest)
    weights = _hashes(begun_with)
    if not weights:
        return None
    model = Path(begun_with["from"])
    here = run.resolve().parent
    # As it was named, or beside this run: of runs/<name>/model or runs/<name>/checkpoints/checkpoint-<step> the run.
    for candidate in (model, here / Path(*model.parts[-2:]), here / Path(*model.parts[-3:])):
        base = RunDirectory(candidate.parent.parent if candidate.parent.name == "checkpoints" else candidate.parent)
        if _has_weights(candidate, weights) and base.manifest.exists():
            return base
    return None


def forked_run(run: Path, manifest: dict[str, Any]) -> RunDirectory | None:
    """Return the run that this one forks (run.fork_from), where it still lies: as it was named, or beside this run."""
    if not (name := (manifest.get("forked_from") or {}).get("run")):
        return None
    paths = (Path(name), run.resolve().parent / Path(name).name)
    return next((RunDirectory(path) for path in paths if RunDirectory(path).manifest.exists()), None)


def parents_of(run: RunDirectory) -> tuple[list[RunDirectory], list[str]]:
    """(runs, names): those it comes from directly that lie here, and the names of the runs and models that do not."""
    manifest = run.read_manifest()
    begun_with, fork = _start_of(manifest), (manifest.get("forked_from") or {}).get("run")
    found, absent = [], []
    if start := begun_with.get("from"):
        base = base_run(run.path, manifest)
        found += [base] if base else []
        # Of a folder the weights' hashes are recorded, of a Hub id the commit.
        absent += [] if base else [name_of_model(Path(start)) if _hashes(begun_with) else start]
    if fork:
        parent = forked_run(run.path, manifest)
        found += [parent] if parent else []
        absent += [] if parent else [Path(fork).name]
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
