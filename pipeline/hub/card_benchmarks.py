"""Benchmarks of the published model on its card, for readers and for the Hub's index."""

import math
import re
from collections.abc import Iterator
from typing import Any

from pipeline.evals.chat.tasks import BUILT_IN
from pipeline.evals.core.tasks import TASKS
from pipeline.report.benchmark_rows import Benchmark, series_of, task_name
from pipeline.report.benchmarks import scores_text, title
from pipeline.report.run_data import RunData
from pipeline.report.tables import code

DATASETS = {"core": "tasks of CORE", "chat": "chat tasks", "lm_eval": "lm-evaluation-harness"}


def benchmarks_of_model(data: RunData, *, step: int, finished: bool) -> list[Benchmark]:
    """Of each series of equal measurements the newest of this model; of model/ itself where it was scored and is what is
    published (finished)."""

    def is_of_model(benchmark: Benchmark) -> bool:
        if benchmark.subject == "model/":
            return finished and benchmark.step in (None, step)
        return benchmark.step == step

    own = sorted(filter(is_of_model, data.benchmarks()), key=lambda b: (b.subject == "model/", *b.age))
    return [series[-1] for series in series_of(own)]


def benchmarks_section(benchmarks: list[Benchmark], *, repo_id: str) -> str:
    """The same tables as in the report, and how to make them again; "" without benchmarks."""
    if not benchmarks:
        return ""
    parts = [
        "## Benchmarks\n",
        "Compare figures of equal protocol only. `evals.json` has the command of each, with versions, device and files.\n",
    ]
    for benchmark in benchmarks:
        protocols = benchmark.protocols()
        parts += [title(benchmark), scores_text(benchmark)]
        parts.append((f"Protocol `{protocols[0]}`. " if len(protocols) == 1 else "") + "To repeat it:\n")
        parts.append(code(repeat_command(benchmark, repo_id), "bash"))
    return "\n".join(parts)


def repeat_command(benchmark: Benchmark, repo_id: str) -> str:
    """The command that measures the same on the published model. The recorded one may name paths of this machine."""
    of_suite = {"core": _core_words, "chat": _chat_words, "lm_eval": _harness_words}[benchmark.suite]
    protocols = " ".join(benchmark.protocols())
    capped = ["--max-per-task", str(benchmark.first_items)] if benchmark.first_items else []
    return " ".join(["python -m pipeline.evals", repo_id, *of_suite(benchmark, protocols), *capped])


def _core_words(benchmark: Benchmark, protocols: str) -> list[str]:
    names = [task_name(task) for task in benchmark.tasks]
    words = ["core" if len(names) == len(TASKS) else f"core:{','.join(names)}"]
    if any(task.get("published") is False for task in benchmark.tasks):
        words += ["--bundle", "FOLDER"]  # the reader's own copy of these files
    return [*words, "--long-prompts", "crop"] if "-crop" in protocols else words


def _chat_words(benchmark: Benchmark, protocols: str) -> list[str]:
    names = [task_name(task) for task in benchmark.tasks]
    words = [f"chat:{','.join(name for name in names if name in BUILT_IN)}"] if set(names) & set(BUILT_IN) else []
    for name in names:
        if name not in BUILT_IN:
            words += ["--own-task", f"{name}=FILE"]
    checkers = list(dict.fromkeys(task["checker"] for task in benchmark.tasks if task.get("checker")))
    words += ["--checker", checkers[0]] if checkers else []
    longest = re.search(r"-(\d+)tokens", protocols)
    words += ["--max-new-tokens", longest[1]] if longest else []
    return [*words, "--execute"] if "humaneval" in names else words


def _harness_words(benchmark: Benchmark, protocols: str) -> list[str]:
    names = dict.fromkeys(task_name(row).split("/")[0] for row in benchmark.tasks)  # a row is a task and a metric
    shots = {row.get("num_fewshot") for row in benchmark.tasks}
    words = [f"lm_eval:{','.join(names)}"]
    if len(shots) == 1 and None not in shots:
        words += ["--shots", str(shots.pop())]
    return [*words, "--as-chat"] if ", chat" in protocols else words


def index_entries(benchmarks: list[Benchmark]) -> list[dict[str, Any]]:
    """For the model-index of the card's metadata: each mean and each task."""
    return [entry for benchmark in benchmarks for entry in _entries(benchmark)]


def _entries(benchmark: Benchmark) -> Iterator[dict[str, Any]]:
    for row in [*benchmark.means, *benchmark.tasks]:
        if not math.isfinite(row["value"]):  # which the index could not hold
            continue
        args = {key: round(row[key], 6) for key in ("low", "high", "stderr") if row.get(key) is not None}
        metric = {"type": _type(row, benchmark), "name": row["name"], "value": round(row["value"], 6)}
        yield {
            "task": {"type": "text-generation", "name": "Text generation"},
            "dataset": {"type": benchmark.suite, "name": f"{DATASETS[benchmark.suite]}, protocol {row['protocol']}"},
            "metrics": [metric | ({"args": args} if args else {}) | {"verified": False}],
        }


def _type(row: dict[str, Any], benchmark: Benchmark) -> str:
    if any(row is mean for mean in benchmark.means):
        return "centred_accuracy"
    return task_name(row).partition("/")[2] or "accuracy" if benchmark.suite == "lm_eval" else "accuracy"
