"""Logs of nanochat, picoLLM and NeMo read as runs: rows with our names, and what a log does not know or means by one
of them."""

import csv
import io
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.metrics import (
    NANOCHAT,
    NANOCHAT_CSV,
    NANOCHAT_WANDB,
    NEMO,
    SFT_BPB,
    TRAINER,
    VAL_BPB,
    Alias,
    aliases_of,
    groups,
    is_evaluation,
)
from pipeline.process.errors import DataError
from pipeline.report.run_data import RunData, read_run
from pipeline.run_dir.rows import last_attempts
from pipeline.run_dir.run_directory import RunDirectory


@dataclass(kw_only=True)
class Log:
    """Result of an importer.

    meanings: of our names whose number is another one, what it is. lost: line number and text of what looks like a
    measured step and could not be read. shape, inputs: as the manifest of a run has them; flops_per_token: as the log
    gives them.
    """

    program: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    meanings: dict[str, str] = field(default_factory=dict)
    lost: list[tuple[int, str]] = field(default_factory=list)
    recipe: dict[str, Any] = field(default_factory=dict)
    shape: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)
    flops_per_token: float | None = None
    stage: str | None = None
    finished: bool = False


def imported_run(path: Path, log: Log, *, name: str | None = None) -> RunData:
    """Return the log as a run. Its directory is the log's path, under which nothing else of a run lies."""
    return RunData(
        run=RunDirectory(path),
        recipe=log.recipe,
        manifest={
            "name": name or name_of(path),
            "stage": log.stage,
            "shape": log.shape,
            "inputs": log.inputs,
            **({"status": "finished"} if log.finished else {}),
            "imported": {
                "program": log.program,
                "meanings": log.meanings,
                "lost": log.lost,
                "flops_per_token": log.flops_per_token,
            },
        },
        rows=last_attempts(log.rows),
        all_rows=log.rows,
        samples=[],
        evals=[],
        failure=None,
        checkpoints=[],
    )


def name_of(path: Path) -> str:
    """Return the file's name, or its folder's where every run has a file of that name."""
    if path.name in ("metrics.jsonl", "console.log", "trainer_state.json"):
        return path.resolve().parent.name
    return re.sub(r"\.(log|txt|csv|jsonl?|out)$", "", path.name)


def is_imported(data: RunData) -> bool:
    return "imported" in data.manifest


def meaning_of(data: RunData, name: str) -> str | None:
    """Return what the run's number of that name is, where it is another one than ours."""
    return data.fact("imported.meanings", {}).get(name)


def lost_lines(data: RunData) -> list[tuple[int, str]]:
    """Return number and text of the log's lines that look like a measured step and could not be read."""
    return data.fact("imported.lost", [])


# What a console log says before its first step, and the tokens of a step where it does not say them.

COUNT = r"([\d,]+)"
DEVICE = re.compile(r"GPU: (.+?) \| Peak FLOPS")
DTYPE = re.compile(r"COMPUTE_DTYPE: (?:torch\.)?(\w+)")
OURS = re.compile(
    r"shape: device (?P<device>.+?), processes (?P<processes>\d+), .*?dtype (?P<dtype>\w+), "
    r"compiled (?P<compiled>\w+), attention (?P<attention>\w+)"
)
FLOPS = re.compile(r"Estimated FLOPs per token: ([\d.]+e[+-]?\d+)")
VOCABULARY = re.compile(rf"Vocab size: {COUNT}")
BATCH = re.compile(rf"Total batch size {COUNT}")
OF_A_RANK = re.compile(rf"Tokens / micro-batch / rank: {COUNT} x {COUNT} = {COUNT}")
OF_ALL_RANKS = re.compile(rf"Tokens / micro-batch: {COUNT}")
# The model's sizes, as the newer logs (JSON) and the older ones (a line each) name them.
SIZES = {
    "n_layer": r'(?:"n_layer"|num_layers): (\d+)',
    "n_embd": r'(?:"n_embd"|model_dim): (\d+)',
    "n_head": r'(?:"n_head"|num_heads): (\d+)',
    "n_kv_head": r'(?:"n_kv_head"|num_kv_heads): (\d+)',
}
WINDOWS = re.compile(r'"window_pattern": ("\w+")')


