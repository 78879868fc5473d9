"""The shape a run is trained on: what may change between two starts, at the price of the last bits."""

import sys
import time
import traceback
from dataclasses import asdict
from typing import Any

import torch

from pipeline.data.summary import table
from pipeline.hardware.cpu import peak_bytes
from pipeline.hardware.device import device_info, model_replicas, tensor_parallel_size
from pipeline.preflight.plan import Plan, make_plan, remember
from pipeline.process.commands import command
from pipeline.process.progress import waiting
from pipeline.recipe import Recipe
from pipeline.recipe.schema import with_values
from pipeline.recipe.sizes import sizes_from_model
from pipeline.run.batch_size import memory_hint
from pipeline.run.ending import last_words, results
from pipeline.run.open_run import OpenRun
from pipeline.run.publishing import Publishing
from pipeline.run_dir.failures import write_report
from pipeline.training.build import mark_finished, write_finished_model
from pipeline.training.sharding import whole_on_rank_0
from pipeline.training.trainer import TandemTrainer


def say_shape(run: OpenRun, trainer: TandemTrainer) -> None:
    """Print the shape of this start and keep it in the manifest; say so when a run goes on with another one.

    On the same shape a resume is bitwise; on another one the same rows follow and the losses agree to rounding.
    """
    args = trainer.args
    if not trainer.is_world_process_zero():
        return
    half = "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32"
    shape = {
        "device": device_info().name,
        "processes": args.world_size,
        "micro_batch": args.per_device_train_batch_size,
        "micro_steps": args.gradient_accumulation_steps,
        "sharded": trainer.is_sharded,
        "replicas": model_replicas(),
        "tensor_parallel": tensor_parallel_size(),
        "threads": torch.get_num_threads(),
        "dtype": "float8" if trainer.recipe.train.get("fp8") else half,
        "compiled": args.torch_compile,
        "attention": trainer.model.config._attn_implementation,
    }
    before = run.directory.read_manifest().get("shape")
    run.directory.update_manifest(shape=shape)
    print(shape_text(shape), flush=True)
    before = before and {"replicas": 1, "tensor_parallel": 1, **before}  # which earlier versions do not name
    changed = [
        f"{name} {before.get(name)} -> {value}" for name, value in shape.items() if before and before.get(name) != value
    ]
    if run.step and changed:
        print(
            f"note: going on with another shape ({'; '.join(changed)}): the same rows follow, equal to rounding but not bitwise.",
            flush=True,
        )


def shape_text(shape: dict[str, Any]) -> str:
    """Return the shape in words, for the console."""
    processes, rows, passes = shape["processes"], shape["micro_batch"], shape["micro_steps"]
    replicas, tensor_parallel = shape.get("replicas", 1), shape.get("tensor_parallel", 1)
    parts = [
        f"{processes} process" + ("es" if processes > 1 else ""),
        *(["the model sharded (FSDP2)"] if shape["sharded"] and replicas == tensor_parallel == 1 else []),
        *([f"{replicas} copies of the model, each sharded (HSDP)"] if replicas > 1 else []),
        *(["each layer split among them (tensor parallel)"] if tensor_parallel > 1 else []),
        f"{shape['threads']} threads",
        shape["dtype"],
        *(["torch.compile"] if shape["compiled"] else []),
        f"attention {shape['attention']}",
        f"{rows} rows at once" + (f", {passes} times a step" if passes > 1 else ""),
    ]
    return f"device: {shape['device']}: {', '.join(parts)}"


# What a run promised and what it was built as, in its manifest: the two sides of the report's plan against outcome.

PARTS = ("total", "start", "steps", "evaluations", "saves")


def record_plan(recipe: Recipe, run: OpenRun, trainer: TandemTrainer) -> None:
    """Write `plan` and `model` to the manifest, when steps and micro-batch are known. A run that goes on keeps its first plan.

    The plan is arithmetic on the recipe, and what a probe has measured for it: nothing is measured here, so that the training
    starts at once, and nothing is read from the model that was built.
    """
    if not trainer.is_world_process_zero():
        return
    model = trainer.model
    flops = sizes_from_model(model, recipe.data.row_tokens).flops_per_token("nanochat")
    facts: dict[str, Any] = {
        "model": _known(
            {
                "class": type(model).__name__.removeprefix("FSDP"),  # torch's subclass of a sharded model
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "flops_per_token": flops,
            }
        )
    }
    if not (run.step and "plan" in run.directory.read_manifest()):
        facts["plan"] = plan_facts(plan_of(recipe, run, trainer))
    run.directory.update_manifest(**facts)


