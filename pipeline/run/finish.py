"""The end of a run: model/, its results in the manifest, the report, and the summary on the terminal."""

import sys
import time
from pathlib import Path
from typing import Any

from pipeline.data.losses import table
from pipeline.hardware.processor import peak_bytes, process_start
from pipeline.metrics import BEST_BY, is_evaluation, metric_of
from pipeline.process.commands import command, stage_command
from pipeline.process.progress import seconds_text, waiting
from pipeline.run.open_run import OpenRun
from pipeline.run_dir.failures import write_report
from pipeline.run_dir.rows import last_attempts, read_rows
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.training.build import write_finished_model
from pipeline.training.trainer import TandemTrainer

# Recipes of stage 2 that are made for the models of one of stage 1, or of a recipe that extends it.
STAGE_2 = {"quickstart_pretrain": "quickstart_sft", "own_text": "own_chat", "fineweb_d24": "chat_sft_d24"}
# Scores that sum up the others, where a task is not the user's.
SHOWN = ("core/v1", "core/v2", "chat/core")


def finish_run(directory: RunDirectory, trainer: TandemTrainer, publishing: Any, *, dtype: str) -> None:
    """Write the finished model in this dtype, its results and the report, and publish it (publishing:
    run_dir/hub_queue.py; None without hub.id). Every rank calls it, the first one acts."""
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
                dtype=dtype,
                step=trainer.state.global_step,
            )
        directory.update_manifest(
            status="finished",
            ended=time.time(),
            results=results(directory),
            shares=trainer.rows.shares(),
            peak_memory_bytes=_peak_memory(trainer),
        )
        with open(directory.console, "a", encoding="utf-8") as log:  # by now all that the run read is prepared
            log.write(f"{table(trainer.rows.plan)}\n")
        _write_report(directory)
    # The process group is left to the end of the process: taking it down while DDP still holds it can deadlock in
    # gloo.
    trainer.accelerator.wait_for_everyone()
    if trainer.is_world_process_zero():
        if publishing is not None:
            publishing.finish()  # alone: no other rank waits for a service
        # Last: a run cut off before this does its end again, after it the same command says so and exits 0.
        directory.update_manifest(finished=time.time())


def _peak_memory(trainer: TandemTrainer) -> dict[str, int]:
    found = {"host": peak_bytes()}
    if trainer.args.device.type == "cuda":
        found["device"] = trainer.log_row.memory.peak()
    return found


def _write_report(directory: RunDirectory) -> None:
    """Write the report. An error of it is printed: the run is whole without it."""
    with waiting("writing the report", after_s=1.0):
        problem = write_report(directory)
    if problem:
        print(
            f"{problem}\n{directory.report}: the report could not be written, for the reason above; nothing else of "
            f"the run depends on it. To try again: {command('report', directory.path)}",
            file=sys.stderr,
        )


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


def subject_lines(found: dict[str, float]) -> list[str]:
    """Return a line for each chat task that is split by subject: the share of right answers, before training and by
    subject."""
    lines = []
    for name, score in found.items():
        first = found.get(f"{name}/first")
        subjects = []
        for other, share in found.items():
            if other.startswith(f"{name}/") and not other.endswith("/first"):
                subjects.append(f"{other.removeprefix(f'{name}/')} {share:.0%}")
        if name.startswith("chat/") and first is not None and subjects:
            before = "" if first == score else f" (at first {first:.1%})"
            lines.append(f"{name}: {score:.1%} answered right{before}: {', '.join(subjects)}")
    return lines


def print_summary(run: OpenRun, *, stage: str, prompts: list[str], files: list[str]) -> None:
    """Print the five lines that a run ends with, and before them the chat tasks by subject.

    prompts: of its samples, of which one is proposed. files: of the recipe and of those that it extends.
    """
    directory = run.directory
    found = results(directory)
    report = directory.report / "report.html"
    with_report = f", report {report}" if report.is_file() else ""
    lines = [
        *subject_lines(found),
        f"{directory.path}: finished",
        f"result    {result_text(found)}",
        f"time      {time_text(directory, attempt=run.attempt)}",
        f"model     {directory.model}{with_report}",
        *next_lines(directory, stage=stage, prompts=prompts, files=files),
    ]
    print("\n".join(lines), flush=True)


def result_text(found: dict[str, float]) -> str:
    """Return the first and last value of what says most: the tasks, else the bits per byte, else the loss."""
    shown = [name for name in found if _is_shown_task(name)]
    shown += [name for name in BEST_BY if name in found][:1]
    if shown:
        return ", ".join(_from_to(name, found) for name in shown)
    if "train/loss" in found:
        return f"train/loss {found['train/loss']:.3f}"
    return "no number was measured"


def _is_shown_task(name: str) -> bool:
    if not name.startswith(("chat/", "core/")) or name.count("/") != 1:
        return False
    metric = metric_of(name)
    return name in SHOWN or (metric is not None and metric.unit == "share" and metric.console)


def _from_to(name: str, found: dict[str, float]) -> str:
    metric = metric_of(name)
    form = "{:.3f}"
    if metric is not None and metric.unit == "share":
        form = "{:.1%}"
    values = (found[f"{name}/first"], found[name])
    texts = dict.fromkeys(form.format(value).replace("%", " %") for value in values)  # equal ones once
    text = f"{name} {' -> '.join(texts)}"
    if metric is not None and metric.better == "lower":
        text += " (lower is better)"
    return text


def time_text(directory: RunDirectory, *, attempt: int) -> str:
    """Return how long this start took, and of that the steps and the evaluations."""
    rows = read_rows(directory.metrics)
    scored = trained_before = trained = 0.0
    for row in rows:
        total_s = row.get("perf/total_s", 0.0)  # of the steps, over all attempts
        if row.get("attempt", attempt) < attempt:
            trained_before = max(trained_before, total_s)
            continue
        trained = max(trained, total_s)
        scored += sum(value for name, value in row.items() if name.endswith("/eval_s"))
    trained = max(trained - trained_before, 0.0)
    start = f" in start {attempt}" if attempt > 1 else ""
    whole = seconds_text(time.time() - process_start())
    return f"{whole}{start}: training {seconds_text(trained)}, evaluation {seconds_text(scored)}"


def next_lines(directory: RunDirectory, *, stage: str, prompts: list[str], files: list[str]) -> list[str]:
    """Return the commands that a person would type next in the shell that started the run."""
    # One that a shell takes in a line; without any the command opens a conversation.
    one_line = [prompt for prompt in prompts if prompt.strip() and "\n" not in prompt]
    words = ["-p", one_line[0]] if one_line else []
    lines = [f"talk      {command('chat', directory.path, *words)}"]
    if stage == "pretrain":
        recipes = {directory.read_manifest().get("recipe_name"), *(Path(file).stem for file in files)}
        lines.append(f"stage 2   {stage_2_command(recipes, directory)}")
    return lines


def stage_2_command(recipes: set[str | None], directory: RunDirectory) -> str:
    """Return the command of stage 2: of the shipped recipe that is made for one of these, where there is one."""
    start = f"model.start_from={directory.path}"
    fitting = [second for first, second in STAGE_2.items() if first in recipes]
    if not fitting:
        return command("sft", "RECIPE", start)
    text = stage_command(fitting[0], "sft", [start])
    if fitting[0] == "own_chat":
        text += " 'data.sources=[{files: my_chats.jsonl}]'"
    return text
