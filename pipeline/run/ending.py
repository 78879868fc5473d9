"""The end of a run on the terminal: what came of it, how long it took, where everything is, and what to type next."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeline.hardware.cpu import process_start
from pipeline.metrics import BEST_BY, is_evaluation, metric_of
from pipeline.process.commands import command, stage_command
from pipeline.process.progress import seconds_text
from pipeline.recipe import Recipe
from pipeline.run.open_run import OpenRun
from pipeline.run_dir.rows import last_attempts, read_rows
from pipeline.run_dir.run_directory import RunDirectory

# Recipes of stage 2 that are made for the models of one of stage 1, or of a recipe that extends it.
STAGE_2 = {"quickstart_pretrain": "quickstart_sft", "own_text": "own_chat", "fineweb_d24": "chat_sft_d24"}
SHOWN = (
    "core/v1",
    "core/v2",
    "chat/core",
)  # of scores that are not of a task of one's own, those that stand for the others


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
    """Return a line for each chat task that is split by subject: the share of right answers, before training and by subject."""
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
    return ", ".join(f"{name} {_from_to(name, found)}{_direction(name)}" for name in shown)


def _from_to(name: str, found: dict[str, float]) -> str:
    metric = metric_of(name)
    share = metric is not None and metric.unit == "share"
    first, last = (
        f"{100 * value:.1f} %" if share else f"{value:.3f}" for value in (found[f"{name}/first"], found[name])
    )
    return last if first == last else f"{first} -> {last}"


def _direction(name: str) -> str:
    metric = metric_of(name)
    return f" ({metric.better} is better)" if metric is not None and metric.better == "lower" else ""


def time_text(directory: RunDirectory, *, attempt: int, prepared: float | None) -> str:
    """Return how long this start took, and with what. prepared: when its first rows were ready, in seconds since 1970."""
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