def plan_of(recipe: Recipe, run: OpenRun, trainer: TandemTrainer) -> Plan:
    """Return the plan of the run as it was built: its micro-batch, and the validation that it scores."""
    recipe = with_values(recipe, {"train.per_device_train_batch_size": trainer.args.per_device_train_batch_size})
    scored = run.directory.read_manifest().get("inputs", {}).get("validation_bytes")
    scored_bytes = sum(scored.values()) if scored else None
    return make_plan(recipe, device_info(), processes=trainer.args.world_size, scored_bytes=scored_bytes)


def plan_facts(plan: Plan) -> dict[str, Any]:
    """Return the plan as run_manifest.json holds it (run_dir/manifest.py); what is not known is left out."""
    memory = plan.memory
    parts = {name: getattr(memory, name) for name in ("weights", "gradients", "optimizer", "activations", "process", "saved", "total")} if memory else {}  # fmt: skip
    parameters = plan.sizes.parameters() if plan.sizes else {}
    expected = plan.val_bpb
    cost, energy, duration = plan.cost, plan.energy_kwh, plan.duration
    return _known(
        {
            "device": plan.device.name,
            "processes": plan.processes,
            "parameters": parameters.get("total"),
            "scaling_parameters": plan.sizes.scaling if plan.sizes else None,
            "steps": plan.steps,
            "tokens": plan.tokens,
            "flops": plan.flops,
            "memory_bytes": _known(parts) or None,
            "process_bytes": plan.process_bytes,
            "checkpoint_bytes": plan.checkpoint_bytes,
            "run_disk_bytes": plan.run_disk_bytes,
            "training_s": plan.training_s,
            "duration_s": {name: asdict(getattr(duration, name)) for name in PARTS} if duration else None,
            "duration_source": duration.source if duration else None,
            "cost": cost.value if cost else None,
            "energy_kwh": energy.value if energy else None,
            "probe": plan.probe.facts() if plan.probe else None,
            "val_bpb": expected.facts() if expected else None,
        }
    )


def _known(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if value is not None}


# The end of a run: model/, results, report, and the next command to type.


def finish_run(recipe: Recipe, run: OpenRun, trainer: TandemTrainer, publishing: Publishing) -> None:
    """Write the finished model and its results, and publish it. Every rank calls it, the first one acts."""
    directory = run.directory
    model = trainer.accelerator.unwrap_model(trainer.model)
    weights = whole_on_rank_0(model.state_dict())
    if trainer.is_world_process_zero():
        with waiting("writing the model", after_s=1.0):
            write_finished_model(
                directory,
                model,
                trainer.processing_class,
                weights=weights,
                dtype=recipe.hub.dtype,
                step=trainer.state.global_step,
            )
        directory.update_manifest(
            status="finished",
            ended=time.time(),
            results=results(directory),
            shares=trainer.rows.shares(),
            peak_memory_bytes=_peak_memory(trainer),
        )
        if hint := memory_hint(recipe, trainer):
            print(f"note: {hint}")
        with open(
            directory.console, "a", encoding="utf-8"
        ) as log:  # of the data: by now all that the run read is prepared
            log.write(f"{table(trainer.rows.plan)}\n")
        _look_back(recipe, run, trainer)
    # The process group is left to the end of the process: taking it down while DDP still holds it can deadlock in gloo.
    trainer.accelerator.wait_for_everyone()
    if trainer.is_world_process_zero():
        publishing.finish()  # alone: no other rank waits for a service
        mark_finished(directory)  # last: a run cut off before this does its end again
        print(last_words(recipe, run), flush=True)


def _peak_memory(trainer: TandemTrainer) -> dict[str, int]:
    found = {"host": peak_bytes()}
    return found | ({"device": trainer.log_row.memory.peak()} if trainer.args.device.type == "cuda" else {})


def _look_back(recipe: Recipe, run: OpenRun, trainer: TandemTrainer) -> None:
    """Write the report and keep what the run took. An error of theirs is printed: the run is whole without them."""
    directory = run.directory
    with waiting("writing the report", after_s=1.0):
        problem = write_report(directory)
    try:
        if run.step == 0:  # one that was stopped and went on tells nothing of a start
            remember(plan_of(recipe, run, trainer), directory)
    except Exception:
        problem = "\n".join(filter(None, [problem, traceback.format_exc()]))
    if problem:
        print(
            f"{problem}\n{directory.report}: the report, or the record of its times, could not be written, for the reason above; nothing else of the run depends on it. "
            f"To try again: {command('report', directory.path)}",
            file=sys.stderr,
        )
