"""Logs of nanochat, picoLLM and NeMo read as runs, with our names and units for their numbers."""

import io
import json
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd

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
)
from pipeline.process.errors import DataError
from pipeline.report.run_data import RunData, read_run
from pipeline.run_dir.rows import last_attempts
from pipeline.run_dir.run_directory import RunDirectory


@dataclass(kw_only=True)
class Log:
    """One run of a log.

    meanings: our names whose number has another definition there, with that definition. lost: line number and text of
    lines that look like a measured step and cannot be read. shape, inputs: as in run_manifest.json.
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

    def run(self, path: Path, name: str) -> RunData:
        """Return the log as a run. The log's path is its directory, which holds no other file of a run."""
        manifest: dict[str, Any] = {"name": name, "stage": self.stage, "shape": self.shape, "inputs": self.inputs}
        if self.finished:
            manifest["status"] = "finished"
        manifest["imported"] = {
            "program": self.program,
            "meanings": self.meanings,
            "lost": self.lost,
            "flops_per_token": self.flops_per_token,
        }
        return RunData(
            run=RunDirectory(path),
            recipe=self.recipe,
            manifest=manifest,
            rows=last_attempts(self.rows),
            all_rows=self.rows,
            samples=[],
            evals=[],
            failure=None,
            checkpoints=[],
        )


def read_logs(names: Sequence[str]) -> list[RunData]:
    """Return the runs of these log files and run directories; tables of one run, a metric each, become one run.

    Raises InputMissingError for a run that does not exist, DataError for a file without a measured step.
    """
    found: dict[tuple[str, str], RunData] = {}
    for place, name in enumerate(names):
        path = Path(name)
        runs = read_log(path) if path.is_file() else [read_run(name)]
        for data in runs:
            key = (data.name, str(place))
            if data.run.path.suffix in (".csv", ".json"):  # tables of one run's metrics, wherever they are listed
                key = (data.name, data.manifest["imported"]["program"])
            found[key] = _merged(found[key], data) if key in found else data
    return list(found.values())


def read_log(path: Path) -> list[RunData]:
    """Return the runs of a log or of an export. Raises DataError when no line is a measured step."""
    if path.name == "metrics.jsonl":
        return [read_run(str(path.parent))]
    name = path.resolve().parent.name if path.name == "trainer_state.json" else path.stem
    text = path.read_text(encoding="utf-8", errors="replace")
    if logs := read_console(text):
        if len(logs) == 1:
            return [logs[0].run(path, name)]
        return [log.run(path, f"{name} {n} {_stage(log)}") for n, log in enumerate(logs, 1)]
    if tables := read_table(text, name):
        return [log.run(path, run) for run, log in tables.items()]
    raise DataError(
        f"{path}: no line is a measured step. Give a run directory, a console log of nanochat or picoLLM, a "
        "metrics.jsonl, a trainer_state.json, or NeMo's metrics as CSV or JSON (docs/metrics.md)."
    )


def _stage(log: Log) -> str:
    if log.stage:
        return log.stage
    return "base" if "max_steps" in log.inputs else "mid"


def _merged(one: RunData, other: RunData) -> RunData:
    """Return one run of two tables that were exported from it."""
    log, more = one.manifest["imported"], other.manifest["imported"]
    both = {"meanings": log["meanings"] | more["meanings"], "lost": log["lost"] + more["lost"]}
    rows = [*one.rows, *other.rows]
    return replace(one, rows=rows, all_rows=rows, manifest=one.manifest | {"imported": log | both})


