"""The rows of a run, which one process prepares and the others attach to, and how often the run reads its data."""

from typing import Any

from pipeline.data.preparation import Preparation, start_preparation
from pipeline.data.row_plan import plan_rows
from pipeline.data.rows import TrainingRows
from pipeline.data.validation import ValidationRows
from pipeline.process.commands import command
from pipeline.process.progress import short_count
from pipeline.process.storage import cache_dir
from pipeline.recipe import Recipe
from pipeline.recipe.batch import StepRows
from pipeline.recipe.checks import check_warmup
from pipeline.recipe.dial import row_settings
from pipeline.recipe.located_yaml import Problems
from pipeline.recipe.schema import Schedule, with_values
from pipeline.run.checks import benchmarks_of, cadence_notes
from pipeline.run.fork import refuse_without_steps
from pipeline.run.open_run import OpenRun
from pipeline.training.distributed import on_rank_0

MANY_EPOCHS = 4.0  # Up to about four, repeated text teaches nearly as much as new text (Muennighoff et al. 2023).


def open_rows(
    recipe: Recipe, tokenizer: Any, sources: tuple[list, list], run: OpenRun
) -> tuple[Recipe, TrainingRows, ValidationRows]:
    """Return the recipe with its number of steps, and training and validation rows, when the first step's rows are
    sealed, while the rest is prepared ahead.

    run: rows before the step that it continues from need not be kept.
    """
    started: list[Preparation] = []

    def start() -> dict:
        benchmarks, cache = benchmarks_of(recipe), cache_dir(recipe.data.cache_dir)
        watchlist = None
        if benchmarks:
            from pipeline.contrib.contaminated_items import save_watchlist

            watchlist = save_watchlist(benchmarks, cache=cache)
        plan = plan_rows(row_settings(recipe), tokenizer, sources=sources, watchlist=watchlist)
        started.append(start_preparation(plan, tokenizer, sources=sources, run=run.directory.path))
        for line in unchecked_lines(plan, run):
            print(line, flush=True)
        return started[0].description()

    description = on_rank_0(start)
    preparation = started[0] if started else Preparation.attach(description)
    rows = TrainingRows.open(preparation=preparation)
    is_named = "max_steps" in recipe.train and recipe.run.minutes is None
    recipe = with_values(recipe, {"train.max_steps": rows.total_steps()})
    if not is_named:
        recipe = resolve_warmup(recipe)
    if run.forks:
        refuse_without_steps(run.step, recipe.train["max_steps"], where=recipe.where("run.fork_from"))
    validation = ValidationRows(preparation)

    def print_notes() -> None:
        from pipeline.data.losses import padding_notes, warning_lines

        notes = [f"note: {note}" for note in cadence_notes(recipe, recipe.train["max_steps"])]
        if recipe.data.one_text_rows:
            notes += padding_notes(rows.plan, rows.shares())
        warnings = warning_lines(rows.plan, validation, sources=sources, tokenizer=tokenizer, has_begun=run.step > 0)
        steps, shares = recipe.train["max_steps"], rows.shares()
        horizon = horizon_lines(steps, recipe.step_rows, recipe.data.row_tokens, shares=shares)
        print(*horizon, *notes, *warnings, sep="\n", flush=True)

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


def resolve_warmup(recipe: Recipe) -> Recipe:
    """Return the recipe with what a horizon in steps is read with, where it is one in epochs or minutes and known in
    steps by now.

    The default warm-up is at most a fifth of the run. Raises RecipeError for one that was given and is longer than it.
    """
    schedule, steps = recipe.optimizer.schedule, recipe.train["max_steps"]
    # Compared, not looked up among the given keys: the saved recipe of a run gives every key.
    if recipe.optimizer.type != "trainer" and schedule.warmup_steps == Schedule().warmup_steps:
        recipe = with_values(recipe, {"optimizer.schedule.warmup_steps": min(schedule.warmup_steps, steps // 5)})
    problems = Problems()
    check_warmup(recipe.optimizer, recipe.train, problems.of(recipe.where))
    problems.raise_if_any()
    return recipe


def horizon_lines(steps: int, rows: StepRows, row_tokens: int, *, shares: dict[str, dict[str, Any]]) -> list[str]:
    """Return steps and tokens of the run, and how often each source is read, as far as its length is known.

    shares: facts of each source by its name, as TrainingRows.shares gives them.
    """
    tokens = short_count(rows.before(steps) * row_tokens)
    fewer = f" (fewer in the first {rows.warmup_steps:,})" if rows.warmup_steps else ""
    lines = [f"training: {steps:,} steps of {rows.full * row_tokens:,} tokens{fewer}, {tokens} in all"]
    for source, share in shares.items():
        epochs = share.get("epochs")
        if epochs is None:
            lines.append(f"  {source}: how often it is read (epochs) is not known before all of it is prepared")
            continue
        times = f"{epochs:.2f}" if epochs >= 0.01 else "less than 0.01"
        lines.append(f"  {source}: read {times} times (epochs)")
        if epochs > MANY_EPOCHS:
            lines.append(
                f"note: {source} is repeated more than {MANY_EPOCHS:.0f} times, from where on repeated text teaches "
                "little. Add text, or train shorter."
            )
    return lines
