"""How a run lived: its checkpoints, its attempts and what each lost."""

from typing import Any

from pipeline.artifacts.atomic import folder_bytes
from pipeline.artifacts.columns import Columns
from pipeline.report.run_data import RunData
from pipeline.report.tables import date, filled_table, number, table


def checkpoints_text(data: RunData) -> str:
    rows = [
        [f"checkpoint-{step}", f"{size / 2**20:,.1f} MiB", "yes" if sealed else "no"]
        for step, size, sealed in data.checkpoints
    ]
    if data.run.model.is_dir():
        size = folder_bytes(data.run.model)
        rows.append(["model/", f"{size / 2**20:,.1f} MiB", "finished model"])
    return table(["folder", "size", "sealed"], rows) if rows else ""


def attempts_text(data: RunData) -> str:
    """Each attempt: from where, how far, how long, and how many of its logged steps the next one had to make again."""
    written = Columns.of(data.all_rows)
    starts = {row.get("attempt"): row for _, row in written.events("attempt")}
    at, _ = written.column("train/loss")
    of = written.beside("attempt", at, missing=0)
    steps = written.beside("step", at, missing=0)
    rows: list[list[Any]] = []
    numbers = [attempt for attempt, _, _ in data.running]
    for n, (attempt, began, last) in enumerate(data.running):
        own = steps[of == attempt]
        reached = own.max().item() if len(own) else None
        start = starts.get(attempt, {})
        following = starts.get(numbers[n + 1], {}).get("step") if n + 1 < len(numbers) else None
        lost = None if reached is None or following is None else max(reached - following, 0)
        rows.append([attempt, date(began), start.get("step"), reached, f"{(last - began) / 60:.1f} min", number(lost)])
    head = ["attempt", "began", "from step", "last logged step", "ran", "steps lost"]
    return filled_table(head, rows)
