"""Everything the report shows, read from a run directory once. Any file but one may be missing: a crash leaves what it
leaves."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.metrics import SFT_BPB, VAL_BPB, VAL_BPB_DOCUMENTS, VAL_LOSS, Protocol
from pipeline.process.errors import InputMissingError, TandemError
from pipeline.process.storage import folder_bytes, read_json
from pipeline.recipe.located_yaml import load_mapping
from pipeline.report.scores import Benchmark, Key, Score, benchmarks_of, is_benchmark, score_of
from pipeline.run_dir.checkpoints import SEAL, by_step, step_of
from pipeline.run_dir.columns import Columns, attempt_spans, read_columns
from pipeline.run_dir.parents import base_run
from pipeline.run_dir.rows import counts, counts_beside, read_rows
from pipeline.run_dir.run_directory import RunDirectory, find_run


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


def read_evals(run: RunDirectory, attempts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries of evals.json, without those of a model that a later attempt went back behind."""
    found = []
    for entry in (read_json_or_none(run.evals) or {}).get("entries") or []:
        # An entry has no attempt, but a time. One without a step is of the finished model, which nothing undoes.
        later = [attempt for attempt in attempts if attempt.get("time", 0) > entry.get("time", math.inf)]
        if entry.get("step") is None or all(counts_beside(entry, attempt) for attempt in later):
            entry.setdefault("results", [])
            found.append(entry)
    return found


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

    @property
    def trained_on(self) -> str | None:
        """Return dtype and hardware, as far as they are known."""
        count, device = self.fact("shape.processes"), self.fact("shape.device")
        if count and device:
            device = f"{count} x {device}"
        return ", ".join(str(fact) for fact in (self.fact("shape.dtype"), device) if fact) or None

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
        # Rows that a later attempt made void have steps too, so all rows are cut by time.
        written = Columns.of(self.all_rows)
        last = rows.column("time")[1].max(initial=0.0)
        manifest = dict(self.manifest)
        for key in ("ended", "finished"):
            manifest.pop(key, None)
        return replace(
            self,
            manifest=manifest,
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
        # 1. What the run measured while it trained: one protocol for all steps, recorded in the manifest.
        found = []
        for name in (VAL_BPB, VAL_BPB_DOCUMENTS, SFT_BPB):
            protocol, parts = self.protocol(name), self.protocol_parts(name)
            for step, value in self.series(name):
                found.append(Score(name=name, step=step, value=value, protocol=protocol, parts=parts))
        # 2. What was scored by command: each result has its own protocol.
        for entry, result in self._by_command():
            if "bpb" in result["name"]:
                score = score_of(result, step=entry.get("step"), of=entry.get("subject"))
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
        found = []
        for benchmark in self.benchmarks():
            for row in benchmark.means or benchmark.whole_tasks():
                items = benchmark.items_of(row)
                found.append(score_of(row, step=benchmark.step, of=benchmark.subject, items=items))
        return found

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
            f"{name}: no run is there (none of run_manifest.json, recipe.yaml, metrics.jsonl). Give the path of a run "
            "directory, such as runs/<name>."
        )
    rows = read_columns(run.metrics)
    attempts = [row for _, row in rows.events("attempt")]
    checkpoints = []
    for folder in by_step(run.checkpoints):
        checkpoints.append((step_of(folder) or 0, folder_bytes(folder), (folder / SEAL).exists()))
    return RunData(
        run=run,
        recipe=read_recipe(run),
        manifest=read_manifest(run),
        rows=rows.that_count(),
        all_rows=rows,
        samples=[row for row in read_rows(run.samples) if counts(row, attempts)],
        evals=read_evals(run, attempts),
        failure=read_json_or_none(run.failure),
        checkpoints=checkpoints,
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
    # Tables have a column for each name.
    taken: list[str] = []
    for data in runs:
        count = taken.count(data.name) + 1
        taken.append(data.name)
        if count > 1:
            data.manifest["name"] = f"{data.name} #{count}"
    return runs
