"""Figures of evaluations side by side, only where the same was scored."""

from collections.abc import Sequence
from typing import Any

from pipeline.artifacts.protocol import why_not_compared
from pipeline.report.run_data import RunData, Score
from pipeline.report.tables import cell

SHOWN = 3  # other runs against which a figure that is not compared is told
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
            (own,) = (n for n, scores in enumerate(newest) if key in scores)
            why = [
                _against(newest[own][key], other, runs[n])
                for n, scores in enumerate(newest)
                if n != own
                for other in _named(name, scores)
            ]
            refused.append(
                f"{name} of {having[0]} is not compared: no other of these runs was scored{on_these} under its protocol {protocol}."
                + "".join(f" {line}" for line in why[:SHOWN])
            )
    return rows, refused


def protocols_text(scores: Sequence[Score]) -> str:
    """Return what each protocol of these figures is made of, and in what those of one metric differ; "" where none tells it."""
    known = {score.protocol: score.parts for score in scores if score.parts is not None}
    lines = [f"- protocol {cell(protocol)}: {cell(str(parts))}" for protocol, parts in known.items()]
    by_name: dict[str, dict[str | None, Score]] = {}
    for score in scores:
        by_name.setdefault(score.name, {})[score.protocol] = score
    for name, (first, *others) in ((name, list(found.values())) for name, found in by_name.items()):
        lines += [
            f"- not to be compared: {cell(name)} under {cell(first.protocol)} and under {cell(other.protocol)}, "
            f"{cell(why_not_compared(first.parts, other.parts))}"
            for other in others
            if known
        ]
    return "".join(f"{line}\n" for line in lines)


def _named(name: str, scores: dict[Key, Score]) -> list[Score]:
    return [score for score in scores.values() if score.name == name and score.protocol is not None]


def _against(own: Score, other: Score, run: RunData) -> str:
    """Say in which parts of its protocol, or else in which items, the figure of another run is another measurement."""
    why = (
        why_not_compared(own.parts, other.parts)
        if own.protocol != other.protocol
        else f"{_amount(own.items)} against {_amount(other.items)}"
    )
    return f"Against {cell(run.name)} ({other.protocol}): {cell(why)}."


def _amount(items: tuple[tuple[str, int | None], ...]) -> str:
    return f"{len(items)} tasks, {sum(count or 0 for _, count in items):,} items"
