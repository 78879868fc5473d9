"""Everything the report shows, read from a run directory once. Any file but one may be missing: a crash leaves what it
leaves."""

import datetime
import math
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.metrics import SECTIONS, SFT_BPB, VAL_BPB, VAL_BPB_DOCUMENTS, VAL_LOSS, Protocol
from pipeline.process.errors import InputMissingError, TandemError
from pipeline.process.storage import folder_bytes, read_json
from pipeline.recipe.located_yaml import load_mapping
from pipeline.run_dir.checkpoints import SEAL, by_step, step_of
from pipeline.run_dir.columns import Columns, attempt_spans, read_columns
from pipeline.run_dir.parents import base_run
from pipeline.run_dir.rows import counts, counts_beside, read_rows
from pipeline.run_dir.run_directory import RunDirectory, find_run

# Control characters but tab and newline, and Unicode's marks of direction.
HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


# In this order: what stands for a character may hold those before it.
CELL_TEXTS = (
    ("\\", "\\\\"),
    ("&", "&amp;"),
    ("<", "&lt;"),
    ("|", "\\|"),
    ("](", "]\\("),
    ("\r", " "),
    ("\n", "<br>"),
)


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table, "" without rows. None becomes a dash; no text inside a cell can break it."""
    if not rows:
        return ""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(cell, line))} |\n" for line in lines)


def filled_table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return the table without the columns that are None in every row; "" without rows."""
    columns = zip(head, *rows, strict=True)
    kept = [column for column in columns if any(value is not None for value in column[1:])]
    if not kept:
        return ""
    head, *rows = zip(*kept, strict=True)
    return table(head, rows)


def facts_table(what: str, facts: Sequence[Sequence[Any]]) -> str:
    """Return the table of (name, value), without those that are not known; "" when none is."""
    return table([what, "value"], [fact for fact in facts if fact[1] is not None])


def joined(*parts: str) -> str:
    """Return the parts that say something, a blank line between them."""
    return "\n".join(filter(None, parts))


def titled(title: str, text: str) -> str:
    """Return the text under a title of a section's part; "" where there is no text."""
    return f"### {title}\n\n{text}" if text else ""


def lines_of(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def cell(value: Any) -> str:
    """Return the value as text that means itself: neither Markdown nor HTML in it is taken for such."""
    if value is None:
        return "-"
    text = str(value)
    for bare, shown in CELL_TEXTS:
        text = text.replace(bare, shown)
    text = re.sub(r"[*`~]|(?<![A-Za-z0-9_])_", r"\\\g<0>", text)
    return visible(text, backslash="\\\\")


def visible(text: str, *, backslash: str = "\\") -> str:
    """Return the text with characters that are not seen shown by their code.

    An untrained byte-level model writes control characters, and marks of direction turn around what follows them.
    """

    def escaped(match: re.Match[str]) -> str:
        point = ord(match[0])
        return f"{backslash}x{point:02x}" if point < 256 else f"{backslash}u{point:04x}"

    return HIDDEN.sub(escaped, text)


def code(text: str, language: str = "") -> str:
    """Return a fenced block whose fence is longer than any in the text."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text.rstrip()}\n{fence}\n"


def number(value: float | int | None, digits: int = 4) -> str | None:
    """Return an integer with thousands marked, another number to `digits` significant digits; None stays None."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:,.{digits}g}" if abs(value) < 1e4 else f"{value:,.0f}"


def fixed(value: float | None, digits: int = 4) -> str | None:
    """Return the number with so many digits after the point; None stays None."""
    return None if value is None else f"{value:.{digits}f}"


def percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.2f} %"


def date(value: Any) -> Any:
    """Return seconds since 1970 as an ISO date in UTC; anything else as it is."""
    if not isinstance(value, (int, float)):
        return value
    return datetime.datetime.fromtimestamp(value, datetime.UTC).isoformat(timespec="seconds")


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """Return at most `count` of the items, evenly spaced, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def read_json_or_none(path: Path) -> dict[str, Any] | None:
    """Return the object in the file; None when it is missing or was torn by a crash."""
    try:
        return read_json(path)
    except (FileNotFoundError, ValueError):
        return None


def read_recipe(run: RunDirectory) -> dict[str, Any]:
    """Return the sections of recipe.yaml, none where it cannot be read."""
    try:
        recipe = load_mapping(run.recipe)
    except (FileNotFoundError, ValueError):  # its damage is one
        return {}
    return {name: value for name, value in recipe.items() if isinstance(value, dict)}


def read_samples(run: RunDirectory, attempts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return texts that the model wrote while training, of the attempts that count."""
    return [row for row in read_rows(run.samples) if counts(row, attempts)]