COUNT = r"([\d,]+)"
DEVICE = re.compile(r"GPU: (.+?) \| Peak FLOPS")
DTYPE = re.compile(r"COMPUTE_DTYPE: (?:torch\.)?(\w+)")
FLOPS = re.compile(r"Estimated FLOPs per token: ([\d.]+e[+-]?\d+)")
VOCABULARY = re.compile(rf"Vocab size: {COUNT}")
BATCH = re.compile(rf"Total batch size {COUNT}")
OF_A_RANK = re.compile(rf"Tokens / micro-batch / rank: {COUNT} x {COUNT} = {COUNT}")
OF_ALL_RANKS = re.compile(rf"Tokens / micro-batch: {COUNT}")
# The model's sizes, as newer logs (JSON) and older ones (a line each) name them.
SIZES = {
    "n_layer": r'(?:"n_layer"|num_layers): (\d+)',
    "n_embd": r'(?:"n_embd"|model_dim): (\d+)',
    "n_head": r'(?:"n_head"|num_heads): (\d+)',
    "n_kv_head": r'(?:"n_kv_head"|num_kv_heads): (\d+)',
}
HEAD = re.compile(r"\bstep\s+(\d+)(?:/(\d+))?\s*(?:\([\d.]+%\)\s*)?\|", re.IGNORECASE)
# A measured step, or the beginning of a torn one: zero-padded to five digits and first on its line, but for a mark such
# as "[rank0]:" or a time stamp.
LIKE_A_STEP = re.compile(r"^(?:\W|\d|\[[^\]]*\])*step\s+\d{5,}", re.IGNORECASE)
VALUE = r"-?(?:[\d,]*\.?\d+(?:e[+-]?\d+)?|nan|inf)|n/a"
UNIT = r"(?:ms|m|s|%)?(?=[\s|,]|$)"  # nothing else may follow a number: another process wrote over it
FIELD = re.compile(rf"([A-Za-z][\w/ ]*?)\s*:\s*({VALUE}){UNIT}", re.IGNORECASE)
NAMED = re.compile(r"(?:^|\|)\s*([A-Za-z][\w/ ]*?)\s*:")
ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
END = re.compile(r"^\W*Peak memory usage: ([\d.]+)MiB")
ALIASES = aliases_of(NANOCHAT)
UNKNOWN_AT_ZERO = {"bf16_mfu", "mfu"}  # nanochat prints 0.00 on a device whose peak it does not know
WHOLE = {"data/epoch", "data/pq", "data/rg"}


@dataclass
class Line:
    """A step or an evaluation as it was printed. fields: lower case name: text of its number."""

    printed: int
    planned: int | None
    fields: dict[str, str]

    @property
    def is_train(self) -> bool:
        return "loss" in self.fields or "training loss" in self.fields

    @property
    def step(self) -> int:
        """Return optimizer steps made."""
        return self.printed + 1 if self.is_train and self.planned else self.printed

    def numbers(self) -> dict[str, float]:
        """Return the numbers by our names, in our units, those that are not finite included."""
        found = {}
        for name, text in self.fields.items():
            if text.lower() == "n/a" or (name in UNKNOWN_AT_ZERO and float(text) == 0):
                continue
            ours, alias = ALIASES[name]
            value = float(text.replace(",", ""))
            if alias.unit:
                value *= alias.factor
            if ours in WHOLE and math.isfinite(value):
                value = int(value)
            found[ours] = value
        return found


def parse_line(line: str) -> Line | None:
    """Return the step or evaluation of a line; None where there is none, or a known field has no number."""
    head = HEAD.search(line)
    if head is None:
        return None
    rest = line[head.end() :]
    fields: dict[str, str] = {}
    for name, text in FIELD.findall(rest):
        if name.lower() in ALIASES:
            fields.setdefault(name.lower(), text)
    named = {name.lower() for name in NAMED.findall(rest)}
    if not fields or (named & ALIASES.keys()) - fields.keys():
        return None
    planned = int(head[2]) if head[2] else None
    return Line(int(head[1]), planned, fields)


def read_console(text: str) -> list[Log]:
    """Return one log for each stage or run in it, in order; none when no line is a measured step."""
    logs: list[Log] = []
    lost: list[tuple[int, str]] = []
    head: list[str] = []  # other text since the last stage ended
    early: list[Line] = []  # evaluations before the first step of a stage or of a later start
    last: Line | None = None
    attempt, made = 1, 0
    for number, whole in enumerate(text.splitlines(keepends=True), 1):
        # A line is one of four: no measured step; an evaluation; a step that was printed before; the next step.
        line = ESCAPES.sub("", whole).rstrip("\r\n")
        found = parse_line(line)
        if found and last and found.is_train and whole == line and not last.fields.keys() <= found.fields.keys():
            found = None  # torn: the last number may be cut too
        if found is None:
            head.append(line)
            if LIKE_A_STEP.match(line) or HEAD.search(line):
                lost.append((number, line.strip()))
            elif logs and (end := END.match(line)):
                _end(logs[-1], float(end[1]), step=made, attempt=attempt)
        elif not found.is_train:
            if logs and found.step >= made:
                _add(logs[-1], found, attempt)
            else:
                early.append(found)
        elif last and found.fields == last.fields and found.step == last.step:
            continue  # printed twice, as by tee and a terminal's own log
        else:
            # Steps that begin again are a restart of the stage, or the next stage where the lines are of another kind.
            if not logs or (found.step <= made and (logs[-1].finished or _kind(found) != _kind(last))):
                logs.append(_read_head(head))
                head, attempt = [], 1
            elif found.step <= made:
                attempt += 1
                logs[-1].rows.append({"event": "attempt", "attempt": attempt, "step": found.step - 1})
            for row in (*early, found):
                _add(logs[-1], row, attempt)
            early, last, made = [], found, found.step
            if found.planned:
                logs[-1].inputs["max_steps"] = found.planned
    for log in logs:
        _finish(log)
    if logs:
        logs[0].lost = lost
    return logs


