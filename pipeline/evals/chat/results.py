"""Chat scores as rows for evals.json, as metrics by name, and as a table for the terminal."""

from typing import Any

from pipeline.artifacts.protocol import Protocol, digest
from pipeline.evals.chat.files import LoadedTask
from pipeline.evals.chat.score import CHAT_CORE, MEANS, TaskScore, chat_interval, chat_numbers
from pipeline.evals.contamination import Findings, clean_mean, clean_score, contamination_of, item_flags
from pipeline.evals.watched import chat_texts

RULE = 1  # raise it when the same items under the same window give other answers


def chat_results(
    tasks: list[LoadedTask], scores: list[TaskScore], findings: Findings | None = None
) -> list[dict[str, Any]]:
    """A row for each mean that the tasks give, then one for each task: its accuracy, and what it was measured on.

    tasks: those that were to be scored; scores may be of the first ones only. findings: of the training text of the run
    that is scored; rows then tell of contaminated items too.
    """
    loaded_by_name = {loaded.task.name: loaded for loaded in tasks}
    numbers, cleaned = chat_numbers(scores), _cleaned(loaded_by_name, scores, findings)
    protocols = {score.name: chat_protocol(loaded_by_name[score.name], score) for score in scores}
    rows = []
    for score in scores:
        loaded, (low, high) = loaded_by_name[score.name], score.interval
        rows.append(
            {
                "name": f"chat/{score.name}",
                "value": numbers.pop(f"chat/{score.name}"),
                "low": low,
                "high": high,
                **protocols[score.name].row(),
                "centred": score.centred,
                "items": score.n,
                "of": score.of,
                "complete": score.complete,
                "too_long": score.too_long,
                "seconds": score.seconds,
                "tokens_forwarded": score.tokens_forwarded,
                "tokens_generated": score.tokens_generated,
                "files": loaded.files,
                "revision": loaded.revision,
                "isolation": score.isolation,
                "checker": loaded.task.checker,
                **contamination_of(cleaned.get(score.name)),
            }
        )
    means = []
    for name, value in numbers.items():
        tasks_of_mean = MEANS[name.removesuffix("_part")]  # others that were scored beside them change nothing
        together = Protocol({"score": "chat", "tasks": {task: dict(protocols[task].parts) for task in tasks_of_mean}})
        accuracies = {score.name: score.accuracy for score in scores if score.name in tasks_of_mean}
        found = clean_mean(accuracies, cleaned, lambda task, accuracy: loaded_by_name[task].task.centred(accuracy))
        low, high = chat_interval(scores, name, value)
        about = {"name": name, "value": value, "low": low, "high": high, **together.row(), "tasks": list(tasks_of_mean)}
        means.append(about | contamination_of(found))
    return means + rows


def _cleaned(
    loaded: dict[str, LoadedTask], scores: list[TaskScore], findings: Findings | None
) -> dict[str, dict[str, Any]]:
    """By task, of those that were looked for: the score without contaminated items."""
    cleaned = {}
    for score in scores if findings else []:
        flags = item_flags(findings, f"chat/{score.name}", chat_texts(loaded[score.name]))
        if findings and flags is not None:
            cleaned[score.name] = clean_score(findings["tasks"][f"chat/{score.name}"], score.correct, flags)
    return cleaned


def chat_protocol(loaded: LoadedTask, score: TaskScore) -> Protocol:
    """Return the protocol of a task: the first so many items of its files, its longest answer and checker."""
    task = loaded.task
    return Protocol(
        {
            "score": "chat",
            "task": task.name,
            "texts": digest([file["sha256"] for file in loaded.files]),
            "items": "all" if score.n == len(loaded.items) else score.n,
            **({"max_new_tokens": task.max_new_tokens} if task.kind == "text" else {}),
            **({"checker": task.checker} if task.checker else {}),
            # A question that fits may still leave a written answer too few positions.
            "window": (score.window or "any") if score.too_long or task.kind == "text" else "whole prompts",
            "bos": "as the template",
            "rule": RULE,
        }
    )


def heading() -> str:
    return f"{'task':<20} {'items':>7} {'accuracy':>9}  {'95 %':<11}  {'centred':>8} {'tokens':>10} {'seconds':>8}"


def task_line(score: TaskScore) -> str:
    low, high = score.interval
    notes = [f"of {score.of:,}"] if score.n < score.of else []
    if score.too_long:
        notes.append(f"{score.too_long:,} questions longer than the model's positions, which count as wrong")
    if score.isolation is not None:
        notes.append(f"programs run behind {score.isolation}")
    return (
        f"{score.name:<20} {score.n:>7,} {score.accuracy:>9.4f}  {low:.3f}-{high:.3f}  {score.centred:>8.4f} "
        f"{score.tokens_forwarded + score.tokens_generated:>10,} {score.seconds:>8.1f}"
        + "".join(f"  {n}" for n in notes)
    )


def closing_lines(scores: list[TaskScore]) -> list[str]:
    """The means over tasks, or which tasks they would take."""
    means = {name: value for name, value in chat_numbers(scores).items() if name.startswith("chat/core")}
    if not means:
        missing = [name for name in CHAT_CORE if name not in {score.name for score in scores}]
        return [f"no ChatCORE without {', '.join(missing)}"]
    lines = []
    for name, value in means.items():
        low, high = chat_interval(scores, name, value)
        lines.append(f"{name}: {value:.6f}  (95 % {low:.4f} to {high:.4f})")
    return lines