def read_evals(run: RunDirectory, attempts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries of evals.json, without those of a model that a later attempt went back behind."""
    found = []
    for entry in (read_json_or_none(run.evals) or {}).get("entries") or []:
        later = [attempt for attempt in attempts if attempt.get("time", 0) > entry.get("time", math.inf)]
        if entry.get("step") is None or all(counts_beside(entry, attempt) for attempt in later):
            entry.setdefault("results", [])
            found.append(entry)
    return found


def protocol_line(protocol: str | None, parts: Protocol) -> str:
    return f"- protocol {cell(protocol)}: {cell(str(parts))}\n"


SUITES = {"core": "core", "core_partial": "core", "chat": "chat", "lm_eval": "lm_eval"}
MEANS = tuple(m.name for m in SECTIONS["Benchmarks"] if m.unit == "-")  # of tasks, whose scores are shares


def suite_of(name: str) -> str | None:
    """Return core, chat or lm_eval by the name of a result; None for any other."""
    return SUITES.get(name.partition("/")[0])


def is_benchmark(row: dict[str, Any]) -> bool:
    """Return whether it is a benchmark's. A user's function may choose such a name too; it has no protocol."""
    return suite_of(row["name"]) is not None and row.get("protocol") is not None


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One suite of an entry of evals.json: means over tasks, and tasks (of lm_eval: task and metric)."""

    suite: str
    entry: dict[str, Any]
    means: list[dict[str, Any]]
    tasks: list[dict[str, Any]]

    @property
    def subject(self) -> str | None:
        return self.entry.get("subject")

    @property
    def step(self) -> int | None:
        return self.entry.get("step")

    @property
    def age(self) -> tuple[float, float]:
        """Return what orders benchmarks: of a later step, then of a later time. A model/ without a step is the run's
        last."""
        return (math.inf if self.step is None else self.step, self.entry.get("time") or 0)

    def protocols(self) -> list[str]:
        return list(dict.fromkeys(row["protocol"] for row in [*self.means, *self.tasks]))

    def protocols_text(self) -> str:
        """Return what the protocol of each task is made of; that of a mean is made of theirs. "" where none is
        known."""
        made_of = {row["protocol"]: Protocol.of(row) for row in self.tasks}
        return "".join(protocol_line(protocol, parts) for protocol, parts in made_of.items() if parts)

    @property
    def first_items(self) -> int | None:
        """Return the most items of a task that were to be scored, as protocols say it; None: all."""
        found = self.part("items")
        return found if isinstance(found, int) else None

    def part(self, name: str) -> Any:
        """Return the part of the first protocol that has it, None where none has."""
        for row in [*self.means, *self.tasks]:
            protocol = Protocol.of(row)  # None for a row of an earlier version, which recorded its id alone
            if protocol and name in protocol.parts:
                return protocol.parts[name]
        return None

    def measured(self) -> tuple:
        """Return the same for entries that may be in one series: the tasks and under which protocols."""
        return self.suite, tuple(sorted((row["name"], row["protocol"]) for row in self.tasks))

    def tasks_of(self, mean: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the tasks that the mean is over: those it names, else all."""
        named = mean.get("tasks")
        if not isinstance(named, list):
            return self.tasks
        return [task for task in self.tasks if task["name"] in named or task_name(task) in named]

    def whole_tasks(self) -> list[dict[str, Any]]:
        """Return the tasks without the subjects that they are split by."""
        names = {row["name"] for row in self.tasks}
        return [row for row in self.tasks if row["name"].rpartition("/")[0] not in names]

    def items_of(self, row: dict[str, Any]) -> tuple[tuple[str, int | None], ...]:
        """Return name and items of each task of a mean, or of a task: under one protocol too a part of the tasks may
        have been scored."""
        tasks = self.tasks_of(row) if row in self.means else [row]
        return tuple(sorted((task_name(task), task.get("items")) for task in tasks))


def task_name(row: dict[str, Any]) -> str:
    return row["name"].partition("/")[2]


def benchmarks_of(entries: list[dict[str, Any]]) -> list[Benchmark]:
    """Return every suite of every entry, oldest first."""
    found = []
    for entry in entries:
        rows = [row for row in entry["results"] if is_benchmark(row)]
        for suite in dict.fromkeys(SUITES.values()):
            own = [row for row in rows if suite_of(row["name"]) == suite]
            means = [row for row in own if row["name"] in MEANS]
            if own:
                tasks = [row for row in own if row["name"] not in MEANS]
                found.append(Benchmark(suite=suite, entry=entry, means=means, tasks=tasks))
    return sorted(found, key=lambda benchmark: benchmark.age)


def series_of(benchmarks: list[Benchmark]) -> list[list[Benchmark]]:
    """Return those that measured the same together, oldest first; of a subject scored twice the newest."""
    groups: dict[tuple, dict[tuple, Benchmark]] = {}
    for benchmark in benchmarks:
        of_group = groups.setdefault(benchmark.measured(), {})
        of_group.pop((benchmark.subject, benchmark.step), None)
        of_group[benchmark.subject, benchmark.step] = benchmark
    found = [list(of_group.values()) for of_group in groups.values()]
    return sorted(found, key=lambda series: list(SUITES.values()).index(series[0].suite))


Key = tuple[str, str | None, tuple[tuple[str, int | None], ...]]  # name, protocol, items of a benchmark


@dataclass(frozen=True, kw_only=True)
class Score:
    """One bits-per-byte figure, or the mean of a benchmark.

    protocol, items: what was scored, of a benchmark by task; two figures compare only when both are equal and the
    first is known. parts: what the protocol is made of; None where an earlier version recorded its id alone.
    """

    name: str
    step: int | None
    value: float
    protocol: str | None
    bytes: int | None = None
    of: str | None = None
    items: tuple[tuple[str, int | None], ...] = ()
    parts: Protocol | None = None


@dataclass(frozen=True, kw_only=True)
class RunData:
    """A run as its files tell it. rows, samples: those that count (the last attempt's); all_rows: every row written.

    A section asks for series: going through the rows of a long run one by one takes seconds.
    """

    run: RunDirectory
    recipe: dict[str, Any]
    manifest: dict[str, Any]
    rows: Sequence[dict[str, Any]]
    all_rows: Sequence[dict[str, Any]]
    samples: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    failure: dict[str, Any] | None
    checkpoints: list[tuple[int, int, bool]]  # step, bytes, sealed

    def setting(self, path: str, default: Any = None) -> Any:
        """Return the recipe's value of a dotted key, the default where it has none."""
        return _at(self.recipe, path, default)

    def fact(self, path: str, default: Any = None) -> Any:
        """Return the same of the manifest."""
        return _at(self.manifest, path, default)

    @property
    def name(self) -> str:
        return str(self.manifest.get("name") or self.run.path.resolve().name)

    @property
    def is_imported(self) -> bool:
        """Return whether the run is a log of another program (contrib/imported_logs.py)."""
        return "imported" in self.manifest

    def meaning_of(self, name: str) -> str | None:
        """Return the definition of the run's number of that name, where it is another one than ours."""
        return self.fact("imported.meanings", {}).get(name)

    @property
    def lost_lines(self) -> list[tuple[int, str]]:
        """Return number and text of a log's lines that look like a measured step and cannot be read."""
        return self.fact("imported.lost", [])

    @property
    def stage(self) -> str | None:
        return self.manifest.get("stage") or self.recipe.get("stage")

    @cached_property
    def columns(self) -> Columns:
        """Return the rows that count, by name."""
        return Columns.of(self.rows)

    @cached_property
    def _curves(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        return {}

    def curve(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (steps, values) of a metric, as Columns.curve gives them; a report asks for one more than once."""
        if name not in self._curves:
            self._curves[name] = self.columns.curve(name)
        return self._curves[name]

    def series(self, name: str) -> list[tuple[int, float]]:
        """Return curve() as pairs."""
        steps, values = self.curve(name)
        return list(zip(steps.tolist(), values.tolist(), strict=True))

    def last(self, name: str) -> float | None:
        values = self.curve(name)[1]
        return values[-1].item() if len(values) else None

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the rows of an event that count: attempt, spike, nonfinite ..."""
        return [row for _, row in self.columns.events(kind)]

    def loss_name(self) -> str:
        """Return the training loss that the rows hold: a console log has only the smoothed one."""
        return "train/loss" if self.last("train/loss") is not None else "train/loss_ema"

    def step(self) -> int:
        """Return optimizer steps that count."""
        steps = self.curve(self.loss_name())[0]
        return steps[-1].item() if len(steps) else 0

    def tokens(self) -> int:
        tokens = self.columns.column("tokens")[1]
        return tokens.max().item() if len(tokens) else 0

    @cached_property
    def parent(self) -> "RunData | None":
        """Return the run whose model this one began with, where it still is and its model has the recorded hash."""
        base = base_run(self.run.path, self.manifest)
        return None if base is None else read_run(str(base.path))

    @cached_property
    def is_training(self) -> bool:
        """Return whether a living process held the run when this was first asked, and it was not at its end."""
        if self.is_imported or self.failure or self.manifest.get("status") != "running":
            return False
        with suppress(OSError, TandemError):  # a copy's .lock may be anything
            return self.run.in_use()
        return False

    @cached_property
    def running(self) -> list[tuple[int, float, float]]:
        """Return (attempt, began, last sign of life) of each attempt, as attempt_spans gives them."""
        return attempt_spans(Columns.of(self.all_rows), self.manifest, failed=(self.failure or {}).get("time"))

    def up_to(self, step: int) -> "RunData":
        """Return the run as it was when it had made that step: what it measured later says nothing about its model
        then."""
        rows = self.columns.where(self.columns.beside("step", slice(None), missing=0) <= step)
        written = Columns.of(self.all_rows)
        last = rows.column("time")[1].max(initial=0.0)
        return replace(
            self,
            manifest={key: value for key, value in self.manifest.items() if key not in ("ended", "finished")},
            rows=rows,
            all_rows=written.where(written.beside("time", slice(None), missing=0.0) <= last),
            samples=[row for row in self.samples if row.get("step", 0) <= step],
            evals=[entry for entry in self.evals if (entry.get("step") or 0) <= step],
        )

    def status(self) -> str:
        """Return one sentence on the state of the run."""
        if self.failure:
            return (
                f"stopped with status {self.failure.get('status')} ({self.failure.get('class')}): "
                f"{self.failure.get('message')}"
            )
        if self.manifest.get("status") == "finished":
            return "finished"
        of = f" of {self.max_steps()}" if self.max_steps() else ""
        return f"not finished: last recorded step {self.step()}{of}"

    def max_steps(self) -> int | None:
        return self.fact("inputs.max_steps") or self.setting("train.max_steps")

    def protocol(self, name: str) -> str | None:
        """Return what the run's own validation numbers were scored on. In SFT all of them stand on the same rows."""
        return self._of_validation("protocols", name)

    def protocol_parts(self, name: str) -> Protocol | None:
        """Return what that protocol is made of; None where an earlier version recorded its id alone."""
        return Protocol.of({"protocol_parts": self._of_validation("protocol_parts", name)})

    def _of_validation(self, key: str, name: str) -> Any:
        return self.fact(f"inputs.{key}", {}).get(VAL_BPB if name in (SFT_BPB, VAL_LOSS) else name)

    def scores(self) -> list[Score]:
        """Return BPB figures: those of the training itself by step, then those of `python -m pipeline.evals`."""
        found = []
        for name in (VAL_BPB, VAL_BPB_DOCUMENTS, SFT_BPB):
            protocol, parts = self.protocol(name), self.protocol_parts(name)
            for step, value in self.series(name):
                found.append(Score(name=name, step=step, value=value, protocol=protocol, parts=parts))
        for entry, result in self._by_command():
            if "bpb" in result["name"]:
                score = _score(result, step=entry.get("step"), of=entry.get("subject"))
                found.append(replace(score, bytes=result.get("bytes")))
        return found

    def _by_command(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Return (entry, result) of what `python -m pipeline.evals` measured, without benchmarks."""
        pairs = [(entry, result) for entry in self.evals for result in entry["results"]]
        return [(entry, result) for entry, result in pairs if not is_benchmark(result)]

    def benchmarks(self) -> list[Benchmark]:
        """Return CORE, chat tasks and lm_eval, oldest first."""
        return benchmarks_of(self.evals)

    def means(self) -> list[Score]:
        """Return means of benchmarks, oldest first; of one without a mean its tasks. Tasks and items are part of what
        was measured."""
        return [
            _score(row, step=benchmark.step, of=benchmark.subject, items=benchmark.items_of(row))
            for benchmark in self.benchmarks()
            for row in benchmark.means or benchmark.whole_tasks()
        ]

    @cached_property
    def newest_scores(self) -> dict[Key, Score]:
        """Return the newest figure per metric and what was scored."""
        return {(score.name, score.protocol, score.items): score for score in [*self.scores(), *self.means()]}

    def other_results(self) -> list[tuple[str, int | None, float, str | None]]:
        """Return (name, step, value, subject) of what `python -m pipeline.evals` measured beside bits per byte and
        benchmarks."""
        return [
            (result["name"], entry.get("step"), result["value"], entry.get("subject"))
            for entry, result in self._by_command()
            if "bpb" not in result["name"]
        ]


def _score(row: dict[str, Any], **facts: Any) -> Score:
    """Return the figure of a row of evals.json."""
    parts = Protocol.of(row)
    return Score(name=row["name"], value=row["value"], protocol=row.get("protocol"), parts=parts, **facts)


def _at(tree: Any, path: str, default: Any) -> Any:
    for name in path.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return default if tree is None else tree


# Entries of the manifest that a report looks into.
MANIFEST_OBJECTS = {"inputs", "shares", "plan", "versions", "results", "peak_memory_bytes", "shape", "git", "host"}


def read_manifest(run: RunDirectory) -> dict[str, Any]:
    """Return the manifest; it may be somebody else's, so an entry of another kind is left out."""
    manifest = read_json_or_none(run.manifest) or {}
    for key in MANIFEST_OBJECTS & manifest.keys():
        if not isinstance(manifest[key], dict):
            del manifest[key]
    inputs = manifest.get("inputs", {})
    for role in {"sources", "validation"} & inputs.keys():
        given = inputs[role] if isinstance(inputs[role], list) else []
        inputs[role] = [source for source in given if isinstance(source, dict)]
    return manifest


def read_run(name: str) -> RunData:
    """Return the run of that path or name (under runs/). Raises InputMissingError when there is none."""
    run = find_run(name) or RunDirectory(Path(name))
    if not any(path.exists() for path in (run.manifest, run.recipe, run.metrics)):
        raise InputMissingError(
            f"{name}: no run is there (none of run_manifest.json, recipe.yaml, metrics.jsonl), so there is nothing to "
            "report. Give the path of a run directory, such as runs/<name>."
        )
    rows = read_columns(run.metrics)
    attempts = [row for _, row in rows.events("attempt")]
    return RunData(
        run=run,
        recipe=read_recipe(run),
        manifest=read_manifest(run),
        rows=rows.that_count(),
        all_rows=rows,
        samples=read_samples(run, attempts),
        evals=read_evals(run, attempts),
        failure=read_json_or_none(run.failure),
        checkpoints=[
            (step_of(folder) or 0, folder_bytes(folder), (folder / SEAL).exists())
            for folder in by_step(run.checkpoints)
        ],
    )


def read_runs(names: Sequence[str]) -> list[RunData]:
    """Return the runs of these directories, names under runs/ and log files; a second run of one name gets a number.

    Raises InputMissingError for a run that does not exist, DataError for a file that is no log.
    """
    if any(Path(name).is_file() for name in names):
        from pipeline.contrib.imported_logs import read_logs

        runs = read_logs(names)
    else:
        runs = [read_run(name) for name in names]
    taken: list[str] = []
    for data in runs:
        count = taken.count(data.name) + 1
        taken.append(data.name)
        if count > 1:
            data.manifest["name"] = f"{data.name} #{count}"
    return runs
