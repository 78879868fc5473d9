"""Everything the report tells, read from a run directory once. Any file but one may be missing: a crash leaves what it leaves."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pipeline.artifacts.atomic import folder_bytes, read_json
from pipeline.artifacts.checkpoints import SEAL, by_step, step_of
from pipeline.artifacts.errors import InputMissingError
from pipeline.artifacts.rows import counts_beside, last_attempts, read_rows
from pipeline.artifacts.run_directory import RunDirectory, find_run
from pipeline.report.benchmark_rows import Benchmark, benchmarks_of, is_benchmark


@dataclass(frozen=True, kw_only=True)
class Score:
    """One bits-per-byte figure, or the mean of a benchmark.

    protocol, items: what was scored, of a benchmark by task; two figures compare only when both are equal and the first is known.
    """

    name: str
    step: int | None
    value: float
    protocol: str | None
    bytes: int | None = None
    of: str | None = None
    items: tuple[tuple[str, int | None], ...] = ()


@dataclass(frozen=True, kw_only=True)
class RunData:
    """A run as its files tell it. rows, samples: those that count (the last attempt's); all_rows: every row written."""

    run: RunDirectory
    recipe: dict[str, Any]
    manifest: dict[str, Any]
    rows: list[dict[str, Any]]
    all_rows: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    failure: dict[str, Any] | None
    checkpoints: list[tuple[int, int, bool]]  # step, bytes, sealed

    @property
    def name(self) -> str:
        return str(self.manifest.get("name") or self.run.path.resolve().name)

    @property
    def stage(self) -> str | None:
        return self.manifest.get("stage") or self.recipe.get("stage")

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of a metric in the order of the steps; a step measured twice keeps the last value."""
        return sorted({row["step"]: row[name] for row in self.rows if "step" in row and name in row}.items())

    def last(self, name: str) -> float | None:
        series = self.series(name)
        return series[-1][1] if series else None

    def loss_name(self) -> str:
        """The training loss that the rows hold: a console log has only the smoothed one."""
        return "train/loss" if self.last("train/loss") is not None else "train/loss_ema"

    def step(self) -> int:
        """Optimizer steps that count."""
        losses = self.series(self.loss_name())
        return losses[-1][0] if losses else 0

    def tokens(self) -> int:
        return max((row.get("tokens", 0) for row in self.rows), default=0)

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
        protocols = (self.manifest.get("inputs") or {}).get("protocols") or {}
        return protocols.get("val/bpb" if name == "sft/assistant_bpb" else name)

    def scores(self) -> list[Score]:
        """BPB figures: those of the training itself by step, then those of `python -m pipeline.evals`."""
        own = [
            Score(name=name, step=step, value=value, protocol=self.protocol(name))
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
    rows, samples = read_rows(run.metrics), read_rows(run.samples)
    attempts = [row for row in rows if row.get("event") == "attempt"]
    return RunData(
        run=run,
        recipe=_yaml(run.recipe),
        manifest=_json(run.manifest) or {},
        rows=last_attempts(rows),
        all_rows=rows,
        samples=_samples_that_count(samples, attempts),
        evals=_entries_that_count(_json(run.evals), attempts),
        failure=_json(run.failure),
        checkpoints=[
            (step_of(folder) or 0, folder_bytes(folder), (folder / SEAL).exists())
            for folder in by_step(run.checkpoints)
        ],
    )


def _samples_that_count(samples: list[dict[str, Any]], attempts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        row
        for row in samples
        if all(counts_beside(row, a) for a in attempts if a.get("attempt", 0) > row.get("attempt", 0))
    ]


def _entries_that_count(found: Any, attempts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries of evals.json, with those of their results that are numbers by name.

    An entry of a model that a later attempt went back behind says nothing about the run's models.
    """
    entries = (found.get("entries") or []) if isinstance(found, dict) else []
    return [
        entry
        | {"results": [row for row in entry.get("results") or [] if "name" in row and _is_number(row.get("value"))]}
        for entry in entries
        if entry.get("step") is None
        or all(counts_beside(entry, a) for a in attempts if a.get("time", 0) > entry.get("time", float("inf")))
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _json(path: Path) -> Any:
    """The file's content; None when it is missing or was torn by a crash."""
    try:
        return read_json(path)
    except (FileNotFoundError, ValueError):
        return None


def _yaml(path: Path) -> dict[str, Any]:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (FileNotFoundError, yaml.YAMLError):
        return {}
