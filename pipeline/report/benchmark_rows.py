"""The benchmarks in evals.json: which rows are theirs, which entries tell of the same, and which figures compare."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.artifacts.protocol import Protocol
from pipeline.report.tables import cell

SUITES = {"core": "core", "core_partial": "core", "chat": "chat", "lm_eval": "lm_eval"}
MEANS = (
    *(f"{name}/{version}" for name in ("core", "core_partial") for version in ("v1", "v2")),
    *(f"chat/{name}{part}" for name in ("core", "core_spelling_bee") for part in ("", "_part")),
)


def suite_of(name: str) -> str | None:
    """core, chat or lm_eval by the name of a result; None for any other."""
    return SUITES.get(name.partition("/")[0])


def is_benchmark(row: dict[str, Any]) -> bool:
    """A function of one's own may choose such a name too; it has no protocol."""
    return suite_of(row["name"]) is not None and row.get("protocol") is not None


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """What one entry of evals.json holds of one suite: means over tasks, and tasks (of lm_eval: task and metric)."""

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
        """Orders benchmarks: of a later step, then of a later time. A model/ without a step is the run's last."""
        return (float("inf") if self.step is None else self.step, self.entry.get("time") or 0)

    def protocols(self) -> list[str]:
        return list(dict.fromkeys(row["protocol"] for row in [*self.means, *self.tasks]))

    def protocol_lines(self) -> list[str]:
        """What the protocol of each task is made of, as a list; that of a mean is made of theirs."""
        made_of = {row["protocol"]: Protocol.of(row) for row in self.tasks}
        return [f"- protocol {cell(id_)}: {cell(str(made))}" for id_, made in made_of.items() if made is not None]

    @property
    def first_items(self) -> int | None:
        """The most items of a task that were to be scored, as protocols say it; None: all."""
        found = self.part("items")
        return found if isinstance(found, int) else None

    def part(self, name: str) -> Any:
        """The part of the first protocol that has it, None where none has."""
        return next((parts[name] for parts in map(_parts, [*self.means, *self.tasks]) if name in parts), None)

    def measured(self) -> tuple:
        """The same for entries that may stand in one series: the tasks and under which protocols."""
        return self.suite, tuple(sorted((row["name"], row["protocol"]) for row in self.tasks))

    def tasks_of(self, mean: dict[str, Any]) -> list[dict[str, Any]]:
        """The tasks that the mean is over: those it names, else all."""
        named = mean.get("tasks")
        if not isinstance(named, list):
            return self.tasks
        return [task for task in self.tasks if task["name"] in named or task_name(task) in named]

    def items_of(self, mean: dict[str, Any]) -> tuple[tuple[str, int | None], ...]:
        """Name and items of each task of the mean: under one protocol too a part of the tasks may have been scored."""
        return tuple(sorted((task_name(task), task.get("items")) for task in self.tasks_of(mean)))


def _parts(row: dict[str, Any]) -> Mapping[str, Any]:
    """The parts of a row's protocol; of an earlier version's row what its id tells."""
    if protocol := Protocol.of(row):
        return protocol.parts
    found: dict[str, Any] = {"chat": True} if ", chat" in row["protocol"] else {}
    if "-crop" in row["protocol"]:
        found["long_prompts"] = "crop"
    for part, pattern in (("items", r"(?:-|, )first ?(\d+)"), ("max_new_tokens", r"-(\d+)tokens")):
        if told := re.search(pattern, row["protocol"]):
            found[part] = int(told[1])
    return found


def task_name(row: dict[str, Any]) -> str:
    return row["name"].partition("/")[2]


def benchmarks_of(entries: list[dict[str, Any]]) -> list[Benchmark]:
    """Every suite of every entry, oldest first."""
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
    """Those that measured the same together, oldest first; of a subject scored twice the newest."""
    groups: dict[tuple, dict[tuple, Benchmark]] = {}
    for benchmark in benchmarks:
        of_group = groups.setdefault(benchmark.measured(), {})
        of_group.pop((benchmark.subject, benchmark.step), None)
        of_group[benchmark.subject, benchmark.step] = benchmark
    order = list(dict.fromkeys(SUITES.values()))
    return [list(g.values()) for key, g in sorted(groups.items(), key=lambda pair: order.index(pair[0][0]))]
