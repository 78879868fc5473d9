"""Several runs side by side. Bits per byte stand beside each other only where the same text was scored."""

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
    scores, refused = _bpb_rows(runs)
    text = table(["", *(data.name for data in runs)], rows + scores + _recipe_rows(runs))
    return text + "".join(f"\n{line}\n" for line in refused)


def _bpb_rows(runs: list[RunData]) -> tuple[list[list[Any]], list[str]]:
    """One row per metric and protocol that at least two runs share; sentences on the rest."""
    last = [_last_by_name(data) for data in runs]
    rows: list[list[Any]] = []
    refused = []
    for name in sorted({name for scores in last for name, _ in scores}):
        protocols = {protocol for scores in last for found, protocol in scores if found == name}
        for protocol in sorted(p for p in protocols if p is not None):
            values = [scores.get((name, protocol)) for scores in last]
            if sum(value is not None for value in values) > 1:
                rows.append(
                    [f"{name} (last; protocol {protocol})", *(None if v is None else f"{v.value:.6f}" for v in values)]
                )
            else:
                who = next(data.name for data, value in zip(runs, values, strict=True) if value)
                refused.append(
                    f"{name} of {who} is not compared: no other of these runs was scored under its protocol {protocol}."
                )
        for data, scores in zip(runs, last, strict=True):
            if (name, None) in scores:
                refused.append(
                    f"{name} of {data.name} is not compared: the run does not say under which protocol it was scored."
                )
    return rows, list(dict.fromkeys(refused))


def _last_by_name(data: RunData) -> dict[tuple[str, str | None], Score]:
    """The newest figure per metric and protocol."""
    return {(score.name, score.protocol): score for score in data.scores()}


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
