"""Scores of a run: bits per byte, and benchmarks with their means, tasks and protocols, from evals.json."""

import math
from dataclasses import dataclass
from typing import Any

from pipeline.metrics import SECTIONS, Protocol
from pipeline.report.markdown import cell


def protocol_line(protocol: str | None, parts: Protocol) -> str:
    return f"- protocol {cell(protocol)}: {cell(str(parts))}\n"


# What comes before the slash in a result's name -> the suite. A CORE of which a part is missing is called otherwise.
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
    def rows(self) -> list[dict[str, Any]]:
        return [*self.means, *self.tasks]

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
        return list(dict.fromkeys(row["protocol"] for row in self.rows))

    def protocols_text(self) -> str:
        """Return what the protocol of each task is made of; that of a mean is made of theirs. "" where none is
        known."""
        made_of = {row["protocol"]: Protocol.of(row) for row in self.tasks}
        return "".join(protocol_line(protocol, parts) for protocol, parts in made_of.items() if parts)

    @property
    def first_items(self) -> int | None:
        """Return the most items of a task that were to be scored, as the first protocol has it; None: all."""
        for row in self.rows:
            protocol = Protocol.of(row)  # None for a row of an earlier version, which recorded its id alone
            if protocol and "items" in protocol.parts:
                items = protocol.parts["items"]
                return items if isinstance(items, int) else None
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
        # mmlu/astronomy is a part of mmlu, where the whole was scored too.
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
    found: list[Benchmark] = []
    for entry in entries:
        # One command may score several suites into one entry.
        by_suite = {suite: Benchmark(suite=suite, entry=entry, means=[], tasks=[]) for suite in SUITES.values()}
        for row in filter(is_benchmark, entry["results"]):
            benchmark = by_suite[str(suite_of(row["name"]))]
            rows = benchmark.means if row["name"] in MEANS else benchmark.tasks
            rows.append(row)
        found += [benchmark for benchmark in by_suite.values() if benchmark.rows]
    return sorted(found, key=lambda benchmark: benchmark.age)


def series_of(benchmarks: list[Benchmark]) -> list[list[Benchmark]]:
    """Return those that measured the same together, oldest first; of a subject scored twice the newest."""
    # By what was measured, then by the model: a second scoring of a model takes the place of the first, at the end.
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


def score_of(row: dict[str, Any], **facts: Any) -> Score:
    """Return the figure of a row of evals.json."""
    parts = Protocol.of(row)
    return Score(name=row["name"], value=row["value"], protocol=row.get("protocol"), parts=parts, **facts)
