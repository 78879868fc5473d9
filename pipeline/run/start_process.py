"""The start of a process of a run: its threads, the other ranks, and what follows from their number."""

import hashlib
import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import PartialState
from transformers.utils import logging

from pipeline.hardware.accelerators import leave_accelerators
from pipeline.hardware.device import batch_ranks, device_info, tensor_parallel_size
from pipeline.hardware.processor import cpu_name, keep_freed_memory, use_deterministic_kernels
from pipeline.hardware.rates import bfloat16_is_faster, decide_for_all_ranks, set_threads
from pipeline.process.errors import RecipeError
from pipeline.process.storage import cache_dir, is_writable
from pipeline.recipe import Recipe, dump_recipe
from pipeline.recipe.schema import with_values
from pipeline.recipe.start_from import resolve_start
from pipeline.run.open_run import dotted, versions
from pipeline.run_dir.earlier_runs import EarlierRuns
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.training.distributed import from_every_rank, on_rank_0


def start_process(recipe: Recipe) -> int:
    """Join the other ranks, and return their number. Raises RecipeError on all of them where they would train
    different runs.

    On a CPU the threads are set first, since their number changes the last bits of fp32 sums, and kernels are
    deterministic.
    """
    logging.set_verbosity_error()  # hints about what the recipe decided on purpose
    logging.disable_progress_bar()  # one for every saved file
    if recipe.train.get("use_cpu"):
        leave_accelerators()
    if "FSDP_VERSION" in os.environ or tensor_parallel_size() > 1:
        # training/sharding.py shards the model of several processes; accelerate would wrap it, and that of one process
        # too.
        os.environ["ACCELERATE_USE_FSDP"] = os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] = "false"
    _ignore_accelerate_settings(recipe.train)
    on_cpu = device_info().kind == "cpu"
    if on_cpu:
        set_threads(int(os.environ.get("LOCAL_WORLD_SIZE", 1)), kept=_kept_shape(recipe).get("threads"))
        use_deterministic_kernels()
        keep_freed_memory()
    # Compiled kernels outlive the run, and a reboot. They hold for one kind of processor, and a cache may be shared by
    # several.
    compiled = cache_dir(recipe.data.cache_dir) / "compiled" / hashlib.sha256(cpu_name().encode()).hexdigest()[:8]
    if is_writable(compiled):  # else torch's own folder
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compiled))
    state = PartialState(cpu=on_cpu, timeout=timedelta(seconds=int(recipe.train.get("ddp_timeout", 7200))))
    if state.num_processes > 1:
        refuse_different_ranks(recipe)
    return state.num_processes


def _ignore_accelerate_settings(train: dict[str, Any]) -> None:
    """Take precision and compilation from the recipe alone: accelerate's file or variables would overrule it without a
    word."""
    for variable, setting, neutral, keys in (
        ("ACCELERATE_MIXED_PRECISION", "mixed_precision", "no", ("bf16", "fp16")),
        ("ACCELERATE_DYNAMO_BACKEND", "dynamo_backend", "NO", ("torch_compile",)),
    ):
        given = os.environ.get(variable, neutral)
        if given == "fp8":
            continue  # refused with the key to write instead (run/checks.py)
        os.environ[variable] = neutral
        if given.lower() != neutral.lower() and os.environ.get("RANK", "0") == "0":
            decided = ", ".join(f"train.{key}: {train.get(key)}" for key in keys)
            print(
                f"accelerate: its {setting} ({given.lower()}) is ignored: the recipe decides ({decided})", flush=True
            )


def resolve_open_values(recipe: Recipe, processes: int) -> Recipe:
    """Return the recipe with what follows from the number of processes and from earlier runs, this run's own starts
    among them."""
    recipe = with_values(recipe, on_rank_0(lambda: _resolved(recipe, processes)))
    if device_info().kind == "cpu":
        decide_for_all_ranks(on_rank_0(lambda: _trains_in_bfloat16(recipe)))
    return recipe


def refuse_different_ranks(recipe: Recipe) -> None:
    """Raise RecipeError on every rank, with what differs from the first one, when the ranks would not train the same
    run with the same code.

    Nothing later would notice: the replicas part at step 1, or one rank waits in a save that the other does not make.
    """
    # By the resolved recipe: files and overrides may differ where they come to the same.
    settings = dotted(yaml.safe_load(dump_recipe(recipe)))
    ranks = from_every_rank((socket.gethostname(), settings | _software()))
    first_host, first = ranks[0]
    lines = set()
    for rank, (host, other) in enumerate(ranks):
        for name in first.keys() | other.keys():
            if first.get(name) != other.get(name):
                there = f"{other.get(name)!r} on {host} (rank {rank})"
                lines.add(f"{name}: {first.get(name)!r} on {first_host} (rank 0); {there}")
    if lines:
        listed = "\n  ".join(sorted(lines))
        raise RecipeError(
            "command line: the processes of this run differ, and their weights would part or they would wait for each "
            f"other:\n  {listed}\n"
            "Start the same command on every host, with the same files and packages."
        )


def _software() -> dict[str, str]:
    """Return what else a step's numbers follow from: packages, the CUDA driver and this package's code."""
    package, code = Path(__file__).parents[1], hashlib.sha256()
    for file in sorted(filter(Path.is_file, package.rglob("*.py"))):  # no editor's lock, which is a link to nowhere
        code.update(str(file.relative_to(package)).encode() + file.read_bytes())
    driver = Path("/proc/driver/nvidia/version")
    found = {**versions(), "cuda": str(torch.version.cuda), "Tandem's code": code.hexdigest()[:12]}
    if driver.is_file():
        found["CUDA driver"] = driver.read_text().splitlines()[0]
    return found


def _resolved(recipe: Recipe, processes: int) -> dict[str, Any]:
    """Return start and batch of the run, by key. A run that has begun keeps its batch, whatever number of processes
    continues it."""
    recipe = resolve_start(recipe)
    batch_tokens = recipe.global_batch_tokens(batch_ranks(processes))
    kept = EarlierRuns().previous_attempt(recipe.run.directory, recipe.run.name).get("data.batch_tokens")
    if recipe.data.batch_tokens is None and kept not in (None, batch_tokens):
        print(
            f"{recipe.where('train.gradient_accumulation_steps')}: would make a step of {batch_tokens:,} tokens on "
            f"{processes} processes, and this run began with {kept:,}, which it keeps. For another batch give "
            "another run.name.",
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
    """Return whether `auto` is bfloat16. A run that continues on the same processor keeps what it began with."""
    shape = _kept_shape(recipe)
    if recipe.train.get("bf16") == "auto" and shape:
        return shape.get("dtype") == "bfloat16"
    return bfloat16_is_faster()


def _kept_shape(recipe: Recipe) -> dict[str, Any]:
    """Return what a run that has begun on this kind of processor was trained with; empty for any other."""
    shape = RunDirectory.of(recipe.run).read_manifest().get("shape", {})
    if shape.get("device") != cpu_name():
        return {}
    return shape if EarlierRuns().previous_attempt(recipe.run.directory, recipe.run.name) else {}
