"""Write the tables of docs/metrics.md from the registry: `python docs/metrics_page.py`."""

import re
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

PAGE = Path(__file__).resolve().parent / "metrics.md"
sys.path.insert(0, str(PAGE.parents[1]))

from pipeline.metrics import NANOCHAT, NANOCHAT_WANDB, NEMO, SECTIONS, TRAINER, Alias, Metric  # noqa: E402

HEAD = "| name | unit | what it is | elsewhere |\n| --- | --- | --- | --- |\n"
PROGRAMS = {"NeMo": (NEMO,), "nanochat": (NANOCHAT, NANOCHAT_WANDB), "Trainer": (TRAINER,)}


def _cell(aliases: Sequence[Alias]) -> str:
    """Return the names by program, each group of one unit and meaning with both in brackets."""
    cells = []
    for program, parts in PROGRAMS.items():
        theirs = [alias for alias in aliases if alias.program in parts]
        names = []
        for notes, group in groupby(theirs, lambda alias: [note for note in (alias.unit, alias.meaning) if note]):
            joined = ", ".join(f"{alias.label} `{alias.name}`".strip() for alias in group)
            names.append(joined + (f" ({', '.join(notes)})" if notes else ""))
        if names:
            cells.append(f"{program}: {', '.join(names)}")
    return "; ".join(cells)


def table(metrics: Sequence[Metric]) -> str:
    """Return the rows of metrics in Markdown; those that follow on one another with the same meaning share one."""
    rows = []
    for (unit, meaning), same in groupby(metrics, lambda metric: (metric.unit, metric.meaning)):
        of = list(same)
        names = ", ".join(f"`{metric.name}`" for metric in of)
        rows.append(f"| {names} | {unit} | {meaning} | {_cell(of[0].aliases)} |\n")
    return HEAD + "".join(rows)


def with_tables(page: str) -> str:
    """Return docs/metrics.md with its tables, a section each in their order, as the registry has them."""
    tables = map(table, SECTIONS.values())
    return re.sub(rf"{re.escape(HEAD)}(?:\| .*\n)*", lambda _: next(tables), page)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
    print(f"wrote {PAGE}")
