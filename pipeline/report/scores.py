"""Figures of evaluations side by side, only where the same was scored."""

from collections.abc import Sequence
from typing import Any

from pipeline.report.run_data import RunData, Score
from pipeline.report.tables import cell

Key = tuple[str, str | None, tuple[tuple[str, int | None], ...]]  # name, protocol, items of a benchmark


def newest_scores(data: RunData) -> dict[Key, Score]:
    """The newest figure per metric and what was scored."""
    return {(score.name, score.protocol, score.items): score for score in [*data.scores(), *data.means()]}


def score_rows(runs: Sequence[RunData]) -> tuple[list[list[Any]], list[str]]:
    """One row per figure that at least two runs have, measured on the same; sentences on the rest."""
    newest = [newest_scores(data) for data in runs]
    rows: list[list[Any]] = []
    refused = []
    for key in sorted({key for scores in newest for key in scores}, key=repr):
        name, protocol, items = key
        having = [cell(data.name) for data, scores in zip(runs, newest, strict=True) if key in scores]
        on = f"protocol {protocol}" + (f"; {_amount(items)}" if items else "")
        if protocol is None:
            refused += [
                f"{name} of {run} is not compared: the run does not say under which protocol it was scored."
                for run in having
            ]
        elif len(having) > 1:
            values = [scores.get(key) for scores in newest]
            rows.append([f"{name} (last; {on})", *(None if v is None else f"{v.value:.6f}" for v in values)])
        else:
            on_these = f" on the same {_amount(items)}" if items else ""
            refused.append(
                f"{name} of {having[0]} is not compared: no other of these runs was scored{on_these} under its protocol {protocol}."
            )
    return rows, refused


def _amount(items: tuple[tuple[str, int | None], ...]) -> str:
    return f"{len(items)} tasks, {sum(count or 0 for _, count in items):,} items"
