"""The rows of runs as one CSV table, a column each metric; read again by `python -m pipeline.report`."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from pipeline.artifacts.atomic import write_text
from pipeline.report.run_data import RunData

STAMPS = ["step", "attempt", "time", "tokens"]


def write_csv(runs: Sequence[RunData], path: Path) -> None:
    """Rows that count, without events; a number that a row does not have is left empty."""
    rows = [(data.name, row) for data in runs for row in data.rows if "event" not in row]
    names = sorted({name for _, row in rows for name in row} - set(STAMPS))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["run", *STAMPS, *names])
    writer.writerows([run, *(row.get(name) for name in (*STAMPS, *names))] for run, row in rows)
    write_text(path, text.getvalue())