def _kind(line: Line | None) -> Any:
    """Return the same for lines of one stage, whose steps begin again after a restart only."""
    return line and (line.planned, line.fields.keys() - {"eta"})


def _read_head(lines: list[str]) -> Log:
    """Return a log with the device, model, batch and tokenizer that these lines name."""
    text, log = "\n".join(lines), Log(program="nanochat or picoLLM")

    def count(pattern: re.Pattern[str], group: int = 1) -> int | None:
        found = pattern.search(text)
        return int(found[group].replace(",", "")) if found else None

    for name, pattern in SIZES.items():
        if found := re.search(pattern, text):
            log.recipe.setdefault("model", {})[name] = int(found[1])
    if vocabulary := count(VOCABULARY):
        log.recipe["tokenizer"] = {"vocab_size": vocabulary}
    if row_tokens := count(OF_A_RANK, 2):
        log.recipe["data"] = {"row_tokens": row_tokens}
        log.recipe["train"] = {"per_device_train_batch_size": count(OF_A_RANK)}
    if batch := count(BATCH):
        log.inputs["batch_tokens"] = batch
    for key, known in (("device", DEVICE), ("dtype", DTYPE)):
        if found := known.search(text):
            log.shape[key] = found[1]
    one, all_ranks = count(OF_A_RANK, 3), count(OF_ALL_RANKS)
    if one and all_ranks:
        log.shape["processes"] = all_ranks // one
    if found := FLOPS.search(text):
        log.flops_per_token = float(found[1])
    return log


def _add(log: Log, line: Line, attempt: int) -> None:
    numbers = line.numbers()
    if line.is_train and line.planned is None and "data/epoch" in numbers:
        log.stage = "sft"
    for name in line.fields:
        ours, alias = ALIASES[name]
        if alias.meaning is not None:
            log.meanings[ours] = alias.meaning
    finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
    log.rows.append({"step": line.step, "attempt": attempt, **finite})
    if len(finite) < len(numbers):
        bad = sorted(numbers.keys() - finite.keys())
        log.rows.append({"event": "nonfinite", "step": line.step, "attempt": attempt, "metrics": bad})


def _end(log: Log, peak_mib: float, *, step: int, attempt: int) -> None:
    ours, alias = ALIASES["peak memory usage"]
    log.finished = True
    if peak_mib:  # 0 where there is no CUDA device
        log.rows.append({"step": step, "attempt": attempt, ours: peak_mib * alias.factor})


def _finish(log: Log) -> None:
    last = max(row["step"] for row in log.rows)
    log.finished = log.finished or last == log.inputs.get("max_steps")
    batch = log.inputs.get("batch_tokens")
    for row in log.rows:
        if log.stage == "sft" and VAL_BPB in row:  # measured there on what the assistant writes
            row[SFT_BPB] = row.pop(VAL_BPB)
        if batch and "event" not in row:
            row["tokens"] = row["step"] * batch


STEPS = ("trainer/global_step", "global_step", "step", "_step")  # W&B's own _step only where there is no other
TAG = re.compile(r"(?:run-)?(?P<run>.+?)[-_]tag-(?P<tag>.+)")
# Of two that know as many of a table's columns, the first is taken.
PROGRAMS = {program: aliases_of(program) for program in (NEMO, TRAINER, NANOCHAT_WANDB, NANOCHAT_CSV)}


def read_table(text: str, stem: str) -> dict[str, Log]:
    """Return the logs of a table by run; {} where it is no table of metrics. stem: the file's name without ending."""
    frame = _frame(text)
    if frame is None:
        return {}
    frame.columns = [str(name).lower() for name in frame.columns]
    tagged = TAG.fullmatch(stem)
    tables = _tables_of_charts(frame, text)
    if tagged and {"step", "value"} <= set(frame.columns):
        metric = _plain(tagged["tag"])
        # A tag's slashes and blanks become underscores in the file's name.
        known = {_plain(name): name for name in chain(*PROGRAMS.values())}
        frame = frame.rename(columns={"value": known.get(metric, metric), "wall time": "_timestamp"})
        tables = {tagged["run"]: frame}
    logs = {}
    for run, table in (tables or {stem: frame}).items():
        log = _log(table)
        if log is not None:
            logs[run] = log
    return logs


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower())


