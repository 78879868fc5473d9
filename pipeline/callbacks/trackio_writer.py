"""The process that copies a run's metrics.jsonl and samples.jsonl into trackio/, a Trackio database.

`python -m pipeline.callbacks.trackio_writer RUN` writes what is there; with --follow, as trackers.py starts it, also
what comes until its input ends, which the training's death ends, too.

Each start writes the run anew, under its name: what an earlier attempt wrote beyond the step that the run went on from
is gone, and what Trackio missed is there. No server, no network. Trackio's storage is called and not `trackio.init`:
that asks the Hub who is logged in, gives rows the time of their writing, and swallows errors. No torch here: the
process takes 65 MB.
"""

import json
import os
import select
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from itertools import groupby, islice
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).parents[2])

from pipeline.recipe.located_yaml import load_mapping
from pipeline.run_dir.checkpoints import take_lock
from pipeline.run_dir.failures import NUMBERS
from pipeline.run_dir.rows import counts
from pipeline.run_dir.run_directory import RunDirectory

POLL_S = 1.0
BATCH_ROWS = 1000
WAIT_S = 60.0  # for the process of an attempt that has just died


class GrowingFile:
    """The rows of a file of JSON lines, each once; a last line that is not whole yet is left for the next time."""

    def __init__(self, path: Path):
        self.path, self.at = path, 0

    def new_rows(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        with open(self.path, "rb") as file:
            file.seek(self.at)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self.at += len(line)
                with suppress(ValueError):  # torn by a crash
                    yield json.loads(line)


class TrackioTable:
    """The run in Trackio's database: written anew from its first row."""

    def __init__(self, run: RunDirectory):
        from trackio.sqlite_storage import SQLiteStorage

        recipe = load_mapping(run.recipe)
        self.name, self.project = str(run.read_manifest()["name"]), str(recipe["monitor"]["project"])
        self.config: dict[str, Any] | None = recipe
        self.storage = SQLiteStorage
        self.storage.validate_project_name(self.project)
        self.storage.delete_run(self.project, self.name)
        if self.storage.get_log_count(self.project, self.name):
            raise OSError("its database keeps what an earlier attempt wrote")

    def add(self, rows: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        """Add rows of metrics or samples as their file has them, each with the values that Trackio is to have."""
        remaining = iter(rows)
        while batch := list(islice(remaining, BATCH_ROWS)):
            self.storage.bulk_log(
                project=self.project,
                run=self.name,
                metrics_list=[values for _, values in batch],
                steps=[row["step"] for row, _ in batch],
                timestamps=[datetime.fromtimestamp(row["time"], UTC).isoformat() for row, _ in batch],
                config=self.config,
            )
            self.config = None


def copy(run: RunDirectory, *, ended: Callable[[], bool]) -> None:
    """Copy everything that counts, and then what is added to the files until `ended`."""
    attempts = [row for row in GrowingFile(run.metrics).new_rows() if row.get("event") == "attempt"]
    table, metrics, samples = TrackioTable(run), GrowingFile(run.metrics), GrowingFile(run.samples)
    waiting: list[dict[str, Any]] = []
    last = False
    while not last:
        last = ended()  # asked before reading: what the training wrote last is read below
        table.add((row, numbers(row)) for row in metrics.new_rows() if "event" not in row and counts(row, attempts))
        new = [row for row in samples.new_rows() if counts(row, attempts)]
        waiting += new
        # The samples of a step are one table: those of the newest step wait until no more of them come.
        growing = waiting[-1]["step"] if new and not last else None
        table.add(tables([row for row in waiting if row["step"] != growing]))
        waiting = [row for row in waiting if row["step"] == growing]


def numbers(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in ("step", "time")}


def tables(samples: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield a row for each step, as Trackio keeps a table."""
    from trackio import Table

    for _, rows in groupby(samples, key=lambda row: (row["attempt"], row["step"])):
        of_step = list(rows)
        texts = [{"prompt": row["prompt"], "text": row["text"]} for row in of_step]
        yield of_step[0], {"samples": {"_type": Table.TYPE, "_value": texts}}


def input_ended() -> bool:
    """Return whether whoever started this is gone, after POLL_S at the latest."""
    ready, _, _ = select.select([sys.stdin], [], [], POLL_S)
    return bool(ready) and not os.read(sys.stdin.fileno(), 1)


def main(argv: list[str]) -> int:
    if not argv or argv[0].startswith("-"):
        print("python -m pipeline.callbacks.trackio_writer RUN    write a run directory into its trackio/")
        return 0
    run, follow = RunDirectory(argv[0]), "--follow" in argv[1:]
    if follow:
        for number in NUMBERS:
            signal.signal(number, signal.SIG_IGN)
    for name in ("TRACKIO_BUCKET_ID", "TRACKIO_DATASET_ID"):  # from which it would fill the folder first
        os.environ.pop(name, None)
    os.environ |= {"TRACKIO_DIR": str(run.trackio), "HF_HUB_OFFLINE": "1"}  # read when they are imported
    try:
        run.trackio.mkdir(exist_ok=True)
        with take_lock(run.trackio, wait_s=WAIT_S):
            copy(run, ended=input_ended if follow else lambda: True)
    except Exception as error:  # whatever it is: the training prints it, and goes on
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
