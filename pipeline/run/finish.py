"""The end of a run: model/, results, last words; and the shape and plan that its manifest keeps."""

import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from pipeline.hardware.device import device_info, model_replicas, tensor_parallel_size
from pipeline.hardware.processor import peak_bytes, process_start
from pipeline.metrics import BEST_BY, is_evaluation, metric_of
from pipeline.process.commands import command, stage_command
from pipeline.process.progress import seconds_text, waiting
from pipeline.recipe import Recipe
from pipeline.recipe.batch import is_auto
from pipeline.recipe.model_sizes import sizes_from_model
from pipeline.run.open_run import OpenRun
from pipeline.run_dir.failures import write_report
from pipeline.run_dir.rows import last_attempts, read_rows
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.training.build import write_finished_model
from pipeline.training.trainer import TandemTrainer

# The end of a run on the terminal: what came of it, how long it took, where everything is, and what to type next.

# Recipes of stage 2 that are made for the models of one of stage 1, or of a recipe that extends it.
STAGE_2 = {"quickstart_pretrain": "quickstart_sft", "own_text": "own_chat", "fineweb_d24": "chat_sft_d24"}
# Of scores that are not of a task of one's own, those that stand for the others.
SHOWN = ("core/v1", "core/v2", "chat/core")


def results(directory: RunDirectory) -> dict[str, float]:
    """Return the last value of each validation number, the first one as <name>/first, and the time trained."""
    rows = last_attempts(read_rows(directory.metrics))
    found: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            if is_evaluation(name):
                found.setdefault(f"{name}/first", value)
                found[name] = value
            elif name in ("train/loss", "perf/total_s", "tokens", "step"):
                found[name] = value
    return found


def answered(found: dict[str, float]) -> list[str]:
    """Return a line for each chat task that is split by subject: the share of right answers, before training and by
    subject."""
    lines = []
    for name in [name for name in found if name.startswith("chat/") and f"{name}/first" in found]:
        subjects = {
            n.removeprefix(f"{name}/"): share
            for n, share in found.items()
            if n.startswith(f"{name}/") and not n.endswith("/first")
        }
        if subjects:
            by_subject = ", ".join(f"{subject} {share:.0%}" for subject, share in subjects.items())
            first = "" if found[f"{name}/first"] == found[name] else f" (at first {found[f'{name}/first']:.1%})"
            lines.append(f"{name}: {found[name]:.1%} answered right{first}: {by_subject}")
    return lines


def last_words(recipe: Recipe, run: OpenRun) -> str:
    """Return the five lines that a run ends with, and before them the chat tasks by subject."""
    directory = run.directory
    found = results(directory)
    report = directory.report / "report.html"
    where = f"model     {directory.model}" + (f", report {report}" if report.is_file() else "")
    lines = [
        *answered(found),
        f"{directory.path}: finished",
        f"result    {result_text(found)}",
        f"time      {time_text(directory, attempt=run.attempt, prepared=run.prepared)}",
        where,
        *next_lines(recipe, directory),
    ]
    return "\n".join(lines)


def result_text(found: dict[str, float]) -> str:
    """Return the first and last value of what says most: the tasks, else the bits per byte, else the loss."""
    tasks = [
        name
        for name in found
        if name.startswith(("chat/", "core/"))
        and name.count("/") == 1
        and (name in SHOWN or ((metric := metric_of(name)) is not None and metric.unit == "share" and metric.console))
    ]
    scored = next((name for name in BEST_BY if name in found), None)
    shown = [*tasks, *([scored] if scored else [])]
    if not shown:
        return f"train/loss {found['train/loss']:.3f}" if "train/loss" in found else "no number was measured"
    return ", ".join(_from_to(name, found) for name in shown)


def _from_to(name: str, found: dict[str, float]) -> str:
    metric = metric_of(name)
    share = metric is not None and metric.unit == "share"
    first, last = (
        f"{100 * value:.1f} %" if share else f"{value:.3f}" for value in (found[f"{name}/first"], found[name])
    )
    lower = " (lower is better)" if metric is not None and metric.better == "lower" else ""
    return f"{name} {last if first == last else f'{first} -> {last}'}{lower}"


def time_text(directory: RunDirectory, *, attempt: int, prepared: float | None) -> str:
    """Return how long this start took, and with what. prepared: when its first rows were ready, in seconds since
    1970."""
    began, now, rows = process_start(), time.time(), read_rows(directory.metrics)
    own = [row for row in rows if row.get("attempt") == attempt]
    opened = next((row["time"] for row in own if row.get("event") == "attempt"), began)
    totals = [row["perf/total_s"] for row in own if "perf/total_s" in row]
    before = [row["perf/total_s"] for row in rows if "perf/total_s" in row and row.get("attempt", attempt) < attempt]
    trained = (totals[-1] - min(max(before, default=0.0), totals[0])) if totals else 0.0
    scored = sum(value for row in own for name, value in row.items() if name.endswith("/eval_s"))
    prepared = max(prepared or opened, opened)
    parts = {"start": opened - began, "preparation": prepared - opened, "training": trained, "evaluation": scored}
    parts["saving and the rest"] = max(now - began - sum(parts.values()), 0.0)
    starts = f" in this start, the {_ordinal(attempt)}" if attempt > 1 else ""
    return f"{seconds_text(now - began)}{starts}: " + ", ".join(
        f"{name} {seconds_text(s)}" for name, s in parts.items()
    )


