"""A log file as runs, recognised by what it holds."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.artifacts.errors import DataError
from pipeline.report.imports.console_lines import read_console
from pipeline.report.imports.imported_run import Log, imported_run, name_of
from pipeline.report.imports.metric_tables import read_table
from pipeline.report.run_data import RunData, read_run


def read_runs(names: Sequence[str]) -> list[RunData]:
    """The runs of those directories, names under runs/, and log files; tables of one run, a metric each, become one run.

    Raises InputMissingError for a run that is not there, DataError for a file that is no log.
    """
    found: dict[tuple[str, str], RunData] = {}
    for place, name in enumerate(names):
        for data in read_log(Path(name)) if Path(name).is_file() else [read_run(name)]:
            is_table = data.run.path.suffix in (".csv", ".json")
            key = (data.name, data.manifest["imported"]["program"] if is_table else str(place))
            found[key] = _together(found[key], data) if key in found else data
    return _named_apart(list(found.values()))


def _named_apart(runs: list[RunData]) -> list[RunData]:
    """A second run of one name gets a number: tables, legends and CSV tell runs apart by their names."""
    names: list[str] = []
    for data in runs:
        count = names.count(data.name) + 1
        names.append(data.name)
        if count > 1:
            data.manifest["name"] = f"{data.name} #{count}"
    return runs


def _together(one: RunData, other: RunData) -> RunData:
    """One run of two tables that were exported from it."""
    log, more = one.manifest["imported"], other.manifest["imported"]
    joined = {"meanings": log["meanings"] | more["meanings"], "lost": log["lost"] + more["lost"]}
    rows = [*one.rows, *other.rows]
    return replace(one, rows=rows, all_rows=rows, manifest=one.manifest | {"imported": log | joined})


def read_log(path: Path) -> list[RunData]:
    """The runs of a log or an export. Raises DataError when nothing of it is a measured step."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if own := _own_rows(text):
        return [imported_run(path, own)]
    if logs := read_console(text):
        stages = [log.stage or ("base" if "max_steps" in log.inputs else "mid") for log in logs]
        names = [name_of(path)] if len(logs) == 1 else [f"{name_of(path)} {n} {s}" for n, s in enumerate(stages, 1)]
        return [imported_run(path, log, name=name) for name, log in zip(names, logs, strict=True)]
    if tables := read_table(text, name_of(path)):
        return [imported_run(path, log, name=run) for run, log in tables.items()]
    raise DataError(
        f"{path}: nothing in it is a measured step, so there is nothing to compare. "
        "Give a run directory, the console log of nanochat, picoLLM or a run of ours, a metrics.jsonl, a trainer_state.json, or "
        "a CSV or JSON export of NeMo's metrics from W&B or TensorBoard (docs/metrics.md names them)."
    )


def _own_rows(text: str) -> Log | None:
    """A metrics.jsonl: rows with step and attempt."""
    log = Log(program="tandem")
    if not text.startswith("{"):
        return None
    for number, line in enumerate(text.splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and {"step", "attempt"} <= row.keys():
            log.rows.append(row)
        else:
            log.lost.append((number, line))
    return log if len(log.rows) > len(log.lost) else None
