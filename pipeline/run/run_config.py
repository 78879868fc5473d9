"""How a start trains (processes, micro-batch, dtype, attention) and what was planned, on the console and in the
manifest."""

from typing import Any

import torch

from pipeline.hardware.device import device_info, model_replicas, tensor_parallel_size
from pipeline.plan.plan import plan_of_run
from pipeline.recipe import Recipe
from pipeline.recipe.model_sizes import sizes_from_model
from pipeline.run.open_run import OpenRun
from pipeline.training.trainer import TandemTrainer


def print_run_config(run: OpenRun, trainer: TandemTrainer) -> None:
    """Print how this start trains and keep it in the manifest (`shape`); say so when a run continues otherwise.

    With the same values a resume is bitwise; with others the same rows follow and the losses agree to rounding.
    """
    if not trainer.is_world_process_zero():
        return
    config = parallel_config(trainer)
    before = run.directory.read_manifest().get("shape")
    run.directory.update_manifest(shape=config)
    print(config_text(config), flush=True)
    if not (run.step and before):
        return
    before = {"replicas": 1, "tensor_parallel": 1, **before}  # which earlier versions do not name
    changed = [f"{name} {before.get(name)} -> {value}" for name, value in config.items() if before.get(name) != value]
    if changed:
        print(
            f"note: continuing with another shape ({'; '.join(changed)}): the same rows follow, equal to rounding but "
            "not bitwise.",
            flush=True,
        )


def parallel_config(trainer: TandemTrainer) -> dict[str, Any]:
    """Return what the last bits of a training depend on."""
    args = trainer.args
    dtype = "float32"
    if trainer.recipe.train.get("fp8"):
        dtype = "float8"
    elif args.bf16:
        dtype = "bfloat16"
    elif args.fp16:
        dtype = "float16"
    return {
        "device": device_info().name,
        "processes": args.world_size,
        "micro_batch": args.per_device_train_batch_size,
        "micro_steps": args.gradient_accumulation_steps,
        "sharded": trainer.is_sharded,
        "replicas": model_replicas(),
        "tensor_parallel": tensor_parallel_size(),
        "threads": torch.get_num_threads(),
        "dtype": dtype,
        "compiled": args.torch_compile,
        "attention": trainer.model.config._attn_implementation,
    }


def config_text(config: dict[str, Any]) -> str:
    """Return the configuration in words, for the console."""
    processes, micro_steps = config["processes"], config["micro_steps"]
    parts = ["1 process" if processes == 1 else f"{processes} processes"]
    if config["tensor_parallel"] > 1:
        parts.append("each layer split among them (tensor parallel)")
    elif config["replicas"] > 1:
        parts.append(f"{config['replicas']} copies of the model, each sharded (HSDP)")
    elif config["sharded"]:
        parts.append("the model sharded (FSDP2)")
    parts += [f"{config['threads']} threads", config["dtype"]]
    if config["compiled"]:
        parts.append("torch.compile")
    parts.append(f"attention {config['attention']}")
    times = f", {micro_steps} times a step" if micro_steps > 1 else ""
    parts.append(f"{config['micro_batch']} rows at once{times}")
    return f"device: {config['device']}: {', '.join(parts)}"


def record_plan(recipe: Recipe, run: OpenRun, trainer: TandemTrainer) -> None:
    """Write `plan` and `model` to the manifest, when steps and micro-batch are known: the report compares the plan with
    the outcome. A run that continues keeps its first plan."""
    if not trainer.is_world_process_zero():
        return
    args, model = trainer.args, trainer.model
    facts: dict[str, Any] = {
        "class": type(model).__name__.removeprefix("FSDP"),  # torch's subclass of a sharded model
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }
    flops = sizes_from_model(model, recipe.data.row_tokens).flops_per_token("nanochat")
    if flops is not None:
        facts["flops_per_token"] = flops
    run.directory.update_manifest(model=facts)
    if run.step and "plan" in run.directory.read_manifest():
        return
    micro_batch, processes = args.per_device_train_batch_size, args.world_size
    plan = plan_of_run(recipe, run.directory, micro_batch=micro_batch, processes=processes)
    run.directory.update_manifest(plan=plan.facts())
