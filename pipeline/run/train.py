"""The steps of a run from start to end, for both stages, and its callbacks in the order in which they act."""

import os
from functools import partial
from pathlib import Path

from transformers import PrinterCallback, TrainerCallback

from pipeline.callbacks.log import Compiling, Console, MetricsFile, Samples, Stragglers
from pipeline.callbacks.machine import GarbageBetweenSteps, Machine
from pipeline.callbacks.stopping import HangWatch, StopSignals
from pipeline.generation.texts import complete
from pipeline.model.modeling_tandem import TandemForCausalLM
from pipeline.process.network import set_http_timeouts
from pipeline.process.user_code import guarded, import_attribute
from pipeline.recipe import Recipe
from pipeline.recipe.batch import is_auto
from pipeline.run.checks import benchmarks_of, check_before_training
from pipeline.run.data import keep_inputs, open_rows, record_inputs
from pipeline.run.finish import finish_run, record_plan, say_shape
from pipeline.run.open_run import (
    evaluation_is_due,
    open_run,
    resolve_open_values,
    restore_run,
    start_process,
)
from pipeline.run_dir.failures import Signals
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.sources.open import open_sources
from pipeline.tokenizer import load_or_train
from pipeline.training.build import build_from_recipe, build_trainer
from pipeline.training.distributed import store_of_ranks
from pipeline.training.trainer import TandemTrainer


def train(recipe: Recipe, signals: Signals) -> int:
    """Train the run of the recipe to its end, from wherever it stands. Return the exit status; every rank calls it.

    A recipe is frozen: each step that decides an open value (start, batch, attention, commits, steps, micro-batch)
    returns the next one.
    """
    processes = start_process(recipe)
    set_http_timeouts()
    signals.connect(store_of_ranks())
    recipe = restore_run(recipe)
    recipe = resolve_open_values(recipe, processes)
    recipe = check_before_training(recipe, processes=processes)
    run = open_run(recipe)
    drain = None
    if recipe.run.mirror:
        from pipeline.run.mirror import Mirroring

        drain = Mirroring(recipe, run.directory).drain
    if run.finished:
        if drain:
            drain()
        return 0

    recipe = keep_inputs(recipe, run)
    sources, held_out = open_sources(recipe, kind="chat" if recipe.stage == "sft" else "text")
    tokenizer = load_or_train(recipe, sources, validation=held_out)
    model = build_from_recipe(recipe, tokenizer)
    if not isinstance(model, TandemForCausalLM):  # held by tests/contracts: a row may hold several texts
        from pipeline.training.isolation import resolve_rows

        recipe = resolve_rows(recipe, model, step=run.step)
    recipe, rows, validation = open_rows(recipe, tokenizer, (sources, held_out), run)
    record_inputs(recipe, run, tokenizer=tokenizer, sources=(sources, held_out), rows=rows, validation=validation)

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
    if is_auto(recipe):
        from pipeline.run.probing import resolve_micro_batch

        recipe = resolve_micro_batch(recipe, run, trainer)
    say_shape(run, trainer)
    record_plan(recipe, run, trainer)
    add_callbacks(trainer, recipe, run.directory, attempt=run.attempt, start_step=run.step, stop=stop)

    publishing = None
    if recipe.hub.id is not None:
        from pipeline.run_dir.hub_queue import Publishing

        publishing = Publishing(recipe.hub, run.directory, start_step=run.step)
    trainer.resume(run.checkpoint)
    signals.raise_if_stopped(step=trainer.state.global_step, first=drain)
    finish_run(recipe, run, trainer, publishing)
    if drain:
        drain()
    return 0


def add_callbacks(
    trainer: TandemTrainer, recipe: Recipe, run: RunDirectory, *, attempt: int, start_step: int, stop: StopSignals
) -> None:
    """Add everything that watches the run, in the order in which it acts; what writes files acts on rank 0 only."""
    trackers = []
    if recipe.monitor.trackers:
        from pipeline.callbacks.trackers import trackers_of

        trackers.extend(
            trackers_of(recipe, run, attempt=attempt, start_step=start_step, tokens_at=trainer.meter.tokens_at)
        )
    profiler = []
    if profile := recipe.monitor.profile_steps:
        from pipeline.callbacks.profiler import ProfileSteps

        profiler.append(ProfileSteps(run, *profile, meter=trainer.meter))
    wanted = benchmarks_of(recipe)
    for benchmark in wanted:
        benchmark.require_ready(trainer.processing_class)
    benchmarks = []
    if wanted:
        from pipeline.callbacks.benchmarks import Benchmarks

        benchmarks.append(Benchmarks(trainer, run, wanted, attempt=attempt, stop=stop))
    samples = recipe.samples
    trainer.remove_callback(PrinterCallback)
    for callback in (
        HangWatch(run, timeout=recipe.run.hang_timeout, attempt=attempt, trainer=trainer),
        Machine(trainer, run, attempt=attempt, gpu_hz=recipe.monitor.gpu_hz),
        *profiler,
        MetricsFile(run, attempt=attempt, meter=trainer.meter),
        Console(run.console),
        Compiling(Path(kernels) if (kernels := os.environ.get("TORCHINDUCTOR_CACHE_DIR")) else None),
        *trackers,
        Samples(
            run,
            complete=partial(
                complete,
                tokenizer=trainer.processing_class,
                chat=recipe.stage == "sft",
                max_new_tokens=samples.max_new_tokens,
                temperature=samples.temperature,
                top_k=samples.top_k,
                top_p=samples.top_p,
                seed=samples.seed,
                watched=partial(stop.on_every_rank, lockstep=True) if trainer.is_sharded else stop.on_this_rank,
            ),
            all_ranks=trainer.is_sharded,
            prompts=samples.prompts,
            every_steps=samples.every_steps,
            chat=recipe.stage == "sft",
            attempt=attempt,
            meter=trainer.meter,
            writers=[tracker for tracker in trackers if hasattr(tracker, "add_samples")],
        ),
        *own_callbacks(recipe),
        Stragglers(run, attempt=attempt),
        *benchmarks,
        stop,
        GarbageBetweenSteps(),
    ):
        trainer.add_callback(callback)


def own_callbacks(recipe: Recipe) -> list[TrainerCallback]:
    """Return one object of each class that run.callbacks names. Raises RecipeError for one that cannot be imported or
    made."""
    made = []
    for name in recipe.run.callbacks:
        where = recipe.where("run.callbacks")
        with guarded(f"{where}: {name}"):
            made.append(import_attribute(name, recipe.code, where=where)())
    return made
