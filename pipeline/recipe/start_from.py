"""model.start_from as a folder: resolved once, before anything of the run is written."""

from pathlib import Path

from pipeline.artifacts.checkpoints import by_step, problems
from pipeline.artifacts.errors import InputMissingError
from pipeline.artifacts.run_directory import RunDirectory, find_run, latest_run
from pipeline.recipe.identity import default_name
from pipeline.recipe.schema import Recipe


def resolve_start(recipe: Recipe) -> None:
    """Replace model.start_from by the folder it means now, and take the tokenizer from there unless one is named.

    A run gives its model/ folder, or its newest whole checkpoint when it has not finished; `latest:<recipe>` the last
    finished run of that recipe. A run that has begun keeps the folder it began from. Where the recipe gives no run.name,
    the name tells two meanings of `latest:` apart. Raises InputMissingError; a Hub id is left as it is.
    """
    start = recipe.model.start_from
    if start is None:
        return
    folder = _folder(recipe, start)
    if folder is not None:
        recipe.model.start_from = str(folder)
        if start.startswith("latest:") and "run.name" not in recipe.places:
            recipe.run.name = default_name(recipe)
    recipe.tokenizer.path = recipe.tokenizer.path or recipe.model.start_from


def begun_run(recipe: Recipe) -> dict:
    """What the recipe's run was begun with, by dotted key; empty when it has not begun."""
    return RunDirectory(Path(recipe.run.directory) / str(recipe.run.name)).read_manifest().get("must_match", {})


def _folder(recipe: Recipe, start: str) -> Path | None:
    """The folder of model.start_from, or None when it is on the Hub."""
    begun = begun_run(recipe).get("model.start_from")
    if start.startswith("latest:"):
        name = start.removeprefix("latest:")
        if begun and _is_of_recipe(Path(begun), name):
            return Path(begun)
        run = latest_run(name, recipe.run.directory)
        if run is None:
            raise InputMissingError(
                f"{recipe.path}: model.start_from: no finished run of recipe {name!r} in {recipe.run.directory}/. "
                f"Train it first: bash run_pretrain.sh recipes/{name}.yaml"
            )
        return run.model
    if (run := find_run(start, recipe.run.directory)) is not None:
        if begun and Path(begun).is_dir() and Path(begun).resolve().is_relative_to(run.path.resolve()):
            return Path(begun)
        if run.model.is_dir():
            return run.model
        # Read only: that run may be training, and it alone sets its damaged checkpoints aside.
        whole = (folder for folder in reversed(by_step(run.checkpoints)) if not problems(folder))
        if (newest := next(whole, None)) is None:
            raise InputMissingError(
                f"{recipe.path}: model.start_from: run {start} has neither model/ nor a whole checkpoint yet. Let it train first."
            )
        return newest
    return Path(start) if Path(start).is_dir() else None


def _is_of_recipe(model: Path, name: str) -> bool:
    return model.is_dir() and RunDirectory(model.parent).read_manifest().get("recipe_name") == name
