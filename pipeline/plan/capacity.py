"""Findings on a plan: whether its devices, their layout and the disk can take the run, and what it would waste.

check_before_training imports it; what this machine lacks beside, run/checks.py finds.
"""

import os
import shutil
import tempfile
from pathlib import Path

from pipeline.hardware.device import batch_ranks, parallelism_size, tensor_parallel_size
from pipeline.hardware.processor import has_memory_files
from pipeline.plan.memory import DEVICE_SHARE, queued_bytes
from pipeline.plan.plan import Plan, gibibytes, gigabytes, make_plan
from pipeline.process.errors import DiskFullError, OutOfMemoryError, RecipeError, TandemError, raised
from pipeline.process.storage import cache_dir, folder_bytes, nearest_existing
from pipeline.recipe import Recipe
from pipeline.recipe.batch import micro_batch, step_rows
from pipeline.recipe.checks import check_halvings
from pipeline.recipe.identity import run_folder
from pipeline.recipe.located_yaml import Problems
from pipeline.recipe.model_statistics import chosen_sizes
from pipeline.recipe.schema import OPTIM_ARGS
from pipeline.recipe.sizes import Sizes
from pipeline.run_dir.run_directory import RunDirectory

WASTE_WORTH_A_NOTE = 0.05
SURELY = 0.9  # of the estimate of memory, which is right to about a tenth: below this nothing is refused
SMALLER = "Set train.activation_checkpointing: true, make the model smaller, or use a larger device."
LEAST_CHECKPOINTS = 2.2  # that the disk must hold, however few are planned


def find_problems(plan: Plan, *, on_this_machine: bool) -> list[TandemError]:
    """Return what keeps the run from its devices and disk; on_this_machine, machine_problems (checks.py) has the rest.
    Not on_this_machine: its device is another one, and only arithmetic counts."""
    problems = [*raised(_batch, plan), *raised(_memory, plan)]
    if on_this_machine:
        problems += [*raised(_devices, plan), *_sharding(plan), *raised(_disk, plan), *raised(_temporary_folder, plan)]
    return problems


def find_notes(plan: Plan) -> list[str]:
    """Return what works and still deserves a sentence."""
    recipe = plan.recipe
    notes = [
        *recipe.notes,
        *_chosen_sizes(recipe),
        *_unused_optim_args(recipe.train, recipe.where("train.optim_args")),
    ]
    if plan.padding_share > WASTE_WORTH_A_NOTE:
        notes.append(
            f"{recipe.where('data.batch_tokens')}: a step has {plan.rows_per_pass * plan.micro_steps - _rows(plan)} "
            f"rows of padding beside its {_rows(plan)}, which costs {100 * plan.padding_share:.0f} % of the time. "
            f"Choose rows and processes whose product divides {_rows(plan)}."
        )
    notes += filter(None, [memory_doubt(plan), *_smaller_steps(plan)])
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


def _unused_optim_args(train: dict, where: str) -> list[str]:
    """Return what transformers does not use of train.optim_args as it is written (findings/trainer_optim_args*.sh)."""
    given, optimizer = train.get("optim_args"), train.get("optim", "adamw_torch_fused")
    if not given or optimizer not in OPTIM_ARGS:
        return []
    unused = []
    for pair in given.replace(" ", "").split(","):
        name, _, value = pair.partition("=")
        # bool("False") is True there.
        taken_for_true = optimizer == "stable_adamw" and value.lower() in ("false", "0", "no")
        if name not in OPTIM_ARGS[optimizer] or taken_for_true:
            unused.append(pair)
    if not unused:
        return []
    instead = " Decay is train.weight_decay." if "weight_decay" in given else ""
    return [f"{where}: transformers does not use {', '.join(unused)} for {optimizer}. Remove it.{instead}"]


def _chosen_sizes(recipe: Recipe) -> list[str]:
    """Return the sizes that a config of transformers has beside those that the recipe names."""
    try:
        chosen = chosen_sizes(recipe.model, recipe.tokenizer.vocab_size or 512)
    except ImportError:
        return []
    listed = ", ".join(f"{name} {value}" for name, value in chosen.items())
    return (
        [f"{recipe.where('model.type')}: {recipe.model.type} gets {listed}; model.options sets others."]
        if chosen
        else []
    )


def _rows(plan: Plan) -> int:
    return plan.batch_tokens // plan.recipe.data.row_tokens


def memory_doubt(plan: Plan) -> str | None:
    """Return a sentence where the micro-batch needs more than the device has, by the estimate; None where it fits."""
    memory, limit, rows = plan.memory, _device_bytes(plan), micro_batch(plan.recipe)
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


