"""Rows for this run: one process of the run prepares, the others attach."""

from typing import Any

from pipeline.artifacts.cache import cache_dir
from pipeline.data.contamination import Seen
from pipeline.data.prepare import Preparation, start_preparation
from pipeline.data.rows import TrainingRows
from pipeline.data.show import warning_lines
from pipeline.data.validation import ValidationRows
from pipeline.data.watchlist import id_of_file
from pipeline.evals.benchmarks import benchmarks_of
from pipeline.evals.watched import save_watchlist
from pipeline.preflight.cadences import cadence_notes
from pipeline.preflight.fork import refuse_without_steps
from pipeline.preflight.horizon import horizon_lines, settle_warmup
from pipeline.preflight.opening import OpenRun
from pipeline.recipe import Recipe
from pipeline.training.agreement import on_rank_0


def open_rows(
    recipe: Recipe, tokenizer: Any, sources: tuple[list, list], run: OpenRun
) -> tuple[TrainingRows, ValidationRows]:
    """Training and validation rows; returns when the first step's rows are sealed, while the rest is prepared ahead.

    run: rows before the step that it goes on from need not be kept.
    """
    started: list[Preparation] = []

    def start() -> dict:
        watchlist = save_watchlist(benchmarks_of(recipe), cache=cache_dir(recipe.data.cache_dir))
        here = run.directory.path
        started.append(
            start_preparation(recipe, tokenizer, sources=sources, from_step=run.step, watchlist=watchlist, run=here)
        )
        for line in unchecked_lines(started[0].plan, run):
            print(line, flush=True)
        return started[0].description()

    description = on_rank_0(start)
    preparation = started[0] if started else Preparation.attach(description)
    rows = TrainingRows.open(preparation=preparation)
    in_epochs = "max_steps" not in recipe.train
    recipe.train["max_steps"] = rows.total_steps()
    if in_epochs:
        settle_warmup(recipe)
    if run.forks:
        refuse_without_steps(recipe, run.step)
    validation = ValidationRows.open(preparation)

    def say() -> None:
        notes = [f"note: {note}" for note in cadence_notes(recipe, recipe.train["max_steps"])]
        warnings = warning_lines(recipe, rows, validation, sources=sources[0], tokenizer=tokenizer)
        print(*horizon_lines(recipe, rows, sources[0]), *notes, *warnings, sep="\n", flush=True)

    on_rank_0(say)
    return rows, validation


def unchecked_lines(plan: dict, run: OpenRun) -> list[str]:
    """How much of the training text was prepared before anybody looked for the benchmarks' items in it, and what to do."""
    if not plan["watchlist"]:
        return []
    seen = Seen.by_run(plan, id_of_file(plan["watchlist"]))
    if not seen.unchecked:
        return []
    return [
        f"contamination: nobody looked for the evaluation items in {seen.unchecked:,} of {seen.shards:,} shards, as they were prepared before. "
        f"To look, while this run trains: python -m pipeline.data {run.directory.recipe} --watchlist {plan['watchlist']}"
    ]
