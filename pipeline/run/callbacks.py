"""The callbacks of a run, in the order in which they act."""

from collections.abc import Sequence
from functools import partial

from transformers import PrinterCallback, TrainerCallback

from pipeline.callbacks.alarms import SlowRank
from pipeline.callbacks.compiling import Compiling
from pipeline.callbacks.console import Console
from pipeline.callbacks.garbage_collection import GarbageCollection
from pipeline.callbacks.hang_watch import HangWatch
from pipeline.callbacks.machine import Machine
from pipeline.callbacks.metrics_file import MetricsFile
from pipeline.callbacks.samples import Samples
from pipeline.callbacks.stop_signals import StopSignals
from pipeline.generation.texts import complete
from pipeline.process.user_code import guarded, import_attribute
from pipeline.recipe import Recipe
from pipeline.recipe.located_yaml import load_mapping
from pipeline.run.checks import benchmarks_of
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.training.trainer import TandemTrainer


def add_callbacks(
    trainer: TandemTrainer,
    recipe: Recipe,
    run: RunDirectory,
    *,
    attempt: int,
    start_step: int,
    stop: StopSignals,
    more: Sequence[TrainerCallback] = (),
) -> None:
    """Add everything that watches the run, in the order in which it acts; what writes files acts on rank 0 only.
    more: of the caller, after the recipe's own."""
    trackers = []
    if recipe.monitor.trackers:
        from pipeline.callbacks.trackers import trackers_of

        trackers.extend(
            trackers_of(
                recipe.monitor,
                run,
                config=load_mapping(run.recipe),
                note=recipe.run.note,
                tags=recipe.run.tags,
                attempt=attempt,
                start_step=start_step,
                tokens_at=trainer.meter.tokens_at,
            )
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
        HangWatch(run, timeout=recipe.run.hang_timeout, attempt=attempt, ranks=trainer.ranks, timer=trainer.timer),
        Machine(
            run,
            attempt=attempt,
            gpu_hz=recipe.monitor.gpu_hz,
            meter=trainer.meter,
            world_size=trainer.args.world_size,
        ),
        *profiler,
        MetricsFile(run, attempt=attempt, meter=trainer.meter),
        Console(run.console),
        Compiling(),
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
        *more,
        SlowRank(run, attempt=attempt),
        *benchmarks,
        stop,
        GarbageCollection(),
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
