"""A finished run with benchmarks in its evals.json, recorded as the evaluations record them."""

from dataclasses import replace

import numpy as np

from pipeline.evals import core
from pipeline.evals.chat import CHAT_CORE, TaskScore, chat_results
from pipeline.evals.chat_tasks import BUILT_IN, ChatItem, LoadedTask
from pipeline.evals.core import core_results
from pipeline.evals.core_bundle import TASKS, Bundle
from pipeline.evals.tasks import append_entry, entry_of
from pipeline.run_dir.rows import append_row
from pipeline.run_dir.run_directory import RunDirectory


def core_rows(right=1, *, names=None, items=4, published=True, max_per_task=4, long_prompts="fewer_shots"):
    """The rows of CORE in which `right` of `items` answers of every task are right; of only some tasks with `names`."""
    tasks = [task for task in TASKS if names is None or task.name in names]
    bundle = Bundle(
        items={},
        sha256={task.file: f"{task.blob}cafe" for task in tasks},
        blobs={task.file: task.blob if published else "other" for task in tasks},
        missing={task.name: "not asked for" for task in TASKS if task not in tasks},
    )
    scored = [
        core.TaskScore(task, np.arange(items) < right, shortened=2 if task.name == "piqa" else 0) for task in tasks
    ]
    return core_results(
        core.CoreScore(
            tasks=scored,
            missing=bundle.missing,
            bundle=bundle,
            protocol=core.core_protocol(
                bundle, max_per_task=max_per_task, long_prompts=long_prompts, window=64, coverage=1.0
            ),
            seconds=12.5,
        )
    )


def chat_rows(value=0.5, *, items=20, of=40, complete=False, names=(*CHAT_CORE, "spelling_bee")):
    """The rows of ChatCORE's five tasks and spelling_bee, each with that accuracy on `items` of the `of` in its file."""
    question = ChatItem(messages=[{"role": "user", "content": "Why?"}], answer="So.")
    tasks = [
        LoadedTask(
            task=replace(BUILT_IN[name], isolation="landlock+seccomp" if name == "humaneval" else None),
            items=[question] * of,
            files=[{"label": f"{name}.jsonl", "sha256": "beef" * 16, "bytes": 12345}],
        )
        for name in names
    ]
    scores = [
        TaskScore(
            name=name,
            n=items,
            of=of,
            complete=complete,
            accuracy=value,
            centred=value - 0.1,
            interval=(value - 0.05, value + 0.05),
            correct=[],
            too_long=3 if name == "mmlu" else 0,
            seconds=2.0,
        )
        for name in names
    ]
    return chat_results(tasks, scores)


def lm_eval_row(value=0.25):
    return {
        "name": "lm_eval/piqa/acc_norm",
        "value": value,
        "stderr": 0.0125,
        "n": 200,
        "task_version": "1.0",
        "num_fewshot": 5,
        "filter": "none",
        "cut": 7,
        "protocol": "lm_eval 0.4, piqa version 1.0, 5-shot, first 200",
    }


def contaminated(row, found, without):
    """The row as it stands when `found` of its 4 items stood in the training text."""
    return row | {
        "contamination": {
            "items": 4,
            "unjudged": 1,
            "contaminated": found,
            "contaminated_share": found / 3,
            "score": row["value"],
            "score_without": without,
            "shards": 8,
            "unchecked_shards": 2,
            "text_of": ["a"],
            "not_searched": ["the|base"],
        }
    }


def write_evaluated_run(folder, *entries, stage="pretrain", steps=20):
    """A run of that many steps; entries: (subject, step, rows)."""
    run = RunDirectory(folder)
    run.update_manifest(name=folder.name, stage=stage, status="finished")
    append_row(run.metrics, {"event": "attempt", "attempt": 1, "step": 0, "time": 1.0})
    append_row(run.metrics, {"step": steps, "attempt": 1, "time": 2.0, "tokens": 100, "train/loss": 3.0})
    for subject, step, rows in entries:
        command = ["python", "-m", "pipeline.evals", str(folder), "core"]
        append_entry(run, entry_of(subject=subject, step=step, device="cpu", results=rows, command=command))
    return run
