"""The life of a run, in the order in which it happens; both stages live it."""

from pipeline.callbacks.default import add_callbacks
from pipeline.callbacks.stopping import StopSignals
from pipeline.preflight.checks import check_before_training
from pipeline.process.network import limit_silence
from pipeline.process.user_code import import_built_in
from pipeline.recipe import Recipe
from pipeline.run.data import keep_inputs, open_rows, record_inputs
from pipeline.run.finish import Publishing, finish_run, record_plan, say_shape
from pipeline.run.open_run import (
    evaluation_is_due,
    open_run,
    resolve_micro_batch,
    resolve_open_values,
    restore_run,
    start_process,
)
from pipeline.run_dir.failures import Signals
from pipeline.sources.open import open_sources
from pipeline.tokenizer import load_or_train
from pipeline.training.build import build_from_recipe, build_trainer
from pipeline.training.distributed import store_of_ranks


def train(recipe: Recipe, signals: Signals) -> int:
    """Train the run of the recipe to its end, from wherever it stands. Return the exit status; every rank calls it.

    A recipe is frozen: each step that decides an open value (start, batch, attention, commits, steps, micro-batch) returns the next one.
    """
    processes = start_process(recipe)
    limit_silence()
    signals.connect(store_of_ranks())
    recipe = restore_run(recipe)
    recipe = resolve_open_values(recipe, processes)
    recipe = check_before_training(recipe, processes=processes)
    run = open_run(recipe)
    mirroring = import_built_in("mirror.beside")(recipe, run.directory)
    if run.finished:
        mirroring.drain()
        return 0

    recipe = keep_inputs(recipe, run)
    sources, held_out = open_sources(recipe, kind="chat" if recipe.stage == "sft" else "text")
    tokenizer = load_or_train(recipe, sources, validation=held_out)
    recipe, rows, validation = open_rows(recipe, tokenizer, (sources, held_out), run)
    record_inputs(recipe, run, tokenizer=tokenizer, sources=(sources, held_out), rows=rows, validation=validation)

    model = build_from_recipe(recipe, tokenizer)
    stop = StopSignals(signals)
    trainer = build_trainer(
        recipe,
        run.directory,
        model=model,
        tokenizer=tokenizer,
        rows=rows,
        validation=validation,
        watched=stop.on_every_rank,
        eval_on_start=evaluation_is_due(recipe, run),
    )
    recipe = resolve_micro_batch(recipe, run, trainer)
    say_shape(run, trainer)
    record_plan(recipe, run, trainer)
    add_callbacks(trainer, recipe, run.directory, attempt=run.attempt, start_step=run.step, stop=stop)

    publishing = Publishing(recipe, run.directory, start_step=run.step)
    trainer.resume(run.checkpoint)
    signals.raise_if_stopped(step=trainer.state.global_step, first=mirroring.drain)
    finish_run(recipe, run, trainer, publishing)
    mirroring.drain()
    return 0
