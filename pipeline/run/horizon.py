"""The horizon of a run against its data: how often the data are read, and a warm-up that fits a run given in epochs."""

from typing import Any

from pipeline.process.progress import short_count
from pipeline.recipe import Recipe
from pipeline.recipe.located_yaml import Problems
from pipeline.recipe.reader import check_warmup
from pipeline.recipe.resolve import step_rows, tokens_at
from pipeline.recipe.schema import Schedule, with_values

MANY_EPOCHS = 4.0  # Up to about four, repeated text teaches nearly as much as new text (Muennighoff et al. 2023).


def resolve_warmup(recipe: Recipe) -> Recipe:
    """Return the recipe with what a horizon in steps is read with, where it is one in epochs and known in steps by
    now.

    The default warm-up is at most a fifth of the run. Raises RecipeError for one that was given and is longer than it.
    """
    schedule, steps = recipe.optimizer.schedule, recipe.train["max_steps"]
    # Compared, not looked up among the given keys: the saved recipe of a run gives every key.
    if recipe.optimizer.type != "trainer" and schedule.warmup_steps == Schedule().warmup_steps:
        recipe = with_values(recipe, {"optimizer.schedule.warmup_steps": min(schedule.warmup_steps, steps // 5)})
    problems = Problems()
    check_warmup(recipe, problems)
    problems.raise_if_any()
    return recipe


def horizon_lines(recipe: Recipe, shares: dict[str, dict[str, Any]]) -> list[str]:
    """Return steps and tokens of the run, and how often each source is read, as far as its length is known.

    shares: facts of each source by its name, as TrainingRows.shares gives them.
    """
    steps = recipe.train["max_steps"]
    tokens, warmup = recipe.data.batch_tokens or 0, step_rows(recipe).warmup_steps
    fewer = f" (fewer in the first {warmup:,})" if warmup else ""
    lines = [f"training: {steps:,} steps of {tokens:,} tokens{fewer}, {short_count(tokens_at(recipe, steps))} in all"]
    for source, share in shares.items():
        epochs = share.get("epochs")
        if epochs is None:
            lines.append(f"  {source}: how often it is read (epochs) is not known before all of it is prepared")
            continue
        lines.append(f"  {source}: read {epochs:.2f} times (epochs)")
        if epochs > MANY_EPOCHS:
            lines.append(
                f"note: {source} is repeated more than {MANY_EPOCHS:.0f} times, from where on repeated text teaches "
                "little. Add text, or train shorter."
            )
    return lines
