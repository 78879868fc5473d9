"""The callbacks of a run, in the order in which they act."""

import os
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, TrainerCallback

from pipeline.callbacks.evaluations import Samples
from pipeline.callbacks.log import Compiling, Console, MetricsFile, Spikes, Stragglers
from pipeline.callbacks.machine import GarbageBetweenSteps, Machine
from pipeline.callbacks.stopping import HangWatch, StopSignals
from pipeline.evals.tasks import benchmarks_of
from pipeline.generation.texts import complete
from pipeline.process.user_code import guarded, import_attribute, import_built_in
from pipeline.recipe import Recipe
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.training.trainer import TandemTrainer


def add_callbacks(
    trainer: TandemTrainer, recipe: Recipe, run: RunDirectory, *, attempt: int, start_step: int, stop: StopSignals
) -> None:
    """Add everything that watches the run; what writes files acts on rank 0 only."""
    tokens_at = trainer.meter.tokens_at
    known = {"attempt": attempt, "start_step": start_step, "tokens_at": tokens_at}
    trackers = import_built_in("callbacks.trackers")(recipe, run, **known) if recipe.monitor.trackers else []
    profile = recipe.monitor.profile_steps
    wanted = benchmarks_of(recipe)
    for benchmark in wanted:
        benchmark.require_ready(trainer.processing_class)
    benchmarks = (
        [import_built_in("callbacks.Benchmarks")(trainer, run, wanted, attempt=attempt, stop=stop)] if wanted else []
    )
    samples = recipe.samples
    trainer.remove_callback(PrinterCallback)
    for callback in (
        HangWatch(run, timeout=recipe.run.hang_timeout, attempt=attempt, trainer=trainer),
        Machine(trainer, run, attempt=attempt, gpu_hz=recipe.monitor.gpu_hz),
        *([import_built_in("callbacks.ProfileSteps")(run, *profile, meter=trainer.meter)] if profile else []),
        MetricsFile(run, attempt=attempt, tokens_at=tokens_at),
        Console(run.console),
        Compiling(Path(kernels) if (kernels := os.environ.get("TORCHINDUCTOR_CACHE_DIR")) else None),
        *trackers,
        Samples(
            run,
            complete=partial(
                _complete,
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
            tokens_at=tokens_at,
            meter=trainer.meter,
            writers=[tracker for tracker in trackers if hasattr(tracker, "add_samples")],
        ),
        *own_callbacks(recipe),
        *([] if recipe.monitor.on_spike == "skip" else [Spikes(run, policy=recipe.monitor.on_spike, attempt=attempt)]),
        Stragglers(run, attempt=attempt),
        *benchmarks,
        stop,
        GarbageBetweenSteps(),
    ):
        trainer.add_callback(callback)


def own_callbacks(recipe: Recipe) -> list[TrainerCallback]:
    """Return one object of each class that run.callbacks names. Raises RecipeError for one that cannot be imported or made."""
    made = []
    for name in recipe.run.callbacks:
        where = recipe.where("run.callbacks")
        with guarded(f"{where}: {name}"):
            made.append(import_attribute(name, recipe.code, where=where)())
    return made


def _complete(model: Any, prompts: list[str], *, tokenizer: Any, **settings: Any) -> list[str]:
    return complete(model, tokenizer, prompts, **settings)
