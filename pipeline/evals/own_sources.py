"""What a run read, found again from its own files."""

from typing import Any

from pipeline.artifacts.cache import cache_of_run
from pipeline.artifacts.run_directory import RunDirectory
from pipeline.artifacts.user_code import COMMAND_TRUST, CodeFolder
from pipeline.recipe import Recipe, read_recipe
from pipeline.sources.held_out import use_held_out
from pipeline.sources.open import open_sources
from pipeline.sources.revisions import use_revisions


def own_sources(run: RunDirectory, *, trust_code: bool = False) -> tuple[Recipe, tuple[list[Any], list[Any]]]:
    """The run's recipe, and its (training, validation) sources; Hub datasets at the commits, and the
    files held out, that it began with.

    trust_code: whether a format that the recipe names as module:attr is run; nobody named this recipe, and it may be somebody
    else's. Raises what the recipe and the sources raise when something is no longer there.
    """
    recipe = read_recipe([str(run.recipe)], stage=None)
    why = f"{run.recipe} belongs to a run, which may have come from elsewhere"
    folder = recipe.run.code_folder if trust_code else None
    recipe.code = CodeFolder(folder, trusted=trust_code, trust_with=COMMAND_TRUST, closed=why)
    recipe.data.cache_dir = str(cache_of_run(recipe.data.cache_dir))
    inputs = run.read_manifest().get("inputs") or {}
    use_revisions(recipe, inputs)
    use_held_out(recipe, inputs)
    return recipe, open_sources(recipe, kind="chat" if recipe.stage == "sft" else "text")
