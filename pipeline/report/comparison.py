"""Several runs side by side. Figures of evaluations stand beside each other only where the same was scored."""

from typing import Any

from pipeline.report.run_data import RunData, Score
from pipeline.report.tables import number, table


def comparison(runs: list[RunData]) -> str:
    """A Markdown table, one column a run, and below it which figures are not compared and why."""
    rows: list[list[Any]] = [
        ["stage", *(data.stage for data in runs)],
        ["status", *(data.status() for data in runs)],
        ["steps", *(number(data.step()) for data in runs)],
        ["tokens (row positions)", *(number(data.tokens()) for data in runs)],
    ]
    for name in ("train/loss", "train/loss_ema", "val/loss", "perf/tok_per_s", "perf/mfu_pct", "perf/total_s"):
        values = [data.last(name) for data in runs]
        if any(value is not None for value in values):
            rows.append([f"{name} (last)", *(number(value, 5) for value in values)])
    scores, refused = _score_rows(runs)
    text = table(["", *(data.name for data in runs)], rows + scores + _recipe_rows(runs))
    return text + "".join(f"\n{line}\n" for line in refused)


def _score_rows(runs: list[RunData]) -> tuple[list[list[Any]], list[str]]:
    """One row per figure that at least two runs have, measured on the same; sentences on the rest."""
    newest = [_newest(data) for data in runs]
    rows: list[list[Any]] = []
    refused = []
    for key in sorted({key for scores in newest for key in scores}, key=repr):
        name, protocol, items = key
        having = [data.name for data, scores in zip(runs, newest, strict=True) if key in scores]
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


def _newest(data: RunData) -> dict[tuple, Score]:
    """The newest figure per metric and what was scored."""
    return {(score.name, score.protocol, score.items): score for score in [*data.scores(), *data.means()]}


def _recipe_rows(runs: list[RunData]) -> list[list[Any]]:
    """The recipe's keys in which the runs differ."""
    flat = [dict(_leaves(data.recipe)) for data in runs]
    names = dict.fromkeys(name for keys in flat for name in keys)
    return [
        [name, *(keys.get(name) for keys in flat)]
        for name in names
        if name != "run.name" and len({repr(keys.get(name)) for keys in flat}) > 1
    ]


def _leaves(value: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, entry in value.items():
        found += _leaves(entry, f"{prefix}{name}.") if isinstance(entry, dict) else [(prefix + name, entry)]
    return found
