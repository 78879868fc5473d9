"""Findings on a plan: whether its devices, their layout and the disk can take the run, and what it would waste."""

import os
import shutil
import tempfile
from pathlib import Path

from pipeline.hardware.device import batch_ranks, parallelism_size, tensor_parallel_size
from pipeline.hardware.processor import has_memory_files
from pipeline.plan.memory import DEVICE_SHARE
from pipeline.plan.plan import Plan, gibibytes, gigabytes
from pipeline.plan.table import time_text
from pipeline.process.errors import DiskFullError, OutOfMemoryError, RecipeError, TandemError, raised
from pipeline.process.storage import cache_dir, folder_bytes, nearest_existing
from pipeline.recipe.checks import check_halvings
from pipeline.recipe.located_yaml import Problems
from pipeline.recipe.schema import OPTIM_ARGS
from pipeline.recipe.sizes import BY_ARITHMETIC
from pipeline.run_dir.run_directory import RunDirectory

WASTE_WORTH_A_NOTE = 0.05
SURELY = 0.9  # of the estimate of memory, which is right to about a tenth: below this nothing is refused
SMALLER = "Set train.activation_checkpointing: true, make the model smaller, or use a larger device."
LEAST_CHECKPOINTS = 2.2  # that the disk must hold, however few are planned
FROM_FSDP2 = "Start from accelerate_configs/fsdp2.yaml."


def headline(plan: Plan) -> str:
    """Return in a line how long the run takes, how much of what it uses, and whether it fits."""
    facts = ["time not known"]
    if duration := plan.duration:
        time = f"about {time_text(duration.total)}"
        if duration.mfu is not None:  # by an assumed share of the peak, which half to twice of it may reach
            time += f" ({time_text(duration.total / 2)} to {time_text(2 * duration.total)})"
        facts = [time]
        if plan.device.kind != "cpu":
            facts.append(f"{plan.device_hours:,.1f} GPU hours")
    if plan.cost is not None:
        facts.append(f"cost {plan.cost:,.2f}")
    needed, limit = plan.memory and plan.memory.total, _device_bytes(plan)
    if needed and limit:
        verdict = "fits"
        if needed > limit:
            verdict = "does not fit"
        elif needed > DEVICE_SHARE * limit:
            verdict = "tight"
        facts.append(f"{needed / 2**30:.1f} of {gibibytes(limit)} of memory: {verdict}")
    return ", ".join(facts)


def find_problems(plan: Plan, *, on_this_machine: bool) -> list[TandemError]:
    """Return what keeps the run from its devices and its disk; not on_this_machine, arithmetic alone counts."""
    problems = [*raised(_batch, plan), *raised(_memory, plan)]
    if on_this_machine:
        problems += [*raised(_devices, plan), *_sharding(plan), *raised(_disk, plan), *raised(_temporary_folder, plan)]
    return problems


def find_notes(plan: Plan) -> list[str]:
    """Return what works and still deserves a sentence."""
    recipe = plan.recipe
    notes = [*recipe.notes]
    if unused := _unused_optim_args(recipe.train.get("optim_args"), recipe.train.get("optim", "adamw_torch_fused")):
        where = recipe.where("train.optim_args")
        notes.append(f"{where}: transformers does not use {unused} for {recipe.train.get('optim')}. Remove it.")
    if plan.padding_share > WASTE_WORTH_A_NOTE:
        rows = plan.recipe.rows_per_step
        notes.append(
            f"{recipe.where('data.batch_tokens')}: a step computes {plan.rows_per_pass * plan.micro_steps - rows} "
            f"rows of padding with its {rows}, {100 * plan.padding_share:.0f} % of the time. Choose rows and processes "
            f"whose product divides {rows}."
        )
    if doubt := memory_doubt(plan):
        notes.append(doubt)
    if recipe.train.get("bf16") is True and plan.device.peak_flops and "bfloat16" not in plan.device.peak_flops:
        notes.append(
            f"{recipe.where('train.bf16')}: {plan.device.name} only imitates bfloat16, slowly. Write train.fp16: true "
            "instead, or bf16: auto."
        )
    if not has_memory_files():
        notes.append(
            f"{tempfile.gettempdir()}: this system refuses files in memory (memfd_create), so checkpoints are copied "
            "through this folder first, which takes as much room again. Set TMPDIR to move it."
        )
    shards, folder = plan.shards_bytes, cache_dir(recipe.data.cache_dir)
    if shards and shards > _free(folder):
        notes.append(
            f"{folder}: the packed rows may take {gigabytes(shards)} and {gigabytes(_free(folder))} are free. "
            "Set data.cache_dir to a larger disk."
        )
    return notes


