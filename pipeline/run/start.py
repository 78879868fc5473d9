"""The process itself, before anything else of a run: threads, ranks, import path."""

import hashlib
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

from pipeline.hardware.cpu import cpu_name, keep_freed_memory, set_threads, use_deterministic_kernels
from pipeline.hardware.device import device_info, leave_accelerators, shards_model
from pipeline.hardware.products import bfloat16_is_faster, decide_for_all_ranks
from pipeline.process.storage import cache_dir
from pipeline.recipe import Recipe
from pipeline.recipe.resolve import with_batch_tokens
from pipeline.recipe.schema import with_values
from pipeline.recipe.start_from import begun_run, resolve_start
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.training.distributed import on_rank_0


def start_process(recipe: Recipe) -> tuple[Recipe, int]:
    """Join the other ranks. Return the recipe with what follows from their number and from earlier runs, and their number.

    On a CPU the threads are set first, since their number changes the last bits of fp32 sums, and kernels are
    deterministic.
    """
    from accelerate import PartialState
    from transformers.utils import logging

    logging.set_verbosity_error()  # hints about what the recipe decided on purpose
    logging.disable_progress_bar()  # one for every saved file
    if recipe.train.get("use_cpu"):
        leave_accelerators()
    if shards_model():
        os.environ["ACCELERATE_USE_FSDP"] = (
            "false"  # training/sharding.py cuts the model; accelerate would wrap it again
        )
    on_cpu = device_info().kind == "cpu"
    if on_cpu:
        set_threads(int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        use_deterministic_kernels()
        keep_freed_memory()
    # Compiled kernels outlive the run, and a reboot. They hold for one kind of processor, and a cache may be shared by several.
    compiled = cache_dir(recipe.data.cache_dir) / "compiled" / hashlib.sha256(cpu_name().encode()).hexdigest()[:8]
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compiled))
    state = PartialState(cpu=on_cpu, timeout=timedelta(seconds=int(recipe.train.get("ddp_timeout", 7200))))
    recipe = with_values(recipe, on_rank_0(lambda: _resolved(recipe, state.num_processes)))
    if on_cpu:
        decide_for_all_ranks(on_rank_0(lambda: _trains_in_bfloat16(recipe)))
    return recipe, state.num_processes


def _resolved(recipe: Recipe, processes: int) -> dict[str, Any]:
    """Return start and batch of the run, by key. A run that has begun keeps its batch, whatever number of processes goes on with it."""
    recipe = resolve_start(recipe)
    batch_tokens = with_batch_tokens(recipe, processes)
    kept = begun_run(recipe).get("data.batch_tokens")
    if recipe.data.batch_tokens is None and kept not in (None, batch_tokens):
        print(
            f"{recipe.where('train.gradient_accumulation_steps')}: would make a step of {batch_tokens:,} tokens on {processes} processes, and "
            f"this run began with {kept:,}, which it keeps. For another batch give another run.name.",
            flush=True,
        )
        batch_tokens = kept
    return {
        "model.start_from": recipe.model.start_from,
        "tokenizer.path": recipe.tokenizer.path,
        "run.name": recipe.run.name,
        "data.batch_tokens": batch_tokens,
    }


def _trains_in_bfloat16(recipe: Recipe) -> bool:
    """Return whether `auto` is bfloat16. A run that goes on on the same processor keeps what it began with."""
    shape = RunDirectory(Path(recipe.run.directory) / str(recipe.run.name)).read_manifest().get("shape", {})
    if recipe.train.get("bf16") == "auto" and shape.get("device") == cpu_name() and begun_run(recipe):
        return shape.get("dtype") == "bfloat16"
    return bfloat16_is_faster()