def read_head(lines: list[str], log: Log) -> Log:
    """Return the log with what those lines tell of device, model, batch and tokenizer."""
    text = "\n".join(lines)

    def count(pattern: re.Pattern[str], group: int = 1) -> int | None:
        found = pattern.search(text)
        return int(found[group].replace(",", "")) if found else None

    model: dict[str, Any] = {
        name: int(found[1]) for name, pattern in SIZES.items() if (found := re.search(pattern, text))
    }
    if found := WINDOWS.search(text):
        model["options"] = {"window_pattern": json.loads(found[1])}
    log.recipe = {"model": model} if model else {}
    for section, name, value in (
        ("tokenizer", "vocab_size", count(VOCABULARY)),
        ("data", "row_tokens", count(OF_A_RANK, 2)),
        ("train", "per_device_train_batch_size", count(OF_A_RANK)),
    ):
        if value is not None:
            log.recipe.setdefault(section, {})[name] = value
    if batch := count(BATCH):
        log.inputs["batch_tokens"] = batch
    for name, pattern in (("device", DEVICE), ("dtype", DTYPE)):
        if found := pattern.search(text):
            log.shape[name] = found[1]
    one, all_ranks = count(OF_A_RANK, 3), count(OF_ALL_RANKS)
    if one and all_ranks:
        log.shape["processes"] = all_ranks // one
    if found := FLOPS.search(text):
        log.flops_per_token = float(found[1])
    if found := OURS.search(text):
        log.program = "tandem"
        log.shape |= found.groupdict() | {
            "processes": int(found["processes"]),
            "compiled": found["compiled"] == "True",
        }
    return log


def batch_tokens_of(rows: list[dict[str, Any]]) -> int | None:
    """Return tokens of a step, where times (rounded to 0.01 ms) and rates (cut to whole tokens/s) leave one number
    possible."""
    timed = [
        (row["perf/step_s"], row["perf/tok_per_s"]) for row in rows if {"perf/step_s", "perf/tok_per_s"} <= row.keys()
    ]
    if not timed:
        return None
    half = 5.001e-6
    least = max(math.ceil(rate * (step_s - half)) for step_s, rate in timed)
    most = min(math.floor((rate + 1) * (step_s + half)) for step_s, rate in timed)
    return least if least == most else None


# Console logs of nanochat, picoLLM and our own: `step 05567/05568 (99.98%) | loss: 2.336916 | ... | eta: 0.0m`.

HEAD = re.compile(r"\bstep\s+(\d+)(?:/(\d+))?\s*(?:\([\d.]+%\)\s*)?\|", re.IGNORECASE)
# What a measured step, or the beginning of a torn one, looks like: zero-padded to five digits and first on its line,
# but for a mark such as "[rank0]:" or a time stamp.
LOOKS = re.compile(r"^(?:\W|\d|\[[^\]]*\])*step\s+\d{5,}", re.IGNORECASE)
VALUE = r"-?(?:[\d,]*\.?\d+(?:e[+-]?\d+)?|nan|inf)|n/a"
UNIT = r"(?:ms|m|s|%)?(?=[\s|,]|$)"  # nothing else may follow a number: it was written over by another process
FIELD = re.compile(rf"([A-Za-z][\w/ ]*?)\s*:\s*({VALUE}){UNIT}", re.IGNORECASE)
NAMED = re.compile(r"(?:^|\|)\s*([A-Za-z][\w/ ]*?)\s*:")
ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
END = re.compile(r"^\W*Peak memory usage: ([\d.]+)MiB")
ALIASES = aliases_of(NANOCHAT)
LOSSES = ("loss", "training loss")


@dataclass
class Line:
    """A step or an evaluation as it was printed. fields: lower case name: text of its number."""

    printed: int
    planned: int | None
    fields: dict[str, str]

    @property
    def is_train(self) -> bool:
        return any(name in self.fields for name in LOSSES)

    @property
    def step(self) -> int:
        """Return optimizer steps made."""
        return self.printed + 1 if self.is_train and self.planned else self.printed

    def numbers(self) -> dict[str, float]:
        """Return the numbers by our names, in our units; one that is not finite is left in."""
        found = {}
        for name, text in self.fields.items():
            if text.lower() == "n/a" or (name in UNKNOWN_AT_ZERO and float(text) == 0):
                continue
            ours, alias = ALIASES.get(name, (name, None))
            value = float(text.replace(",", ""))
            found[ours] = value * alias.factor if alias and alias.unit else value
        return {name: int(v) if name in WHOLE and math.isfinite(v) else v for name, v in found.items()}


