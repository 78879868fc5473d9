"""A run made from a log: rows with our names, and what the log does not know or calls by our name with another meaning."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.report.run_data import RunData
from pipeline.run_dir.rows import last_attempts
from pipeline.run_dir.run_directory import RunDirectory


@dataclass(kw_only=True)
class Log:
    """Result of an importer.

    meanings: of our names whose number is another one, what it is. lost: line number and text of what looks like a
    measured step and could not be read. shape, inputs: as the manifest of a run has them; flops_per_token: as the log gives them.
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
    return (data.manifest.get("imported") or {}).get("meanings", {}).get(name)


def lost_lines(data: RunData) -> list[tuple[int, str]]:
    """Number and text of the log's lines that look like a measured step and could not be read."""
    return (data.manifest.get("imported") or {}).get("lost", [])
