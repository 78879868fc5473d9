"""Evaluations of the user, the record of results, and how the ranks of an evaluation exchange theirs.

A user's task is a function module:attr, called as task(model, tokenizer) -> numbers by metric name.
"""

import importlib.metadata
import shlex
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from pipeline.evals.bpb import EvaluationInterrupted, Watched, evaluating
from pipeline.metrics import Numbers, Protocol, Results
from pipeline.monitor.heartbeat import beat
from pipeline.process.errors import RecipeError, TandemError
from pipeline.process.storage import file_lock, read_json, write_json
from pipeline.process.user_code import CodeFolder, import_attribute
from pipeline.run_dir.run_directory import RunDirectory


class OtherRankFailed(RuntimeError):
    """Another rank's share of an evaluation failed; it says why itself."""


def gathered_over_ranks(mine: Any, *, world_size: int, error: Exception | None = None) -> list[Any]:
    """Return what each rank has, by rank; every rank must call this. With a world_size of 1 each has its own alone.

    error: what this rank's share failed with. It is raised here; on the other ranks it is raised too if it is a
    TandemError, else OtherRankFailed. EvaluationInterrupted is raised on all of them.
    """
    if world_size == 1:
        if error is not None:
            raise error
        return [mine]
    # 0: scored, 1: failed, 2: interrupted. All ranks learn of the worst before any of them raises.
    severity = 0
    if error is not None:
        severity = 2 if isinstance(error, EvaluationInterrupted) else 1
    shared = error if isinstance(error, TandemError) else None
    if shared is not None:
        shared.of_all_ranks = True
    everyones: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(everyones, (severity, shared, None if error else mine))
    worst = max(severity for severity, _, _ in everyones)
    if worst == 2:
        raise EvaluationInterrupted
    if error is not None:
        raise error
    for _, of_rank, _ in everyones:
        if of_rank is not None:
            raise of_rank
    if worst:
        raise OtherRankFailed("another rank failed in its share of the evaluation")
    return [found for _, _, found in everyones]


Task = Callable[[Any, Any], Numbers]


def load_tasks(names: list[str], *, folder: CodeFolder | str | None, where: str) -> dict[str, Task]:
    """Return the functions by their module:attr. Raises RecipeError with all that cannot be imported or called."""
    tasks, wrong = {}, []
    for name in names:
        try:
            tasks[name] = import_attribute(name, folder, where=where)
        except RecipeError as error:
            wrong.append(str(error))
            continue
        if not callable(tasks[name]):
            wrong.append(f"{where}: {name} is no function.")
    if wrong:
        raise RecipeError("\n".join(wrong) + "\nName functions task(model, tokenizer) in a module beside the recipe.")
    return tasks


def score_tasks(tasks: dict[str, Task], model, tokenizer, *, watched: Watched = iter) -> Numbers:
    """Return the numbers of all tasks by name, the same on every rank: those of rank 0.

    Every rank calls every task, as a sharded model needs; without gradients and in evaluation mode. Raises RecipeError
    when a task gives something else than finite or infinite numbers under names with a slash, which a tracker groups
    by. watched: what the tasks go through.
    """
    numbers: Numbers = {}
    with evaluating(model):
        for name, task in watched(tasks.items()):
            beat()
            numbers |= _checked(name, task(model, tokenizer))
    # A user's task may give each rank other numbers: those of rank 0 count.
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        box = [numbers]
        torch.distributed.broadcast_object_list(box, src=0)
        numbers = box[0]
    return numbers


def _checked(task: str, numbers: Any) -> Numbers:
    if not isinstance(numbers, dict):
        raise RecipeError(
            f"evals.tasks: {task} gave {type(numbers).__name__}, so there is nothing to record. Return a dict of "
            "numbers by metric name."
        )
    wrong = []
    for name, value in numbers.items():
        if not isinstance(name, str) or "/" not in name or not isinstance(value, int | float):
            wrong.append(name)
    if wrong:
        raise RecipeError(
            f"evals.tasks: {task} gave {wrong}, which cannot be recorded. Names need a group before a slash "
            "(spelling/accuracy), values are numbers."
        )
    return {name: float(value) for name, value in numbers.items()}


VERSIONS = ("torch", "transformers", "tokenizers")


def entry_of(
    *,
    subject: str,
    step: int | None,
    device: str,
    results: Results,
    samples: Results | None = None,
    command: list[str] | None = None,
) -> dict[str, Any]:
    """Return one evaluation: command, time, versions, device, results by name with their protocols, samples.

    command: default this process's own.
    """
    return {
        "subject": subject,
        "step": step,
        "command": shlex.join(command or [sys.executable, *sys.argv]),
        "time": time.time(),
        "versions": {name: importlib.metadata.version(name) for name in VERSIONS},
        "device": device,
        "results": results,
        "samples": samples or [],
    }


def in_precision(results: Results, dtype: str) -> Results:
    """Return the rows with what the model computed in; another precision than fp32 may give other answers, and is
    another protocol."""
    rows = []
    for row in results:
        protocol = Protocol(row["protocol_parts"]).having(dtype=dtype)
        rows.append(row | {"dtype": dtype} | protocol.row())
    return rows


def append_entry(run: RunDirectory, entry: dict[str, Any]) -> None:
    """Add an `entry_of` to the run's evals.json."""
    # Two evaluations of one run may end at the same time.
    with file_lock(run.evals.with_name(".evals.lock")):
        entries = read_json(run.evals)["entries"] if run.evals.exists() else []
        write_json(run.evals, {"entries": [*entries, entry]})