def _unused_optim_args(given: str | None, optimizer: str) -> str:
    """Return what transformers does not use of train.optim_args as it is written (findings/trainer_optim_args*.sh)."""
    if not given or optimizer not in OPTIM_ARGS:
        return ""
    unused = []
    for pair in given.replace(" ", "").split(","):
        name, _, value = pair.partition("=")
        # bool("False") is True there.
        taken_for_true = optimizer == "stable_adamw" and value.lower() in ("false", "0", "no")
        if name not in OPTIM_ARGS[optimizer] or taken_for_true:
            unused.append(pair)
    return ", ".join(unused)


def memory_doubt(plan: Plan) -> str | None:
    """Return a sentence where the micro-batch needs more than the device has, by the estimate; None where it fits."""
    memory, limit, rows = plan.memory, _device_bytes(plan), plan.recipe.micro_batch_rows
    if not (memory and memory.total and memory.fixed and limit and memory.fixed <= limit < memory.total):
        return None
    text = (
        f"{plan.recipe.where('train.per_device_train_batch_size')}: {rows} rows are estimated to need "
        f"{gibibytes(memory.total)} of the device's {gibibytes(limit)}. "
    )
    least = plan.least_memory.total if plan.least_memory else None
    if least and least > DEVICE_SHARE * limit:
        return text + f"One row needs {gibibytes(least)}, which leaves hardly any room. {SMALLER}"
    fits = max(1, int((limit - memory.fixed) / memory.activations * rows))
    return text + f"If memory runs out, write {min(fits, max(1, rows - 1))}; the training stays the same."


def _device_bytes(plan: Plan) -> float | None:
    """Return the memory of one process's device; processes on a CPU share its memory."""
    if plan.device.memory_gib is None:
        return None
    share = plan.processes if plan.device.kind == "cpu" else 1
    return plan.device.memory_gib * 2**30 / share


def _batch(plan: Plan) -> None:
    recipe = plan.recipe
    rows = recipe.rows_per_step
    if batch_ranks(plan.processes) > rows:
        raise RecipeError(
            f"{plan.recipe.where('data.batch_tokens')}: a step of {plan.batch_tokens} tokens has {rows} rows, "
            f"and {plan.processes} processes would leave some without any. Start fewer processes, or make the batch "
            "larger."
        )
    # Known only now, where the batch follows from the processes.
    problems = Problems()
    check_halvings(recipe.step_rows, recipe.data.row_tokens, problems.of(recipe.where))
    problems.raise_if_any()


def _memory(plan: Plan) -> None:
    limit = _device_bytes(plan)
    if plan.memory is None or plan.memory.fixed is None or limit is None:
        return
    if plan.memory.fixed > limit:
        share = ""
        if plan.processes > 1 and plan.shards == 1:
            share = f", or share it among the {plan.processes} processes (accelerate_configs/fsdp2.yaml)"
        raise OutOfMemoryError(
            f"{plan.recipe.path}: weights, gradients and optimizer take {gibibytes(plan.memory.fixed)}, and "
            f"{plan.device.name} has {gibibytes(limit)} a process: no micro-batch fits. Make the model smaller, or "
            f"use a larger device{share}."
        )
    least = plan.least_memory.total if plan.least_memory else None
    if least and least * SURELY > limit:
        raise OutOfMemoryError(
            f"{plan.recipe.path}: a micro-batch of one row is estimated to need {gibibytes(least)}, and "
            f"{plan.device.name} has {gibibytes(limit)} a process: none fits. {SMALLER}"
        )


def _devices(plan: Plan) -> None:
    local = int(os.environ.get("LOCAL_WORLD_SIZE", plan.processes))
    if plan.device.kind != "cpu" and local > plan.device.count:
        raise RecipeError(
            f"command line: {local} processes for {plan.device.count} {plan.device.name}, and two processes cannot "
            f"share one. Start with --num_processes {plan.device.count}, or NPROC={plan.device.count}."
        )