UNKNOWN_AT_ZERO = {"bf16_mfu", "mfu"}  # nanochat prints 0.00 on a device whose peak it does not know
WHOLE = {"data/epoch", "data/pq", "data/rg"}


def read_console(text: str) -> list[Log]:
    """Return one log for each stage or run in it, in order; none when no line is a measured step."""
    logs: list[Log] = []
    lost: list[tuple[int, str]] = []
    head: list[str] = []  # other text since the last stage ended
    early: list[Line] = []  # evaluations of a step before the last one: of a later start, or of the next stage
    last: Line | None = None
    attempt = 1
    for number, whole in enumerate(text.splitlines(keepends=True), 1):
        line = ESCAPES.sub("", whole).rstrip("\r\n")
        found = parse_line(line)
        if found is None or (last and whole == line and _is_torn(found, last)):
            if LOOKS.match(line) or HEAD.search(line):
                lost.append((number, line.strip()))
            elif logs and (end := END.match(line)):
                ours, alias = ALIASES["peak memory usage"]
                if float(end[1]):  # 0 where there is no CUDA device
                    logs[-1].rows.append({"step": _made(last), "attempt": attempt, ours: float(end[1]) * alias.factor})
                logs[-1].finished = True
            head.append(line)
            continue
        if not found.is_train:
            if logs and found.step >= _made(last):
                _add(logs[-1], found, attempt)
            else:
                early.append(found)
            continue
        if not logs or (found.step <= _made(last) and _is_another_run(found, last, logs[-1])):
            logs.append(read_head(head, Log(program="nanochat or picoLLM")))
            head, attempt = [], 1
        elif last and found.fields == last.fields and found.step == last.step:
            continue  # printed twice, as by tee and a terminal's own log
        elif found.step <= _made(last):
            attempt += 1
            logs[-1].rows.append({"event": "attempt", "attempt": attempt, "step": found.step - 1})
        for row in (*early, found):
            _add(logs[-1], row, attempt)
        early, last = [], found
        if found.planned:
            logs[-1].inputs["max_steps"] = found.planned
    for row in early:
        if logs:
            _add(logs[-1], row, attempt)
    for log in logs:
        _finish(log)
    if logs:
        logs[0].lost = lost
    return logs


def parse_line(line: str) -> Line | None:
    """Return the line, or None when it is none, a field that we know holds no number, or it holds no field that we
    know."""
    head = HEAD.search(line)
    if head is None:
        return None
    rest = line[head.end() :]
    fields: dict[str, str] = {}
    for name, text in FIELD.findall(rest):
        key = name.lower()
        if key in ALIASES or _is_own(name):
            fields.setdefault(key if key in ALIASES else name, text)
    known = {name.lower() for name in NAMED.findall(rest) if name.lower() in ALIASES}
    if not fields or known - fields.keys():
        return None
    return Line(int(head[1]), int(head[2]) if head[2] else None, fields)


def _is_own(name: str) -> bool:
    """Return whether our own console prints an evaluation by that name."""
    return is_evaluation(name) and re.fullmatch(r"\w+/\w+", name) is not None


def _made(line: Line | None) -> int:
    return line.step if line else 0


def _is_torn(line: Line, before: Line) -> bool:
    """Return whether a last line without a line end lacks what the lines before it have."""
    return line.is_train and not before.fields.keys() <= line.fields.keys()


def _is_another_run(line: Line, last: Line | None, log: Log) -> bool:
    """Return whether steps that begin again are the next stage or run, whose lines have other fields, not a restart of
    this one."""
    return last is None or log.finished or _kind(line) != _kind(last)


def _kind(line: Line) -> tuple[int | None, set[str]]:
    return line.planned, line.fields.keys() - {"eta"}


def _add(log: Log, line: Line, attempt: int) -> None:
    numbers = line.numbers()
    if line.is_train and line.planned is None and "data/epoch" in numbers:
        log.stage = "sft"
    early_eta = line.printed <= 10 and "eta" in line.fields  # nanochat prints none in its first ten steps
    if early_eta or "n/a" in line.fields.values() or any(map(_is_own, line.fields)):
        log.program = "tandem"
    known = (ALIASES[name] for name in line.fields if name in ALIASES)
    log.meanings |= {ours: alias.meaning for ours, alias in known if alias.meaning is not None}
    finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
    log.rows.append({"step": line.step, "attempt": attempt, **finite})
    if len(finite) < len(numbers):
        bad = sorted(numbers.keys() - finite.keys())
        log.rows.append({"event": "nonfinite", "step": line.step, "attempt": attempt, "metrics": bad})


