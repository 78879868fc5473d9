"""Metric tables: CSV and JSON as W&B and TensorBoard export them, Trainer's log_history, and our own CSV.

W&B exports a chart (columns `<run> - <metric>`, with __MIN and __MAX beside) or a run's history (a column each metric);
TensorBoard a file for each metric (`run-<run>-tag-<metric>.csv` with Wall time, Step, Value; as JSON a list of the three).
"""

import csv
import io
import json
import math
import re
from typing import Any

from pipeline.report.imports.aliases import NANOCHAT_CSV, NANOCHAT_WANDB, NEMO, TRAINER, Alias, by_their_name
from pipeline.report.imports.imported_run import Log

STEPS = ("trainer/global_step", "global_step", "step", "_step")  # W&B's own _step only where there is no other
TAG = re.compile(r"(?:run-)?(?P<run>.+?)[-_]tag-(?P<tag>.+)")
OWN_NAME = re.compile(r"(train|optim|perf|data|val|sft|core|core_partial|chat|mem|gpu|ckpt|host|disk|net)/\S+")
IN_WANDB, IN_CSV = "nanochat (W&B)", "nanochat (CSV of its console)"
# Of two that know as many of a table's columns, the first is taken.
PROGRAMS = {"NeMo": NEMO, "Trainer": TRAINER, IN_WANDB: NANOCHAT_WANDB, IN_CSV: NANOCHAT_CSV}
TORN = "(torn)"  # column of a JSON line that cannot be read
Cells = dict[str, Any]


def read_table(text: str, stem: str) -> dict[str, Log]:
    """By run, what the table holds; {} when it is no table of metrics. stem: the file's name without its ending."""
    table = _cells(text)
    tagged = TAG.fullmatch(stem)
    if tagged and table and {"step", "value"} <= {name.lower() for name in table[0][1]}:
        table = [(number, _renamed(cells, tagged["tag"])) for number, cells in table]
        return _runs({tagged["run"]: table})
    return _runs(_by_run(table, stem))


def _renamed(cells: Cells, tag: str) -> Cells:
    lower = {name.lower(): value for name, value in cells.items()}
    # A tag's slashes and blanks become underscores in the file's name.
    known = {_plain(alias.theirs): alias.theirs for aliases in PROGRAMS.values() for alias in aliases}
    return {"step": lower["step"], known.get(_plain(tag), tag): lower["value"], "_timestamp": lower.get("wall time")}


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower())


def _cells(text: str) -> list[tuple[int, Cells]]:
    """(line or entry number, values by column)."""
    if text.lstrip()[:1] in "[{":
        return _json_cells(text)
    reader = csv.DictReader(io.StringIO(text))
    if not reader.fieldnames or len(reader.fieldnames) < 2:
        return []
    return [(reader.line_num, {k: v for k, v in row.items() if isinstance(k, str)}) for row in reader]


def _json_cells(text: str) -> list[tuple[int, Cells]]:
    try:
        value = json.loads(text)
    except ValueError:  # a row a line
        value = []
        for line in text.splitlines():
            try:
                value.append(json.loads(line))
            except ValueError:
                value.append({TORN: line})
    if isinstance(value, dict):
        value = value.get("log_history", [value])
    if not isinstance(value, list):
        return []
    triples = ("Wall time", "Step", "Value")
    rows = [dict(zip(triples, row, strict=True)) if isinstance(row, list) and len(row) == 3 else row for row in value]
    return [(number, row) for number, row in enumerate(rows, 1) if isinstance(row, dict)]