def _smaller_steps(plan: Plan) -> list[str]:
    """Return sentences on the smaller steps of a batch warm-up: those that save no time, and those that are compiled
    one by one."""
    rows, own, notes = step_rows(plan.recipe), micro_batch(plan.recipe), []
    if not rows.halvings:
        return []
    where, first, parts = plan.recipe.where("optimizer.schedule.batch_halvings"), rows.at(0), 2**rows.halvings
    computed = plan.micro_steps * batch_ranks(plan.processes) * -(-own // parts)
    if own % parts and 1 - first / computed > WASTE_WORTH_A_NOTE:
        notes.append(
            f"{where}: a first step of {first} rows computes {computed}, since a process's micro-batch of {own} rows "
            f"cannot be halved {rows.halvings} times: such steps take longer than the plan and perf/eta_s count by "
            f"their rows. Halve less often, or let train.per_device_train_batch_size be a multiple of {parts}."
        )
    if plan.compiled:
        notes.append(
            f"{where}: torch.compile meets a new batch size at each of the {rows.halvings} doublings and may compile "
            "again in the middle of the run; whether the steps after it are as fast was not measured. Set "
            "train.torch_compile: false, or compare perf/step_s with a run without a warm-up of the batch."
        )
    return notes


def _device_bytes(plan: Plan) -> float | None:
    """Memory of one process's device; processes on a CPU share its memory."""
    if plan.device.memory_gib is None:
        return None
    share = plan.processes if plan.device.kind == "cpu" else 1
    return plan.device.memory_gib * 2**30 / share


def _batch(plan: Plan) -> None:
    if batch_ranks(plan.processes) > _rows(plan):
        raise RecipeError(
            f"{plan.recipe.where('data.batch_tokens')}: a step of {plan.batch_tokens} tokens has {_rows(plan)} rows, "
            f"and {plan.processes} processes would leave some without any. Start fewer processes, or make the batch "
            "larger."
        )
    problems = Problems()
    check_halvings(plan.recipe, problems)  # known only now, where the batch follows from the processes
    problems.raise_if_any()


def _memory(plan: Plan) -> None:
    limit = _device_bytes(plan)
    if plan.memory is None or plan.memory.fixed is None or limit is None:
        return
    if plan.memory.fixed > limit:
        raise OutOfMemoryError(
            f"{plan.recipe.path}: weights, gradients and optimizer take {gibibytes(plan.memory.fixed)}, and "
            f"{plan.device.name} has {gibibytes(limit)} a process: no micro-batch fits. Make the model smaller, or "
            f"use a larger device{_or_shard(plan, limit)}."
        )
    least = plan.least_memory.total if plan.least_memory else None
    if least and least * SURELY > limit:
        raise OutOfMemoryError(
            f"{plan.recipe.path}: a micro-batch of one row is estimated to need {gibibytes(least)}, and "
            f"{plan.device.name} has {gibibytes(limit)} a process: none fits. {SMALLER}"
        )


def _or_shard(plan: Plan, limit: float) -> str:
    """Return the advice to shard the model, where that would make it fit."""
    if plan.shards == plan.processes:
        return ""
    memory = make_plan(plan.recipe, plan.device, processes=plan.processes, shards=plan.processes).memory
    shared = memory.fixed if memory else None
    if shared is None or shared > limit:
        return ""
    return (
        f", or share it among the {plan.processes} processes (accelerate_configs/fsdp2.yaml), of which each needs "
        f"{gibibytes(shared)} then"
    )


def _devices(plan: Plan) -> None:
    local = int(os.environ.get("LOCAL_WORLD_SIZE", plan.processes))
    if plan.device.kind != "cpu" and local > plan.device.count:
        raise RecipeError(
            f"command line: {local} processes for {plan.device.count} {plan.device.name}, and two processes cannot "
            f"share one. Start with --num_processes {plan.device.count}, or NPROC={plan.device.count}."
        )


def _sharding(plan: Plan) -> list[TandemError]:
    """Return what FSDP2 and tensor parallelism are not tried with, where the launcher asks for them, and DeepSpeed,
    which is never supported."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        return [
            RecipeError(
                "accelerate's config file: DeepSpeed is not supported. Start from accelerate_configs/fsdp2.yaml."
            )
        ]
    tensor_parallel = tensor_parallel_size()
    fsdp = os.environ.get("FSDP_VERSION")
    if plan.processes == 1 or (fsdp is None and tensor_parallel == 1):
        return []
    recipe, train = plan.recipe, plan.recipe.train
    launcher = {
        "fsdp_version: 1": fsdp not in (None, "2"),
        "fsdp_offload_params: true": os.environ.get("FSDP_OFFLOAD_PARAMS", "").lower() == "true",
        "fsdp_activation_checkpointing: true": os.environ.get("FSDP_ACTIVATION_CHECKPOINTING", "").lower() == "true",
        **{f"{name}_size above 1": parallelism_size(name) > 1 for name in ("cp", "sp")},
        "tp_size above 1 with FSDP": fsdp is not None and tensor_parallel > 1,
    }
    keys = {
        "train.fp8": train.get("fp8"),
        "train.fp16": train.get("fp16"),
        "model.embedding_dtype": recipe.model.embedding_dtype != "float32",
        "train.optim": recipe.optimizer.type == "trainer"
        and (tensor_parallel > 1 or train.get("optim") not in ("adamw_torch", "adamw_torch_fused")),
        "train.torch_compile": tensor_parallel > 1 and train.get("torch_compile") is True,
    }
    found = [
        f"accelerate's config file: {setting} is not supported. Start from accelerate_configs/fsdp2.yaml."
        for setting, is_set in launcher.items()
        if is_set
    ]
    if fsdp is None:
        found += _tensor_parallel(plan, tensor_parallel)
    replicas, parts = parallelism_size("dp_replicate"), parallelism_size("dp_shard")
    if fsdp is not None and "PARALLELISM_CONFIG_DP_SHARD_SIZE" in os.environ and replicas * parts != plan.processes:
        found.append(
            f"accelerate's config file: dp_replicate_size {replicas} x dp_shard_size {parts} is not the number of "
            f"processes, {plan.processes}, so no groups of processes can share the copies of the model. Change "
            "--num_processes or one of the two."
        )
    found += [
        (
            f"{recipe.where(key)}: is not supported with a sharded model ({'FSDP2' if fsdp else 'tensor parallel'}). "
            "Remove the key, or launch with accelerate_configs/ddp.yaml."
        )
        for key, is_set in keys.items()
        if is_set
    ]
    return [RecipeError(text) for text in found]


def _tensor_parallel(plan: Plan, size: int) -> list[str]:
    """Return why the processes cannot compute each layer together."""
    found = []
    if size != plan.processes:
        found.append(
            f"accelerate's config file: tp_size {size} is not the number of processes, {plan.processes}, and copies "
            "of a model that is split by layers are not supported. Add --parallelism_config_tp_size "
            f"{plan.processes}, or launch with accelerate_configs/fsdp2.yaml."
        )
    sizes = plan.sizes if isinstance(plan.sizes, Sizes) else None
    for name, count in (("heads", sizes.n_head), ("heads of keys and values", sizes.n_kv_head)) if sizes else ():
        if count % size:
            found.append(
                f"{plan.recipe.path}: the model has {count} {name}, which {size} processes cannot share evenly "
                "(tp_size). Take a number of processes that divides it, or launch with accelerate_configs/fsdp2.yaml."
            )
    return found


def _disk(plan: Plan) -> None:
    """Ask for room for the checkpoints and the model that this run will still write; for two of them and a fifth at
    the least, since a checkpoint is deleted only after the next one is whole.

    What lies there counts where it will be replaced: the rest of the folder (quarantine/, wandb/) only grows.
    """
    folder = run_folder(plan.recipe)
    if plan.checkpoint_bytes is None or plan.sizes is None:
        return
    run = RunDirectory(folder)
    there = folder_bytes(run.checkpoints) + folder_bytes(run.model)
    least = int(LEAST_CHECKPOINTS * plan.checkpoint_bytes) + queued_bytes(plan.recipe, plan.sizes)
    needed = max(max(plan.run_disk_bytes or 0, least) - there, 0)
    if needed > _free(folder):
        raise DiskFullError(
            f"{folder}: checkpoints of {gigabytes(plan.checkpoint_bytes)} and the model will take {gigabytes(needed)} "
            f"more at once, and {gigabytes(_free(folder))} are free. Free some, lower train.save_total_limit, or set "
            "run.directory to a larger disk."
        )


def _temporary_folder(plan: Plan) -> None:
    """Ask for room for one checkpoint where the system has no memory for it (training/checkpoint.py)."""
    folder, needed = Path(tempfile.gettempdir()), plan.checkpoint_bytes or 0
    if not has_memory_files() and needed > _free(folder):
        raise DiskFullError(
            f"{folder}: this system refuses files in memory (memfd_create), so checkpoints of {gigabytes(needed)} are "
            f"copied through this folder first, and {gigabytes(_free(folder))} are free. Set TMPDIR to a larger disk."
        )


def _free(folder: Path) -> int:
    return shutil.disk_usage(nearest_existing(folder)).free
