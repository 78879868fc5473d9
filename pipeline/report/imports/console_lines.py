"""Console logs of nanochat, picoLLM and our own: `step 05567/05568 (99.98%) | loss: 2.336916 | ... | eta: 0.0m`.

A base run counts its printed steps from zero, with the planned number behind a slash; mid-training and SFT count the steps
made, without one. Evaluations (`Step 00250 | Validation bpb: 0.91`) are printed with the number of steps made.
"""

import math
import re
from dataclasses import dataclass

from pipeline.report.imports.aliases import NANOCHAT, by_their_name
from pipeline.report.imports.console_head import batch_tokens_of, read_head
from pipeline.report.imports.imported_run import Log

HEAD = re.compile(r"\bstep\s+(\d+)(?:/(\d+))?\s*(?:\([\d.]+%\)\s*)?\|", re.IGNORECASE)
# What a measured step, or the beginning of a torn one, looks like: zero-padded to five digits and first on its line, but
# for a mark such as "[rank0]:" or a time stamp.
LOOKS = re.compile(r"^(?:\W|\d|\[[^\]]*\])*step\s+\d{5,}", re.IGNORECASE)
VALUE = r"-?(?:[\d,]*\.?\d+(?:e[+-]?\d+)?|nan|inf)|n/a"
UNIT = r"(?:ms|m|s|%)?(?=[\s|,]|$)"  # nothing else may follow a number: it was written over by another process
FIELD = re.compile(rf"([A-Za-z][\w/ ]*?)\s*:\s*({VALUE}){UNIT}", re.IGNORECASE)
NAMED = re.compile(r"(?:^|\|)\s*([A-Za-z][\w/ ]*?)\s*:")
ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
OWN = re.compile(r"(val|sft|core|core_partial|chat)/\w+")
END = re.compile(r"^\W*Peak memory usage: ([\d.]+)MiB")
ALIASES = by_their_name(NANOCHAT)
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
        """Optimizer steps made."""
        return self.printed + 1 if self.is_train and self.planned else self.printed

    def numbers(self) -> dict[str, float]:
        """By our names, in our units; a number that is not finite is left in."""
        found = {}
        for name, text in self.fields.items():
            if text.lower() == "n/a" or (name in UNKNOWN_AT_ZERO and float(text) == 0):
                continue
            alias = ALIASES.get(name)
            value = float(text.replace(",", ""))
            found[alias.ours if alias else name] = value * alias.factor if alias and alias.factor != 1.0 else value
        return {name: int(v) if name in WHOLE and math.isfinite(v) else v for name, v in found.items()}


UNKNOWN_AT_ZERO = {"bf16_mfu", "mfu"}  # nanochat prints 0.00 on a device whose peak it does not know
WHOLE = {"data/epoch", "data/pq", "data/rg"}


def read_console(text: str) -> list[Log]:
    """One log for each stage or run in it, in order; none when no line is a measured step."""
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
                memory = ALIASES["peak memory usage"]
                if float(end[1]):  # 0 where there is no CUDA device
                    logs[-1].rows.append(
                        {"step": _made(last), "attempt": attempt, memory.ours: float(end[1]) * memory.factor}
                    )
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
    """The line, or None when it is none, a field that we know holds no number, or it holds no field that we know."""
    head = HEAD.search(line)
    if head is None:
        return None
    rest = line[head.end() :]
    fields: dict[str, str] = {}
    for name, text in FIELD.findall(rest):
        key = name.lower()
        if key in ALIASES or OWN.fullmatch(name):
            fields.setdefault(key if key in ALIASES else name, text)
    known = {name.lower() for name in NAMED.findall(rest) if name.lower() in ALIASES}
    if not fields or known - fields.keys():
        return None
    return Line(int(head[1]), int(head[2]) if head[2] else None, fields)


def _made(line: Line | None) -> int:
    return line.step if line else 0


def _is_torn(line: Line, before: Line) -> bool:
    """Whether a last line without a line end lacks what the lines before it have."""
    return line.is_train and not before.fields.keys() <= line.fields.keys()


def _is_another_run(line: Line, last: Line | None, log: Log) -> bool:
    """Whether steps that begin again are the next stage or run, whose lines have other fields, not a restart of this one."""
    return last is None or log.finished or _kind(line) != _kind(last)


def _kind(line: Line) -> tuple[int | None, set[str]]:
    return line.planned, line.fields.keys() - {"eta"}


def _add(log: Log, line: Line, attempt: int) -> None:
    numbers = line.numbers()
    if line.is_train and line.planned is None and "data/epoch" in numbers:
        log.stage = "sft"
    early_eta = line.printed <= 10 and "eta" in line.fields  # nanochat tells none in its first ten steps
    if early_eta or "n/a" in line.fields.values() or any(OWN.fullmatch(name) for name in line.fields):
        log.program = "tandem"
    log.meanings |= {
        alias.ours: alias.meaning for name in line.fields if (alias := ALIASES.get(name)) and alias.meaning is not None
    }
    finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
    log.rows.append({"step": line.step, "attempt": attempt, **finite})
    if len(finite) < len(numbers):
        bad = sorted(numbers.keys() - finite.keys())
        log.rows.append({"event": "nonfinite", "step": line.step, "attempt": attempt, "metrics": bad})


def _finish(log: Log) -> None:
    """What only the whole log can tell: whose it is, and the tokens of a step."""
    if log.program == "tandem":
        log.meanings = {}
    last = max(row["step"] for row in log.rows)
    log.finished = log.finished or last == log.inputs.get("max_steps")
    if log.stage == "sft" and log.program != "tandem":  # there it is measured on what the assistant writes
        for row in log.rows:
            if "val/bpb" in row:
                row["sft/assistant_bpb"] = row.pop("val/bpb")
    batch = log.inputs.get("batch_tokens") or batch_tokens_of(log.rows)
    if batch:
        log.inputs["batch_tokens"] = batch
        for row in log.rows:
            if "event" not in row:
                row["tokens"] = row["step"] * batch
