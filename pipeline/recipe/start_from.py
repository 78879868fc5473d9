"""model.start_from as a folder: resolved once, before anything is named after it."""

from pathlib import Path

from pipeline.artifacts.errors import InputMissingError
from pipeline.artifacts.run_directory import find_run, latest_run
from pipeline.recipe.schema import Recipe


def resolve_start(recipe: Recipe) -> None:
    """Replace model.start_from by the folder it means now, and take the tokenizer from there unless one is named.

    A run gives its model/ folder, or its newest whole checkpoint when it has not finished; `latest:<recipe>` the last
    finished run of that recipe. Raises InputMissingError; a Hub id is left as it is.
    """
    start = recipe.model.start_from
    folder: Path | None
    if start is None:
        return
    if start.startswith("latest:"):
        name = start.removeprefix("latest:")
        run = latest_run(name, recipe.run.directory)
        if run is None:
            raise InputMissingError(
                f"{recipe.path}: model.start_from: no finished run of recipe {name!r} in {recipe.run.directory}/. "
                f"Train it first: bash run_pretrain.sh recipes/{name}.yaml"
            )
        folder = run.model
    elif (run := find_run(start, recipe.run.directory)) is not None:
        folder = run.model if run.model.is_dir() else run.newest_checkpoint()[0]
        if folder is None:
            raise InputMissingError(
                f"{recipe.path}: model.start_from: run {start} has neither model/ nor a whole checkpoint yet. Let it train first."
            )
    elif Path(start).is_dir():
        folder = Path(start)
    else:
        recipe.tokenizer.path = recipe.tokenizer.path or start
        return
    recipe.model.start_from = str(folder)
    recipe.tokenizer.path = recipe.tokenizer.path or str(folder)
