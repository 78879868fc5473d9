"""Rows for this run: one process of the run prepares, the others attach."""

from typing import Any

from pipeline.data.prepare import Preparation, start_preparation
from pipeline.data.rows import TrainingRows
from pipeline.data.validation import ValidationRows
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
        started.append(start_preparation(recipe, tokenizer, sources=sources, from_step=run.step))
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
    on_rank_0(lambda: print(*horizon_lines(recipe, rows, sources[0]), sep="\n", flush=True))
    return rows, ValidationRows.open(preparation)
