"""Benchmarks of the published model on its card, for readers and for the Hub's index."""

import math
import shlex
from dataclasses import replace
from typing import Any

from pipeline.evals.chat.tasks import BUILT_IN
from pipeline.evals.core.tasks import TASKS
from pipeline.hub.card.published import Published
from pipeline.report.benchmark_rows import Benchmark, series_of, task_name
from pipeline.report.benchmarks import scores_text, suite_name
from pipeline.report.tables import cell, code, visible


def benchmarks_of_model(card: Published) -> list[Benchmark]:
    """Of each series of equal measurements the newest of this model; of the published files themselves where those were scored."""
    found = [b for b in card.data.benchmarks() if card.is_scored(subject=b.subject, step=b.step)]
    own = [replace(b, means=_numbers(b.means), tasks=_numbers(b.tasks)) for b in found]
    own.sort(key=lambda benchmark: (benchmark.subject == "model/", *benchmark.age))
    return [series[-1] for series in series_of([b for b in own if b.means or b.tasks])]


def _numbers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what a function of one's own gave that is no number: the Hub's index could not hold it."""
    return [row for row in rows if math.isfinite(row["value"])]


def benchmarks_text(card: Published) -> str:
    """The same tables as in the report, and how to make them again."""
    if not (benchmarks := benchmarks_of_model(card)):
        return ""
    parts = [
        "Compare figures of equal protocol only. [evals.json](evals.json) has the command of each, with versions, device and files.\n"
    ]
    for benchmark in benchmarks:
        protocols = benchmark.protocols()
        part = f", first {benchmark.first_items:,} items of each task" if benchmark.first_items else ""
        parts += [f"### {suite_name(benchmark)}{part}\n", scores_text(benchmark)]
        parts += ["".join(f"{line}\n" for line in benchmark.protocol_lines())] if benchmark.protocol_lines() else []
        parts.append((f"Protocol {cell(protocols[0])}. " if len(protocols) == 1 else "") + "To repeat it:\n")
        parts.append(code(repeat_command(benchmark, card.repo_id), "bash"))
    return "\n".join(parts)


def repeat_command(benchmark: Benchmark, repo_id: str) -> str:
    """The command that measures the same on the published model. The recorded one may name paths of this machine."""
    of_suite = {"core": _core_words, "chat": _chat_words, "lm_eval": _harness_words}[benchmark.suite]
    capped = ["--max-per-task", str(benchmark.first_items)] if benchmark.first_items else []
    words = ["python", "-m", "pipeline.evals", repo_id, *of_suite(benchmark), *capped]
    return visible(shlex.join(words))


def _core_words(benchmark: Benchmark) -> list[str]:
    names = [task_name(task) for task in benchmark.tasks]
    words = ["core" if len(names) == len(TASKS) else f"core:{','.join(names)}"]
    if any(task.get("published") is False for task in benchmark.tasks):
        words += ["--bundle", "FOLDER"]  # the reader's own copy of these files
    return [*words, "--long-prompts", "crop"] if benchmark.part("long_prompts") == "crop" else words


def _chat_words(benchmark: Benchmark) -> list[str]:
    names = [task_name(task) for task in benchmark.tasks]
    words = [f"chat:{','.join(name for name in names if name in BUILT_IN)}"] if set(names) & set(BUILT_IN) else []
    for name in names:
        if name not in BUILT_IN:
            words += ["--own-task", f"{name}=FILE"]
    checkers = list(dict.fromkeys(task["checker"] for task in benchmark.tasks if task.get("checker")))
    words += ["--checker", checkers[0]] if checkers else []
    longest = benchmark.part("max_new_tokens")
    words += ["--max-new-tokens", str(longest)] if longest else []
    return [*words, "--execute"] if "humaneval" in names else words


def _harness_words(benchmark: Benchmark) -> list[str]:
    names = dict.fromkeys(task_name(row).split("/")[0] for row in benchmark.tasks)  # a row is a task and a metric
    shots = {row.get("num_fewshot") for row in benchmark.tasks}
    words = [f"lm_eval:{','.join(names)}"]
    if len(shots) == 1 and None not in shots:
        words += ["--shots", str(shots.pop())]
    return [*words, "--as-chat"] if benchmark.part("chat") else words
