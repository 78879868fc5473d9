"""A CORE score as rows for evals.json, as metrics by name, and as a table for the terminal."""

from typing import Any

from pipeline.evals.contamination import Findings, clean_mean, clean_score, contamination_of, item_flags
from pipeline.evals.core.partial import why_partial
from pipeline.evals.core.prompts import in_order
from pipeline.evals.core.score import CoreScore, TaskScore
from pipeline.evals.core.tasks import TASKS
from pipeline.evals.watched import core_texts

VERSIONS = ("v1", "v2")


def core_results(score: CoreScore, findings: Findings | None = None) -> list[dict[str, Any]]:
    """A row for each version of the mean, then one for each task: its accuracy, and what it was measured on.

    findings: of the training text of the run that is scored; rows then tell of contaminated items too.
    """
    rows = []
    cleaned = _cleaned(score, findings)
    for version in VERSIONS:
        low, high = score.interval(version)
        rows.append(
            {
                "name": f"{score.name}/{version}",
                "value": score.mean(version),
                "low": low,
                "high": high,
                **score.protocol.row(),
                "tasks": len(score.tasks),
                "missing": score.missing,
                "bundle": score.bundle.id,
                "seconds": score.seconds,
                "tokens_forwarded": score.forwarded,
                "tokens_in_prompts": score.given,
                **contamination_of(_clean_mean(score, cleaned, version)),
            }
        )
    for scored in score.tasks:
        low, high = scored.interval()
        rows.append(
            {
                "name": f"core/{scored.task.name}",
                "value": scored.accuracy,
                "low": low,
                "high": high,
                **score.protocol.row(),
                "centred": {version: scored.task.centred(scored.accuracy, version) for version in VERSIONS},
                "items": len(scored.correct),
                "of": scored.of,
                "shots": scored.task.shots,
                "shortened": scored.shortened,
                "sha256": score.bundle.sha256[scored.task.file],
                "published": score.bundle.published(scored.task),
                **contamination_of(cleaned.get(scored.task.name)),
            }
        )
    return rows


def _cleaned(score: CoreScore, findings: Findings | None) -> dict[str, dict[str, Any]]:
    """By task, of those that were looked for: the score without contaminated items."""
    cleaned = {}
    for scored in score.tasks if findings else []:
        texts = core_texts(scored.task, score.bundle.items[scored.task.file])
        flags = item_flags(findings, f"core/{scored.task.name}", texts)
        if findings and flags is not None:
            cleaned[scored.task.name] = clean_score(
                findings["tasks"][f"core/{scored.task.name}"], scored.correct.tolist(), in_order(flags, None)
            )
    return cleaned


def _clean_mean(score: CoreScore, cleaned: dict[str, dict[str, Any]], version: str) -> dict[str, Any] | None:
    tasks = {scored.task.name: scored.task for scored in score.tasks}
    accuracies = {scored.task.name: scored.accuracy for scored in score.tasks}
    return clean_mean(accuracies, cleaned, lambda name, accuracy: tasks[name].centred(accuracy, version))


def numbers_of(results: list[dict[str, Any]]) -> dict[str, float]:
    """The results as metrics by name."""
    return {row["name"]: row["value"] for row in results}


def task_line(scored: TaskScore) -> str:
    low, high = scored.interval()
    centred = "  ".join(f"{scored.task.centred(scored.accuracy, version):>8.4f}" for version in VERSIONS)
    note = f"  {scored.shortened:,} prompts shortened" if scored.shortened else ""
    return (
        f"{scored.task.name:<34} {scored.task.shots:>5} {len(scored.correct):>7,} {scored.accuracy:>9.4f}  "
        f"{low:.3f}-{high:.3f}  {centred}{note}"
    )


def heading() -> str:
    return f"{'task':<34} {'shots':>5} {'items':>7} {'accuracy':>9}  {'95 %':<11}  {'centr v1':>8}  {'centr v2':>8}"


def closing_lines(score: CoreScore) -> list[str]:
    """The means, and what has to be known to compare them."""
    lines = []
    for version in VERSIONS:
        low, high = score.interval(version)
        meaning = "baselines of published scores" if version == "v1" else "DCLM's corrected baselines"
        lines.append(
            f"{score.name}_{version}: {score.mean(version):.6f}  (95 % {low:.4f} to {high:.4f}; {meaning}; {len(score.tasks)} of {len(TASKS)} tasks)"
        )
    if not score.whole:
        tasks = [(t.task.name, len(t.correct), t.of, score.bundle.published(t.task)) for t in score.tasks]
        lines.append(f"This is not CORE: {'; '.join(why_partial(score.missing, tasks))}.")
    lines.append(
        f"bundle {score.bundle.id}, protocol {score.protocol.id} ({score.protocol}); {score.forwarded:,} tokens forwarded of {score.given:,} in prompts, {score.seconds:.1f} s"
    )
    return lines
