"""The command line of both stages: help, or a recipe that is read and trained."""

import os
import sys

from pipeline.process.errors import RecipeError
from pipeline.recipe import help_text, read_recipe
from pipeline.recipe.resolve import Stage
from pipeline.run_dir.earlier_runs import EarlierRuns
from pipeline.run_dir.failures import Signals


def run_stage(argv: list[str], *, stage: Stage) -> int:
    """Return the exit status of `accelerate launch pipeline/STAGE.py RECIPE [section.key=value ...]`."""
    if not argv:
        print(help_text(stage), file=sys.stderr)
        return RecipeError.status
    if "-h" in argv or "--help" in argv:
        print(help_text(stage))
        return 0
    signals = Signals()
    recipe = read_recipe(argv, stage=stage, earlier=EarlierRuns())
    if int(os.environ.get("RANK", 0)) == 0:
        what = "stage 1, pretraining" if stage == "pretrain" else "stage 2, chat SFT"
        print(f"{recipe.path}: {what}; importing torch and transformers, some seconds", flush=True)

    from pipeline.train import train  # It imports torch: a mistake in the recipe is reported before.

    return train(recipe, signals)