def _by_run(table: list[tuple[int, Cells]], stem: str) -> dict[str, list[tuple[int, Cells]]]:
    """A chart's columns `<run> - <metric>` and our own column `run` make several runs of one table."""
    names = dict.fromkeys(name for _, cells in table for name in cells)
    charts = {name: tuple(name.rsplit(" - ", 1)) for name in names if " - " in name}
    if charts:
        step = next((name for name in names if name.lower() in STEPS), None)
        runs = dict.fromkeys(run for run, _ in charts.values())
        return {
            run: [
                (
                    number,
                    {"step": cells.get(step or ""), **{m: cells.get(c) for c, (r, m) in charts.items() if r == run}},
                )
                for number, cells in table
            ]
            for run in runs
        }
    found: dict[str, list[tuple[int, Cells]]] = {}
    for number, cells in table:
        found.setdefault(str(cells["run"]) if "run" in names and cells.get("run") else stem, []).append((number, cells))
    return found


def _runs(tables: dict[str, list[tuple[int, Cells]]]) -> dict[str, Log]:
    found = {run: _log(table) for run, table in tables.items()}
    return {run: log for run, log in found.items() if log is not None}


def _log(table: list[tuple[int, Cells]]) -> Log | None:
    names = {name for _, cells in table for name in cells}
    lower = {name.lower() for name in names}
    program, aliases = max(PROGRAMS.items(), key=lambda item: len(lower & by_their_name(item[1]).keys()))
    known = by_their_name(aliases)
    own = [name for name in names if OWN_NAME.fullmatch(name)]
    if len(own) > len(lower & known.keys()):
        program, known = "tandem", {name: Alias(ours=name, theirs=name) for name in own}
    if not lower & known.keys():
        return None
    log = Log(program=program)
    log.meanings = {alias.ours: alias.meaning for name, alias in known.items() if name in lower and alias.meaning}
    for number, cells in table:
        told = {name.lower(): value for name, value in cells.items() if value not in (None, "")}
        numbers = {known[name].ours: _number(value, known[name]) for name, value in told.items() if name in known}
        step = _number(next((told[name] for name in STEPS if name in told), None))
        if TORN in cells or (numbers and (step is None or None in numbers.values())):
            log.lost.append((number, json.dumps(cells, default=str)))
        elif numbers:
            finite = {name: value for name, value in numbers.items() if value is not None and math.isfinite(value)}
            log.rows.append({"step": int(step or 0), **_stamps(told, program), **finite})
    _count_steps(log)
    return log if log.rows or log.lost else None


def _number(text: Any, alias: Alias | None = None) -> float | None:
    """In our unit; None when it is no number."""
    try:
        value = float(str(text).replace(",", ""))
    except ValueError:
        return None
    return value * alias.factor if alias else value


def _stamps(told: Cells, program: str) -> dict[str, Any]:
    """When the row was made, and of ours the tokens and the attempt."""
    stamps: dict[str, Any] = {"attempt": 1}
    own = {"time": "time", "tokens": "tokens", "attempt": "attempt"} if program == "tandem" else {}
    for ours, theirs in ({"time": "_timestamp"} | own).items():
        value = _number(told.get(theirs))
        if value is not None:
            stamps[ours] = value if ours == "time" else int(value)
    return stamps


def _count_steps(log: Log) -> None:
    """Steps as we count them, those that were made.

    NeMo's global_step counts from zero (at 99 it has consumed 100 batches), as do nanochat's W&B rows of a step, not those of
    an evaluation; a CSV of its console counts from zero where it begins there.
    """
    from_zero = log.program == "NeMo" or (log.program == IN_CSV and bool(log.rows) and log.rows[0]["step"] == 0)
    for row in log.rows:
        row["step"] += from_zero or (log.program == IN_WANDB and "perf/step_s" in row)
    _add_times(log.rows)


def _add_times(rows: list[dict[str, Any]]) -> None:
    """perf/total_s as the sum of the step times, where every step from the first on is in the table."""
    timed = [row for row in rows if "perf/step_s" in row]
    if any("perf/total_s" in row for row in rows) or [row["step"] for row in timed] != list(range(1, len(timed) + 1)):
        return
    total = 0.0
    for row in timed:
        total += row["perf/step_s"]
        row["perf/total_s"] = total
