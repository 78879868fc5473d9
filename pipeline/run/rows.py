"""The rows of a run: one process of the run prepares them, the others attach."""

from typing import Any

from pipeline.data.preparation import Preparation, start_preparation
from pipeline.data.rows import TrainingRows, ValidationRows
from pipeline.process.commands import command
from pipeline.process.storage import cache_dir
from pipeline.recipe import Recipe
from pipeline.recipe.schema import with_values
from pipeline.run.checks import benchmarks_of, cadence_notes
from pipeline.run.horizon import horizon_lines, resolve_warmup
from pipeline.run.open_run import OpenRun
from pipeline.training.distributed import on_rank_0


def open_rows(
    recipe: Recipe, tokenizer: Any, sources: tuple[list, list], run: OpenRun
) -> tuple[Recipe, TrainingRows, ValidationRows]:
    """Return the recipe with its number of steps, and training and validation rows, when the first step's rows are
    sealed, while the rest is prepared ahead.

    run: rows before the step that it goes on from need not be kept.
    """
    started: list[Preparation] = []

    def start() -> dict:
        benchmarks, cache = benchmarks_of(recipe), cache_dir(recipe.data.cache_dir)
        watchlist = None
        if benchmarks:
            from pipeline.contrib.contaminated_items import save_watchlist

            watchlist = save_watchlist(benchmarks, cache=cache)
        here = run.directory.path
        started.append(start_preparation(recipe, tokenizer, sources=sources, watchlist=watchlist, run=here))
        for line in unchecked_lines(started[0].plan, run):
            print(line, flush=True)
        return started[0].description()

    description = on_rank_0(start)
    preparation = started[0] if started else Preparation.attach(description)
    rows = TrainingRows.open(preparation=preparation)
    in_epochs = "max_steps" not in recipe.train
    recipe = with_values(recipe, {"train.max_steps": rows.total_steps()})
    if in_epochs:
        recipe = resolve_warmup(recipe)
    if run.forks:
        from pipeline.recipe.parents import refuse_without_steps

        refuse_without_steps(recipe, run.step)
    validation = ValidationRows.open(preparation)

    def print_notes() -> None:
        from pipeline.data.losses import padding_notes, warning_lines

        notes = [f"note: {note}" for note in cadence_notes(recipe, recipe.train["max_steps"])]
        if recipe.data.one_text_rows:
            notes += padding_notes(rows.plan, rows.shares())
        warnings = warning_lines(
            recipe, rows, validation, sources=sources[0], tokenizer=tokenizer, has_begun=run.step > 0
        )
        print(*horizon_lines(recipe, rows.shares()), *notes, *warnings, sep="\n", flush=True)

    on_rank_0(print_notes)
    return recipe, rows, validation


def unchecked_lines(plan: dict, run: OpenRun) -> list[str]:
    """Return how much of the training text was prepared before anybody looked for the benchmarks' items in it, and
    what to do."""
    if not plan["watchlist"]:
        return []
    from pipeline.contrib.contaminated_items import unchecked_text

    unchecked, shards = unchecked_text(plan)
    if not unchecked:
        return []
    return [
        f"contamination: nobody looked for the evaluation items in {unchecked:,} of {shards:,} shards, as they were "
        "prepared before. To look, while this run trains: "
        f"{command('data', run.directory.recipe, '--watchlist', plan['watchlist'])}"
    ]
