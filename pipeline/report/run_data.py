"""Everything the report tells, read from a run directory once. Any file but one may be missing: a crash leaves what it leaves."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.artifacts.atomic import folder_bytes
from pipeline.artifacts.checkpoints import SEAL, by_step, step_of
from pipeline.artifacts.columns import Columns, read_columns
from pipeline.artifacts.errors import InputMissingError
from pipeline.artifacts.protocol import Protocol
from pipeline.artifacts.run_directory import RunDirectory, find_run
from pipeline.report.benchmark_rows import Benchmark, benchmarks_of, is_benchmark
from pipeline.report.run_files import read_evals, read_failure, read_manifest, read_recipe, read_samples


@dataclass(frozen=True, kw_only=True)
class Score:
    """One bits-per-byte figure, or the mean of a benchmark.

    protocol, items: what was scored, of a benchmark by task; two figures compare only when both are equal and the first is known.
    parts: what the protocol is made of; None where an earlier version recorded its id alone.
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
    manifest_problems: list[str] = field(default_factory=list)  # what of the manifest was left out, and why

    @property
    def name(self) -> str:
        return str(self.manifest.get("name") or self.run.path.resolve().name)

    @property
    def stage(self) -> str | None:
        return self.manifest.get("stage") or self.recipe.get("stage")

    @cached_property
    def columns(self) -> Columns:
        """The rows that count, by name."""
        return Columns.of(self.rows)

    @cached_property
    def _curves(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        return {}

    @cached_property
    def _steps(self) -> dict[int, np.ndarray]:
        return {}

    def curve(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps, values) of a metric in the order of the steps; a step measured twice keeps the last value."""
        if name not in self._curves:
            self._curves[name] = self._curve(name)
        return self._curves[name]

    def _curve(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        rows, values = self.columns.column(name)
        if id(rows) not in self._steps:  # many names stand in the same rows
            self._steps[id(rows)] = self.columns.beside("step", rows, missing=-1)
        steps = self._steps[id(rows)]
        if len(steps) and steps[0] >= 0 and (steps[1:] > steps[:-1]).all():
            return steps, values
        order = np.argsort(steps, kind="stable")
        order = order[steps[order] >= 0]
        steps, values = steps[order], values[order]
        last = np.append(steps[1:] != steps[:-1], True)[: len(steps)]
        return steps[last], values[last]

    def series(self, name: str) -> list[tuple[int, float]]:
        """curve() as pairs."""
        steps, values = self.curve(name)
        return list(zip(steps.tolist(), values.tolist(), strict=True))

    def last(self, name: str) -> float | None:
        values = self.curve(name)[1]
        return values[-1].item() if len(values) else None

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The rows of an event that count: attempt, spike, nonfinite ..."""
        return [row for _, row in self.columns.events(kind)]

    def loss_name(self) -> str:
        """The training loss that the rows hold: a console log has only the smoothed one."""
        return "train/loss" if self.last("train/loss") is not None else "train/loss_ema"

    def step(self) -> int:
        """Optimizer steps that count."""
        steps = self.curve(self.loss_name())[0]
        return steps[-1].item() if len(steps) else 0

    def tokens(self) -> int:
        tokens = self.columns.column("tokens")[1]
        return tokens.max().item() if len(tokens) else 0

    @cached_property
    def running(self) -> list[tuple[int, float, float]]:
        """(attempt, began, last sign of life) in seconds since 1970: from the start of its process, as far as its first row
        tells that, to its last row; of the last attempt to its end, where the manifest or failure.json tells it."""
        written = Columns.of(self.all_rows)
        rows, times = written.column("time")
        attempts = written.beside("attempt", rows, missing=0)
        known = np.isfinite(attempts) & np.isfinite(times)
        attempts, times = attempts[known], times[known]
        spans = {
            int(n): (float(times[attempts == n].min()), float(times[attempts == n].max())) for n in np.unique(attempts)
        }
        starts = [row for _, row in written.events("attempt") if isinstance(row.get("began"), int | float)]
        began = {row["attempt"]: row["began"] for row in starts if isinstance(row.get("attempt"), int | float)}
        running = [(n, min(first, began.get(n, first)), last) for n, (first, last) in spans.items()]
        ends = [self.manifest.get("ended"), self.manifest.get("finished"), (self.failure or {}).get("time")]
        if running and running[-1][0] == self.manifest.get("attempts"):
            attempt, first, last = running[-1]
            running[-1] = attempt, first, max([last, *(end for end in ends if isinstance(end, (int, float)))])
        return running

    def up_to(self, step: int) -> "RunData":
        """The run as it was when it had made that step: what it measured later says nothing about its model then."""
        rows = [row for row in self.rows if row.get("step", 0) <= step]
        last = max((row["time"] for row in rows if "time" in row), default=0.0)
        return replace(
            self,
            manifest={key: value for key, value in self.manifest.items() if key not in ("ended", "finished")},
            rows=rows,
            all_rows=[row for row in self.all_rows if row.get("time", 0.0) <= last],
            samples=[row for row in self.samples if row.get("step", 0) <= step],
            evals=[entry for entry in self.evals if (entry.get("step") or 0) <= step],
        )

    def status(self) -> str:
        """One sentence on how the run stands."""
        if self.failure:
            return f"stopped with status {self.failure.get('status')} ({self.failure.get('class')}): {self.failure.get('message')}"
        if self.manifest.get("status") == "finished":
            return "finished"
        return f"not finished: last recorded step {self.step()}" + (
            f" of {self.max_steps()}" if self.max_steps() else ""
        )

    def max_steps(self) -> int | None:
        return (self.manifest.get("inputs") or {}).get("max_steps") or (self.recipe.get("train") or {}).get("max_steps")

    def protocol(self, name: str) -> str | None:
        """What the run's own validation numbers were scored on. In SFT all of them stand on the same rows."""
        return self._of_validation("protocols", name)

    def _of_validation(self, key: str, name: str) -> Any:
        of_rows = name in ("sft/assistant_bpb", "val/loss")
        return ((self.manifest.get("inputs") or {}).get(key) or {}).get("val/bpb" if of_rows else name)

    def scores(self) -> list[Score]:
        """BPB figures: those of the training itself by step, then those of `python -m pipeline.evals`."""
        own = [
            Score(
                name=name,
                step=step,
                value=value,
                protocol=self.protocol(name),
                parts=Protocol.of({"protocol_parts": self._of_validation("protocol_parts", name)}),
            )
            for name in ("val/bpb", "val/bpb_documents", "sft/assistant_bpb")
            for step, value in self.series(name)
        ]
        later = [
            Score(
                name=result["name"],
                step=entry.get("step"),
                value=result["value"],
                protocol=result.get("protocol"),
                bytes=result.get("bytes"),
                of=entry.get("subject"),
                parts=Protocol.of(result),
            )
            for entry in self.evals
            for result in entry["results"]
            if "bpb" in result["name"] and not is_benchmark(result)
        ]
        return own + later

    def benchmarks(self) -> list[Benchmark]:
        """CORE, chat tasks and lm_eval, oldest first."""
        return benchmarks_of(self.evals)

    def means(self) -> list[Score]:
        """Means of benchmarks, oldest first. Their tasks and items are part of what was measured."""
        return [
            Score(
                name=mean["name"],
                step=benchmark.step,
                value=mean["value"],
                protocol=mean["protocol"],
                of=benchmark.subject,
                items=benchmark.items_of(mean),
                parts=Protocol.of(mean),
            )
            for benchmark in self.benchmarks()
            for mean in benchmark.means
        ]

    def other_results(self) -> list[tuple[str, int | None, float, str | None]]:
        """(name, step, value, subject) of what `python -m pipeline.evals` measured beside bits per byte and benchmarks."""
        return [
            (result["name"], entry.get("step"), result["value"], entry.get("subject"))
            for entry in self.evals
            for result in entry["results"]
            if "bpb" not in result["name"] and not is_benchmark(result)
        ]


def read_run(name: str) -> RunData:
    """The run of that path or name (under runs/). Raises InputMissingError when there is none."""
    run = find_run(name) or RunDirectory(Path(name))
    if not any(path.exists() for path in (run.manifest, run.recipe, run.metrics)):
        raise InputMissingError(
            f"{name}: no run is there (none of run_manifest.json, recipe.yaml, metrics.jsonl), so there is nothing to report. "
            "Give the path of a run directory, such as runs/<name>."
        )
    rows = read_columns(run.metrics)
    manifest, problems = read_manifest(run)
    attempts = [row for _, row in rows.events("attempt")]
    return RunData(
        run=run,
        recipe=read_recipe(run),
        manifest=manifest,
        manifest_problems=problems,
        rows=rows.that_count(),
        all_rows=rows,
        samples=read_samples(run, attempts),
        evals=read_evals(run, attempts),
        failure=read_failure(run),
        checkpoints=[
            (step_of(folder) or 0, folder_bytes(folder), (folder / SEAL).exists())
            for folder in by_step(run.checkpoints)
        ],
    )
