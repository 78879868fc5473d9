"""The callbacks of a run, in the order in which they act."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

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
from pipeline.process.user_code import CodeFolder, guarded, import_attribute
from pipeline.recipe import schema
from pipeline.recipe.located_yaml import load_mapping
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.training.trainer import TandemTrainer


def add_callbacks(
    trainer: TandemTrainer,
    directory: RunDirectory,
    *,
    run: schema.Run,
    monitor: schema.Monitor,
    samples: schema.Samples,
    chat: bool,
    own: list[TrainerCallback],
    wanted: list[Any],
    attempt: int,
    start_step: int,
    stop: StopSignals,
) -> None:
    """Add everything that watches the run, in the order in which it acts; what writes files acts on rank 0 only.

    own: as run.callbacks names them. wanted: benchmarks with a cadence.
    """
    meter, tokenizer = trainer.meter, trainer.processing_class
    # 1. What only some runs have, and imports what they alone need.
    trackers = []
    if monitor.trackers:
        from pipeline.callbacks.trackers import trackers_of

        trackers = trackers_of(
            monitor,
            directory,
            config=load_mapping(directory.recipe),
            note=run.note,
            tags=run.tags,
            attempt=attempt,
            start_step=start_step,
            tokens_at=meter.tokens_at,
        )
    profiler = []
    if monitor.profile_steps:
        from pipeline.callbacks.profiler import ProfileSteps

        profiler = [ProfileSteps(directory, *monitor.profile_steps, meter=meter)]
    for benchmark in wanted:
        benchmark.require_ready(tokenizer)
    benchmarks = []
    if wanted:
        from pipeline.callbacks.benchmarks import Benchmarks

        benchmarks = [Benchmarks(trainer, directory, wanted, attempt=attempt, stop=stop)]
    # 2. How samples are written: under a sharded model by all ranks together, so all of them stop for a signal.
    watched: Callable[..., Any] = stop.on_this_rank
    if trainer.is_sharded:
        watched = partial(stop.on_every_rank, lockstep=True)
    complete_prompts = partial(
        complete,
        tokenizer=tokenizer,
        chat=chat,
        max_new_tokens=samples.max_new_tokens,
        temperature=samples.temperature,
        top_k=samples.top_k,
        top_p=samples.top_p,
        seed=samples.seed,
        watched=watched,
    )
    # 3. In the order in which they act.
    trainer.remove_callback(PrinterCallback)
    for callback in (
        HangWatch(directory, timeout=run.hang_timeout, attempt=attempt, ranks=trainer.ranks, timer=trainer.timer),
        Machine(directory, attempt=attempt, gpu_hz=monitor.gpu_hz, meter=meter, world_size=trainer.args.world_size),
        *profiler,
        MetricsFile(directory, attempt=attempt, meter=meter),
        Console(directory.console),
        Compiling(),
        *trackers,
        Samples(
            directory,
            complete=complete_prompts,
            all_ranks=trainer.is_sharded,
            prompts=samples.prompts,
            every_steps=samples.every_steps,
            chat=chat,
            attempt=attempt,
            meter=meter,
            writers=[tracker for tracker in trackers if hasattr(tracker, "add_samples")],
        ),
        *own,
        SlowRank(directory, attempt=attempt),
        *benchmarks,
        stop,
        GarbageCollection(),
    ):
        trainer.add_callback(callback)


def end_callbacks(callbacks: Iterable[TrainerCallback], *event: Any) -> None:
    """End the threads and hooks that our callbacks began, after an error in a process that lives on: the hang watch
    would end it. transformers calls on_train_end only where a training ends by itself. event: args, state, control."""
    for callback in callbacks:
        if isinstance(callback, (HangWatch, Machine, GarbageCollection)) or hasattr(callback, "add_samples"):
            with suppress(Exception):  # of one that had not begun; the error of the training is the one to report
                callback.on_train_end(*event)


def own_callbacks(names: list[str], code: CodeFolder, *, where: str) -> list[TrainerCallback]:
    """Return one object of each class that run.callbacks names. Raises RecipeError for one that cannot be imported or
    made."""
    made = []
    for name in names:
        with guarded(f"{where}: {name}"):
            made.append(import_attribute(name, code, where=where)())
    return made