def _finish(log: Log) -> None:
    """Set what only the whole log can tell: whose it is, and the tokens of a step."""
    if log.program == "tandem":
        log.meanings = {}
    last = max(row["step"] for row in log.rows)
    log.finished = log.finished or last == log.inputs.get("max_steps")
    if log.stage == "sft" and log.program != "tandem":  # there it is measured on what the assistant writes
        for row in log.rows:
            if VAL_BPB in row:
                row[SFT_BPB] = row.pop(VAL_BPB)
    batch = log.inputs.get("batch_tokens") or batch_tokens_of(log.rows)
    if batch:
        log.inputs["batch_tokens"] = batch
        for row in log.rows:
            if "event" not in row:
                row["tokens"] = row["step"] * batch


# Metric tables: CSV and JSON as W&B and TensorBoard export them, Trainer's log_history, and our own CSV.

STEPS = ("trainer/global_step", "global_step", "step", "_step")  # W&B's own _step only where there is no other
TAG = re.compile(r"(?:run-)?(?P<run>.+?)[-_]tag-(?P<tag>.+)")
OWN_NAME = re.compile(rf"({'|'.join(groups())})/\S+")
# Of two that know as many of a table's columns, the first is taken.
PROGRAMS = {program: aliases_of(program) for program in (NEMO, TRAINER, NANOCHAT_WANDB, NANOCHAT_CSV)}
TORN = "(torn)"  # column of a JSON line that cannot be read
Cells = dict[str, Any]


def read_table(text: str, stem: str) -> dict[str, Log]:
    """Return by run what the table holds; {} when it is no table of metrics. stem: the file's name without its
    ending."""
    table = _cells(text)
    tagged = TAG.fullmatch(stem)
    if tagged and table and {"step", "value"} <= {name.lower() for name in table[0][1]}:
        table = [(number, _renamed(cells, tagged["tag"])) for number, cells in table]
        return _runs({tagged["run"]: table})
    return _runs(_by_run(table, stem))


def _renamed(cells: Cells, tag: str) -> Cells:
    lower = {name.lower(): value for name, value in cells.items()}
    # A tag's slashes and blanks become underscores in the file's name.
    known = {_plain(alias.name): alias.name for aliases in PROGRAMS.values() for _, alias in aliases.values()}
    return {"step": lower["step"], known.get(_plain(tag), tag): lower["value"], "_timestamp": lower.get("wall time")}


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower())


def _cells(text: str) -> list[tuple[int, Cells]]:
    """Return (line or entry number, values by column)."""
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
    """Return the table by run: a chart's columns `<run> - <metric>` and our own column `run` make several runs of one
    table."""
    found: dict[str, list[tuple[int, Cells]]] = {}
    names = dict.fromkeys(name for _, cells in table for name in cells)
    charts = {name: tuple(name.rsplit(" - ", 1)) for name in names if " - " in name}
    if charts:
        step = next((name for name in names if name.lower() in STEPS), None)
        found = {run: [] for run, _ in charts.values()}
        for number, cells in table:
            for run, own in found.items():
                metrics = {metric: cells.get(name) for name, (of, metric) in charts.items() if of == run}
                own.append((number, {"step": cells.get(step or ""), **metrics}))
        return found
    for number, cells in table:
        found.setdefault(str(cells["run"]) if "run" in names and cells.get("run") else stem, []).append(
            (number, cells)
        )
    return found


def _runs(tables: dict[str, list[tuple[int, Cells]]]) -> dict[str, Log]:
    found = {run: _log(table) for run, table in tables.items()}
    return {run: log for run, log in found.items() if log is not None}


