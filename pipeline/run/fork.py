"""run.fork_from: a new run from another run's whole training state."""

from pathlib import Path
from typing import Any

from pipeline.process.errors import InputMissingError, RecipeError
from pipeline.recipe.identity import differences
from pipeline.recipe.schema import Run
from pipeline.run_dir.checkpoints import problems, step_of
from pipeline.run_dir.run_directory import find_run

# A fork loads the parent's weights and optimizer state, and its step numbers count rows of this size, so many a step.
FIXED_IN_A_FORK = (
    "model.", "tokenizer.", "data.row_tokens", "data.batch_tokens", "optimizer.schedule.batch_", "optimizer.type",
    "train.optim:",
)  # fmt: skip


def can_fork(differing: list[str]) -> bool:
    """Return whether a fork could take up the state of a run that differs in these keys (lines of
    recipe.identity.differences)."""
    return not any(line.startswith(FIXED_IN_A_FORK) for line in differing)


def parent_of(run: Run, keys: dict[str, Any], *, max_steps: int | None, where: str) -> tuple[Path, dict[str, Any]]:
    """Return the parent's checkpoint that run.fork_from names, and what the manifest says of it: run, step and
    differing keys.

    keys: the fork's own that must match. max_steps: None for a horizon in epochs. where: begins a message. Raises
    RecipeError for differences that the parent's state or its row numbers cannot follow.
    """
    name, _, step = str(run.fork_from).partition("@")
    parent = find_run(name, run.directory)
    if parent is None:
        raise InputMissingError(f"{where}: no run {name!r}. Name a run directory or a run of {run.directory}/.")
    checkpoint = parent.checkpoint(int(step)) if step else parent.whole_checkpoint()
    if checkpoint is None or problems(checkpoint):
        at_step = f" at step {step}" if step else ""
        raise InputMissingError(f"{where}: {name} has no whole checkpoint{at_step}.")
    changed = differences(parent.read_manifest()["must_match"], keys)
    if not can_fork(changed):
        lines = "\n  ".join(line for line in changed if line.startswith(FIXED_IN_A_FORK))
        raise RecipeError(
            f"{where}: a fork takes up {name}'s weights, optimizer and place in the data, and these keys would not "
            f"fit them:\n  {lines}\n"
            f"Put them back, or start a new run from its weights alone: model.start_from={name}."
        )
    first_step = step_of(checkpoint) or 0
    refuse_without_steps(first_step, max_steps, where=where)
    return checkpoint, {"run": name, "step": first_step, "differences": changed}


def refuse_without_steps(step: int, max_steps: int | None, *, where: str) -> None:
    """Raise RecipeError when a fork from that step has nothing left to train; a horizon in epochs is known with the
    data."""
    if max_steps and max_steps <= step:
        raise RecipeError(
            f"{where}: begins at step {step}, and this run ends at step {max_steps}: the parent's weights would come "
            "out unchanged. Fork from an earlier step, or train longer."
        )