def _frame(text: str) -> pd.DataFrame | None:
    """Return the table with each cell as it was written, None where the text is none."""
    try:
        if text.lstrip()[:1] not in ("[", "{"):
            return pd.read_csv(io.StringIO(text), dtype=str)
        rows = _json_rows(text)
    except ValueError:
        return None
    if rows and isinstance(rows[0], list):
        return pd.DataFrame(rows, columns=["wall time", "step", "value"])  # a scalar of TensorBoard
    return pd.DataFrame([row for row in rows if isinstance(row, dict)], dtype=object)


def _json_rows(text: str) -> list[Any]:
    try:
        value = json.loads(text)
    except ValueError:  # an object a line
        value = [json.loads(line) for line in text.splitlines()]
    if isinstance(value, dict):
        value = value.get("log_history", [value])
    return value if isinstance(value, list) else []


def _tables_of_charts(frame: pd.DataFrame, text: str) -> dict[str, pd.DataFrame]:
    """Return the table of each run of a W&B chart, whose columns are `<run> - <metric>`; {} for other tables."""
    steps = [name for name in STEPS if name in frame.columns][:1]
    metrics_of: dict[str, dict[str, str]] = defaultdict(dict)
    for name in frame.columns:
        run, is_chart, metric = name.rpartition(" - ")
        if is_chart:
            metrics_of[run][name] = metric
    found = {}
    for lower, metrics in metrics_of.items():
        place = text.lower().index(lower)
        run = text[place : place + len(lower)]  # as it was written
        found[run] = frame[[*steps, *metrics]].rename(columns=metrics)
    return found


def _log(frame: pd.DataFrame) -> Log | None:
    columns = set(frame.columns)
    program = max(PROGRAMS, key=lambda name: len(columns & PROGRAMS[name].keys()))
    known = PROGRAMS[program]
    aliases = {name: known[name] for name in frame.columns if name in known}
    step_names = [name for name in STEPS if name in columns]
    if not aliases or not step_names:
        return None
    log = Log(program=program)
    log.meanings = {ours: alias.meaning for ours, alias in aliases.values() if alias.meaning}
    steps, is_lost = _numbers(frame[step_names[0]])
    series: dict[str, pd.Series] = {}
    for name, (ours, alias) in aliases.items():
        series[ours], is_text = _numbers(frame[name], alias)
        is_lost |= is_text | (series[ours].notna() & steps.isna())
    if "_timestamp" in columns:
        series["time"], _ = _numbers(frame["_timestamp"])
    for place, numbers in enumerate(pd.DataFrame(series).to_dict("records")):
        finite = {name: float(value) for name, value in numbers.items() if math.isfinite(value)}
        if is_lost.iloc[place]:
            # The first line of a CSV is its head.
            log.lost.append((place + 2, ",".join(map(str, frame.iloc[place]))))
        elif finite.keys() - {"time"}:
            log.rows.append({"step": int(steps.iloc[place]), "attempt": 1, **finite})
    _count_steps(log)
    return log if log.rows or log.lost else None


def _numbers(cells: pd.Series, alias: Alias | None = None) -> tuple[pd.Series, pd.Series]:
    """Return the numbers in our unit (NaN where there is none), and which cells hold other text."""
    texts = cells.astype(str).str.replace(",", "")
    numbers = pd.to_numeric(texts, errors="coerce")
    is_text = numbers.isna() & cells.notna() & ~texts.str.lower().isin(["", "nan", "none"])
    if alias is not None:
        numbers = numbers * alias.factor
    return numbers, is_text


def _count_steps(log: Log) -> None:
    """Count the steps that were made, in place, and add perf/total_s where every step's time is known.

    NeMo's global_step counts from zero (at 99 it has consumed 100 batches), as do nanochat's W&B rows of a step, not
    those of an evaluation; a CSV of its console counts from zero where it begins there.
    """
    from_zero = log.program == NEMO
    if log.program == NANOCHAT_CSV and log.rows:
        from_zero = log.rows[0]["step"] == 0
    for row in log.rows:
        if from_zero or (log.program == NANOCHAT_WANDB and "perf/step_s" in row):
            row["step"] += 1
    timed = [row for row in log.rows if "perf/step_s" in row]
    if [row["step"] for row in timed] == list(range(1, len(timed) + 1)):
        total = 0.0
        for row in timed:
            total += row["perf/step_s"]
            row.setdefault("perf/total_s", total)