def _log(table: list[tuple[int, Cells]]) -> Log | None:
    names = {name for _, cells in table for name in cells}
    lower = {name.lower() for name in names}
    program, known = max(PROGRAMS.items(), key=lambda item: len(lower & item[1].keys()))
    own = [name for name in names if OWN_NAME.fullmatch(name)]
    if len(own) > len(lower & known.keys()):
        program, known = "tandem", {name: (name, Alias("tandem", name)) for name in own}
    if not lower & known.keys():
        return None
    log = Log(program=program)
    log.meanings = {ours: a.meaning for name, (ours, a) in known.items() if name in lower and a.meaning}
    for number, cells in table:
        given = {name.lower(): value for name, value in cells.items() if value not in (None, "")}
        numbers = {known[name][0]: _number(value, known[name][1]) for name, value in given.items() if name in known}
        step = _number(next((given[name] for name in STEPS if name in given), None))
        if TORN in cells or (numbers and (step is None or None in numbers.values())):
            log.lost.append((number, json.dumps(cells, default=str)))
        elif numbers:
            finite = {name: value for name, value in numbers.items() if value is not None and math.isfinite(value)}
            log.rows.append({"step": int(step or 0), **_stamps(given, program), **finite})
    _count_steps(log)
    return log if log.rows or log.lost else None


def _number(text: Any, alias: Alias | None = None) -> float | None:
    """Return the number in our unit; None when the text is none."""
    try:
        value = float(str(text).replace(",", ""))
    except ValueError:
        return None
    return value * alias.factor if alias else value


def _stamps(given: Cells, program: str) -> dict[str, Any]:
    """Return when the row was made, and of ours the tokens and the attempt."""
    stamps: dict[str, Any] = {"attempt": 1}
    own = {"time": "time", "tokens": "tokens", "attempt": "attempt"} if program == "tandem" else {}
    for ours, theirs in ({"time": "_timestamp"} | own).items():
        value = _number(given.get(theirs))
        if value is not None:
            stamps[ours] = value if ours == "time" else int(value)
    return stamps


def _count_steps(log: Log) -> None:
    """Count steps as we do, those that were made, in place.

    NeMo's global_step counts from zero (at 99 it has consumed 100 batches), as do nanochat's W&B rows of a step, not
    those of an evaluation; a CSV of its console counts from zero where it begins there.
    """
    from_zero = log.program == NEMO or (log.program == NANOCHAT_CSV and bool(log.rows) and log.rows[0]["step"] == 0)
    for row in log.rows:
        row["step"] += from_zero or (log.program == NANOCHAT_WANDB and "perf/step_s" in row)
    _add_times(log.rows)


def _add_times(rows: list[dict[str, Any]]) -> None:
    """Add perf/total_s as the sum of the step times, where every step from the first on is in the table."""
    timed = [row for row in rows if "perf/step_s" in row]
    if any("perf/total_s" in row for row in rows) or [row["step"] for row in timed] != list(range(1, len(timed) + 1)):
        return
    total = 0.0
    for row in timed:
        total += row["perf/step_s"]
        row["perf/total_s"] = total


# A log file as runs, recognised by what it holds.


def read_runs(names: Sequence[str]) -> list[RunData]:
    """Return the runs of those directories, names under runs/, and log files; tables of one run, a metric each, become
    one run.

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
    """Give a second run of one name a number: tables, legends and CSV tell runs apart by their names."""
    names: list[str] = []
    for data in runs:
        count = names.count(data.name) + 1
        names.append(data.name)
        if count > 1:
            data.manifest["name"] = f"{data.name} #{count}"
    return runs


def _together(one: RunData, other: RunData) -> RunData:
    """Return one run of two tables that were exported from it."""
    log, more = one.manifest["imported"], other.manifest["imported"]
    joined = {"meanings": log["meanings"] | more["meanings"], "lost": log["lost"] + more["lost"]}
    rows = [*one.rows, *other.rows]
    return replace(one, rows=rows, all_rows=rows, manifest=one.manifest | {"imported": log | joined})


def read_log(path: Path) -> list[RunData]:
    """Return the runs of a log or an export. Raises DataError when nothing of it is a measured step."""
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
        f"{path}: nothing in it is a measured step, so there is nothing to compare. Give a run directory, the console "
        "log of nanochat, picoLLM or a run of ours, a metrics.jsonl, a trainer_state.json, or a CSV or JSON export of "
        "NeMo's metrics from W&B or TensorBoard (docs/metrics.md names them)."
    )


def _own_rows(text: str) -> Log | None:
    """Return a metrics.jsonl: rows with step and attempt."""
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
