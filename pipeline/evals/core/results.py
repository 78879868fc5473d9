"""A CORE score as rows for evals.json, as metrics by name, and as a table for the terminal."""

from typing import Any

from pipeline.evals.core.partial import why_partial
from pipeline.evals.core.score import CoreScore, TaskScore
from pipeline.evals.core.tasks import TASKS

VERSIONS = ("v1", "v2")


def core_results(score: CoreScore) -> list[dict[str, Any]]:
    """A row for each version of the mean, then one for each task: its accuracy, and what it was measured on."""
    rows = []
    for version in VERSIONS:
        low, high = score.interval(version)
        rows.append(
            {
                "name": f"{score.name}/{version}",
                "value": score.mean(version),
                "low": low,
                "high": high,
                "protocol": score.protocol,
                "tasks": len(score.tasks),
                "missing": score.missing,
                "bundle": score.bundle.id,
                "seconds": score.seconds,
                "tokens_forwarded": score.forwarded,
                "tokens_in_prompts": score.given,
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
                "protocol": score.protocol,
                "centred": {version: scored.task.centred(scored.accuracy, version) for version in VERSIONS},
                "items": len(scored.correct),
                "of": scored.of,
                "shots": scored.task.shots,
                "shortened": scored.shortened,
                "sha256": score.bundle.sha256[scored.task.file],
                "published": score.bundle.published(scored.task),
            }
        )
    return rows


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
        f"bundle {score.bundle.id}, protocol {score.protocol}; {score.forwarded:,} tokens forwarded of {score.given:,} in prompts, {score.seconds:.1f} s"
    )
    return lines
