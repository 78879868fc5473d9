"""What a start trains with once nothing is open any more (micro-batch, steps, dtype, attention), on the console and in
the manifest."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainingArguments

from pipeline.hardware.device import device_info, model_replicas, tensor_parallel_size
from pipeline.plan.plan import Plan
from pipeline.recipe.model_sizes import sizes_from_model
from pipeline.run.open_run import OpenRun


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that was decided after the recipe was read."""

    device: str
    processes: int
    micro_batch: int  # rows of one forward pass of a process
    micro_steps: int  # forward passes of a process in a step
    batch_tokens: int
    steps: int
    start_from: str | None
    sharded: bool
    replicas: int
    tensor_parallel: int
    threads: int
    dtype: str
    compiled: bool
    attention: str

    def parallel_config(self) -> dict[str, Any]:
        """Return what the last bits of a training depend on: `shape` in the manifest."""
        others = ("batch_tokens", "steps", "start_from")
        return {name: value for name, value in vars(self).items() if name not in others}


def settings_of(
    args: TrainingArguments, *, attention: str, sharded: bool, batch_tokens: int, start_from: str | None, fp8: bool
) -> Settings:
    """Return what the trainer was built with, and what of the recipe its arguments do not hold."""
    dtype = "float32"
    if fp8:
        dtype = "float8"
    elif args.bf16:
        dtype = "bfloat16"
    elif args.fp16:
        dtype = "float16"
    return Settings(
        device=device_info().name,
        processes=args.world_size,
        micro_batch=args.per_device_train_batch_size,
        micro_steps=args.gradient_accumulation_steps,
        batch_tokens=batch_tokens,
        steps=args.max_steps,
        start_from=start_from,
        sharded=sharded,
        replicas=model_replicas(),
        tensor_parallel=tensor_parallel_size(),
        threads=torch.get_num_threads(),
        dtype=dtype,
        compiled=args.torch_compile,
        attention=attention,
    )


def print_run_config(run: OpenRun, settings: Settings) -> None:
    """Print how this start trains and keep it in the manifest; say so when a run continues otherwise.

    With the same values a resume is bitwise; with others the same rows follow and the losses agree to rounding.
    """
    config = settings.parallel_config()
    before = run.directory.read_manifest().get("shape")
    run.directory.update_manifest(shape=config)
    print(config_text(settings), flush=True)
    if not (run.step and before):
        return
    before = {"replicas": 1, "tensor_parallel": 1, **before}  # which earlier versions do not name
    changed = [f"{name} {before.get(name)} -> {value}" for name, value in config.items() if before.get(name) != value]
    if changed:
        print(
            f"note: going on with another shape ({'; '.join(changed)}): the same rows follow, equal to rounding but "
            "not bitwise.",
            flush=True,
        )


def config_text(settings: Settings) -> str:
    """Return the settings in words, for the console."""
    processes, micro_steps = settings.processes, settings.micro_steps
    plural = "" if processes == 1 else "es"
    parts = [f"{processes} process{plural}"]
    if settings.tensor_parallel > 1:
        parts.append("each layer split among them (tensor parallel)")
    elif settings.replicas > 1:
        parts.append(f"{settings.replicas} copies of the model, each sharded (HSDP)")
    elif settings.sharded:
        parts.append("the model sharded (FSDP2)")
    parts += [f"{settings.threads} threads", settings.dtype]
    if settings.compiled:
        parts.append("torch.compile")
    parts.append(f"attention {settings.attention}")
    parts.append(f"{settings.micro_batch} rows at once")
    if micro_steps > 1:
        parts.append(f"{micro_steps} times a step")
    return f"device: {settings.device}: {', '.join(parts)}"


def record_plan(run: OpenRun, model: Any, *, row_tokens: int, make: Callable[[], Plan]) -> None:
    """Write `model` and `plan` to the manifest, when steps and micro-batch are known: the report compares the plan with
    the outcome. A run that continues keeps its first plan, and make is not called."""
    facts: dict[str, Any] = {
        "class": type(model).__name__.removeprefix("FSDP"),  # torch's subclass of a sharded model
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }
    # By the built model, whose vocabulary may be smaller than the planned one.
    flops = sizes_from_model(model, row_tokens).flops_per_token("nanochat")
    if flops is not None:
        facts["flops_per_token"] = flops
    run.directory.update_manifest(model=facts)
    if not (run.step and "plan" in run.directory.read_manifest()):
        run.directory.update_manifest(plan=make().facts())
