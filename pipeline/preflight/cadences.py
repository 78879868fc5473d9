"""What a run will lack for its length: a rate that reaches its peak, checkpoints to go on from, validation on the way."""

from pipeline.recipe import Recipe
from pipeline.recipe.checks import warmup_of

LONG_WARMUP = 0.5


def cadence_notes(recipe: Recipe, steps: int) -> list[str]:
    """Sentences on what happens too late, or never, in a run of so many steps. A warm-up longer than it is refused when the
    recipe is read."""
    train, notes = recipe.train, []
    name, warmup = warmup_of(recipe, steps)
    if warmup > LONG_WARMUP * steps:
        notes.append(
            f"{recipe.where(name)}: {warmup} of the run's {steps} steps are warm-up: the rate is at its peak for little of it, and nothing learned there tells "
            "of a longer run. Shorten the warm-up, or train longer."
        )
    if train["save_strategy"] == "no":
        notes.append(
            f"{recipe.where('train.save_strategy')}: is no: a run that stops before its end is lost. Remove it to save every train.save_steps steps."
        )
    elif train["save_steps"] >= steps:
        notes.append(
            f"{recipe.where('train.save_steps')}: is {train['save_steps']}, and the run has {steps} steps: nothing is saved before its end, and one that is "
            "killed is lost. Lower it to continue such a run."
        )
    if train["eval_strategy"] == "no":
        notes.append(
            f"{recipe.where('train.eval_strategy')}: is no: validation is scored at the end alone, and what goes wrong before is not seen. "
            "Remove it to score every train.eval_steps steps."
        )
    elif train["eval_steps"] >= steps:
        notes.append(
            f"{recipe.where('train.eval_steps')}: is {train['eval_steps']}, and the run has {steps} steps: validation is scored at the end alone. "
            "Lower it to see how the run goes."
        )
    return notes
