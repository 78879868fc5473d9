"""The horizon against the data: how often the run will see them, and a warm-up that fits a run given in epochs."""

from typing import Any

from pipeline.recipe import Recipe
from pipeline.recipe.checks import check_warmup
from pipeline.recipe.problems import Problems
from pipeline.recipe.schema import Schedule
from pipeline.sources.text_bytes import text_bytes

MANY_EPOCHS = 4.0  # Up to about four, repeated text teaches nearly as much as new text (Muennighoff et al. 2023).


def settle_warmup(recipe: Recipe) -> None:
    """Apply to a horizon in epochs, now that it is known in steps, what a horizon in steps was read with.

    The default warm-up is at most a fifth of the run. Raises RecipeError for one that was given and is longer than it.
    """
    schedule, steps = recipe.optimizer.schedule, recipe.train["max_steps"]
    # Compared, not looked up among the given keys: the saved recipe of a run gives every key.
    if recipe.optimizer.type != "trainer" and schedule.warmup_steps == Schedule().warmup_steps:
        schedule.warmup_steps = min(schedule.warmup_steps, steps // 5)
    problems = Problems()
    check_warmup(recipe, problems)
    problems.raise_if_any()


def horizon_lines(recipe: Recipe, rows: Any, sources: list) -> list[str]:
    """Steps and tokens of the run, and of each source the epochs planned, as far as its length can be known or estimated."""
    steps = recipe.train["max_steps"]
    lines = [f"horizon: {steps:,} steps of {recipe.data.batch_tokens or 0:,} tokens"]
    for (source, share), opened, sequence in zip(rows.shares().items(), sources, rows.stream.sequences, strict=True):
        epochs, about = share.get("epochs"), ""
        if epochs is None:
            epochs, about = _estimate(share["rows"], opened, sequence), "about "
        if epochs is None:
            lines.append(f"  {source}: epochs not known before all of it is prepared")
            continue
        lines.append(f"  {source}: {about}{epochs:.2f} epochs")
        if epochs > MANY_EPOCHS:
            lines.append(
                f"note: {source} is repeated more than {MANY_EPOCHS:.0f} times, from where on repeated text teaches little. Add text, or train shorter."
            )
    return lines


def _estimate(planned: int, source: Any, sequence: Any) -> float | None:
    """Epochs by the bytes of text a row has held so far; None when the size of the text is not known."""
    whole, totals = text_bytes(source), sequence.totals()
    read = totals.get("text_bytes")
    if not whole or not read or not totals["rows"]:
        return None
    return planned / (totals["rows"] * whole / read)