def _ordinal(number: int) -> str:
    suffix = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"


def next_lines(recipe: Recipe, directory: RunDirectory) -> Iterable[str]:
    """Yield what a person would want to do now, to be pasted into the shell that started the run."""
    prompt = next((prompt for prompt in recipe.samples.prompts if prompt.strip() and "\n" not in prompt), None)
    ask = ["-p", prompt] if prompt else []
    yield f"talk      {command('chat', directory.path, *ask)}"
    if recipe.stage == "pretrain":
        start = f"model.start_from={directory.path}"
        fitting = _stage_2(recipe, directory.read_manifest())
        if fitting == "own_chat":
            yield f"stage 2   {stage_command(fitting, 'sft', [start])} 'data.sources=[{{files: my_chats.jsonl}}]'"
        else:
            yield f"stage 2   {stage_command(fitting, 'sft', [start]) if fitting else command('sft', 'RECIPE', start)}"


def _stage_2(recipe: Recipe, manifest: dict[str, Any]) -> str | None:
    """Return the shipped recipe of stage 2 for this one: it, or one that it extends, is what that is made for."""
    files = [place.rpartition(":")[0] for place in recipe.places.values()]
    stems = {manifest.get("recipe_name"), *(Path(file).stem for file in files)}
    return next((second for first, second in STAGE_2.items() if first in stems), None)


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
        f"{name} {before.get(name)} -> {value}"
        for name, value in shape.items()
        if before and before.get(name) != value
    ]
    if run.step and changed:
        print(
            f"note: going on with another shape ({'; '.join(changed)}): the same rows follow, equal to rounding but "
            "not bitwise.",
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


def record_plan(recipe: Recipe, run: OpenRun, trainer: TandemTrainer) -> None:
    """Write `plan` and `model` to the manifest, when steps and micro-batch are known: the two sides of the report's
    plan against outcome. A run that goes on keeps its first plan.

    The plan is arithmetic on the recipe, and what a probe has measured for it: nothing is measured here, so that the
    training starts at once, and nothing is read from the model that was built.
    """
    if not trainer.is_world_process_zero():
        return
    model = trainer.model
    flops = sizes_from_model(model, recipe.data.row_tokens).flops_per_token("nanochat")
    facts: dict[str, Any] = {
        "model": {
            "class": type(model).__name__.removeprefix("FSDP"),  # torch's subclass of a sharded model
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            **({} if flops is None else {"flops_per_token": flops}),
        }
    }
    if not (run.step and "plan" in run.directory.read_manifest()):
        facts["plan"] = plan_of(recipe, run, trainer).facts()
    run.directory.update_manifest(**facts)


def plan_of(recipe: Recipe, run: OpenRun, trainer: TandemTrainer) -> Any:
    from pipeline.plan.plan import plan_of_run

    args = trainer.args
    return plan_of_run(recipe, run.directory, micro_batch=args.per_device_train_batch_size, processes=args.world_size)


def finish_run(recipe: Recipe, run: OpenRun, trainer: TandemTrainer, publishing: Any) -> None:
    """Write the finished model, its results and the report, and publish it (publishing: run_dir/hub_queue.py; None
    without hub.id). Every rank calls it, the first one acts."""
    directory = run.directory
    model = trainer.accelerator.unwrap_model(trainer.model)
    weights = model.state_dict()
    if trainer.is_sharded:
        from pipeline.training.sharding import whole_on_rank_0

        weights = whole_on_rank_0(weights)
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
        may_grow = trainer.args.device.type == "cuda" and not is_auto(recipe)
        if may_grow:
            from pipeline.plan.plan import memory_hint

            if hint := memory_hint(recipe, trainer):
                print(f"note: {hint}")
        from pipeline.data.losses import table

        with open(directory.console, "a", encoding="utf-8") as log:  # by now all that the run read is prepared
            log.write(f"{table(trainer.rows.plan)}\n")
        _look_back(run.directory)
    # The process group is left to the end of the process: taking it down while DDP still holds it can deadlock in
    # gloo.
    trainer.accelerator.wait_for_everyone()
    if trainer.is_world_process_zero():
        if publishing is not None:
            publishing.finish()  # alone: no other rank waits for a service
        # Last: a run cut off before this does its end again, after it the same command says so and exits 0.
        directory.update_manifest(finished=time.time())
        print(last_words(recipe, run), flush=True)


def _peak_memory(trainer: TandemTrainer) -> dict[str, int]:
    found = {"host": peak_bytes()}
    return found | ({"device": trainer.log_row.memory.peak()} if trainer.args.device.type == "cuda" else {})


def _look_back(directory: RunDirectory) -> None:
    """Write the report. An error of it is printed: the run is whole without it."""
    with waiting("writing the report", after_s=1.0):
        problem = write_report(directory)
    if problem:
        print(
            f"{problem}\n{directory.report}: the report could not be written, for the reason above; nothing else of "
            f"the run depends on it. To try again: {command('report', directory.path)}",
            file=sys.stderr,
        )