def _sharding(plan: Plan) -> list[TandemError]:
    """Return what the launcher's config file or the recipe sets that was not tried with FSDP2 or tensor parallelism,
    and DeepSpeed, which is never supported."""
    settings = os.environ
    if settings.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        return [RecipeError(f"accelerate's config file: DeepSpeed is not supported. {FROM_FSDP2}")]
    tensor_parallel = tensor_parallel_size()
    fsdp = settings.get("FSDP_VERSION")
    if plan.processes == 1 or (fsdp is None and tensor_parallel == 1):
        return []
    recipe, train = plan.recipe, plan.recipe.train
    launcher = {
        "fsdp_version: 1": fsdp not in (None, "2"),
        "fsdp_offload_params: true": settings.get("FSDP_OFFLOAD_PARAMS", "").lower() == "true",
        "fsdp_activation_checkpointing: true": settings.get("FSDP_ACTIVATION_CHECKPOINTING", "").lower() == "true",
        "cp_size above 1": parallelism_size("cp") > 1,
        "sp_size above 1": parallelism_size("sp") > 1,
        "tp_size above 1 with FSDP": fsdp is not None and tensor_parallel > 1,
    }
    found = [
        f"accelerate's config file: {name} is not supported. {FROM_FSDP2}"
        for name, is_set in launcher.items()
        if is_set
    ]
    if fsdp is None:
        found += _tensor_parallel(plan, tensor_parallel)
    replicas, parts = parallelism_size("dp_replicate"), parallelism_size("dp_shard")
    if fsdp is not None and "PARALLELISM_CONFIG_DP_SHARD_SIZE" in settings and replicas * parts != plan.processes:
        found.append(
            f"accelerate's config file: dp_replicate_size {replicas} x dp_shard_size {parts} is not the number of "
            f"processes, {plan.processes}. Change --num_processes or one of the two."
        )
    of_trainer = recipe.optimizer.type == "trainer"
    plain_adamw = train.get("optim") in ("adamw_torch", "adamw_torch_fused")
    keys = {
        "train.fp8": train.get("fp8"),
        "train.fp16": train.get("fp16"),
        "model.embedding_dtype": recipe.model.embedding_dtype != "float32",
        "train.optim": of_trainer and (tensor_parallel > 1 or not plain_adamw),
        "train.torch_compile": tensor_parallel > 1 and train.get("torch_compile") is True,
    }
    layout = "FSDP2" if fsdp else "tensor parallel"
    for key, is_set in keys.items():
        if is_set:
            found.append(
                f"{recipe.where(key)}: is not supported with a sharded model ({layout}). Remove the key, or launch "
                "with accelerate_configs/ddp.yaml."
            )
    return [RecipeError(text) for text in found]


def _tensor_parallel(plan: Plan, size: int) -> list[str]:
    """Return why the processes cannot compute each layer together."""
    found = []
    if size != plan.processes:
        found.append(
            f"accelerate's config file: tp_size {size} is not the number of processes, {plan.processes}. Add "
            f"--parallelism_config_tp_size {plan.processes}, or launch with accelerate_configs/fsdp2.yaml."
        )
    if plan.sizes is not None and plan.sizes.model_type in BY_ARITHMETIC:
        for name, count in (("heads", plan.sizes.n_head), ("heads of keys and values", plan.sizes.n_kv_head)):
            if count % size:
                found.append(
                    f"{plan.recipe.path}: the model has {count} {name}, which {size} processes cannot share evenly "
                    "(tp_size). Take a number that divides it, or launch with accelerate_configs/fsdp2.yaml."
                )
    return found


def _disk(plan: Plan) -> None:
    """Raise DiskFullError without room for the checkpoints and the model that this run will still write: at least for
    two checkpoints and a fifth, since one is deleted only after the next one is whole.

    Checkpoints and model that are there count, since they will be replaced; the rest of the folder only grows.
    """
    if plan.checkpoint_bytes is None:
        return
    run = RunDirectory.of(plan.recipe.run)
    folder = run.path
    there = folder_bytes(run.checkpoints) + folder_bytes(run.model)
    least = int(LEAST_CHECKPOINTS * plan.checkpoint_bytes) + plan.queued_bytes
    needed = max(max(plan.run_disk_bytes or 0, least) - there, 0)
    if needed > _free(folder):
        raise DiskFullError(
            f"{folder}: checkpoints of {gigabytes(plan.checkpoint_bytes)} and the model will take {gigabytes(needed)} "
            f"more at once, and {gigabytes(_free(folder))} are free. Free some, lower train.save_total_limit, or set "
            "run.directory to a larger disk."
        )


def _temporary_folder(plan: Plan) -> None:
    """Raise DiskFullError without room for one checkpoint where the system has no memory for it
    (training/staging_buffer.py)."""
    folder, needed = Path(tempfile.gettempdir()), plan.checkpoint_bytes or 0
    if not has_memory_files() and needed > _free(folder):
        raise DiskFullError(
            f"{folder}: this system refuses files in memory (memfd_create), so checkpoints of {gigabytes(needed)} are "
            f"copied through this folder first, and {gigabytes(_free(folder))} are free. Set TMPDIR to a larger disk."
        )


def _free(folder: Path) -> int:
    return shutil.disk_usage(nearest_existing(folder)).free
