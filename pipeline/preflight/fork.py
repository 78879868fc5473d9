"""run.fork_from: a new run from another one's state."""

from pathlib import Path
from typing import Any

from pipeline.artifacts.checkpoints import problems, step_of
from pipeline.artifacts.errors import InputMissingError, RecipeError
from pipeline.artifacts.run_directory import find_run
from pipeline.recipe import Recipe
from pipeline.recipe.identity import differences, must_match

# A fork loads the parent's weights and optimizer state, and its step numbers count rows of this size.
FIXED_IN_A_FORK = ("model.", "tokenizer.", "data.row_tokens", "data.batch_tokens", "optimizer.type", "train.optim:")


def can_fork(differing: list[str]) -> bool:
    """Whether a fork could take up the state of a run that differs in these keys (lines of identity.differences)."""
    return not any(line.startswith(FIXED_IN_A_FORK) for line in differing)


def parent_of(recipe: Recipe) -> tuple[Path, dict[str, Any]]:
    """The parent's checkpoint that run.fork_from names, and what the manifest says of it: run, step and differing keys.

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
            f"{recipe.path}: run.fork_from: a fork takes up {name}'s weights, optimizer and place in the data, and these keys would not fit them:\n  {lines}\n"
            f"Put them back, or start a new run from its weights alone: model.start_from={name}."
        )
    at = step_of(checkpoint) or 0
    refuse_without_steps(recipe, at)
    return checkpoint, {"run": name, "step": at, "differences": changed}


def refuse_without_steps(recipe: Recipe, step: int) -> None:
    """Raises RecipeError when a fork from that step has nothing left to train; a horizon in epochs is known with the data."""
    horizon = recipe.train.get("max_steps")
    if horizon and horizon <= step:
        raise RecipeError(
            f"{recipe.where('run.fork_from')}: goes on from step {step}, and this run ends at step {horizon}: the parent's weights would come out "
            "unchanged. Fork from an earlier step, or train longer."
        )
