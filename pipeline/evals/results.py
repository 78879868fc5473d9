"""report/evals.json: every benchmark and every evaluation by command of a run, with what it takes to repeat it."""

import importlib.metadata
import shlex
import sys
import time
from typing import Any

from pipeline.process.storage import file_lock, read_json, write_json
from pipeline.run_dir.protocol import Protocol
from pipeline.run_dir.run_directory import RunDirectory

VERSIONS = ("torch", "transformers", "tokenizers")


def entry_of(
    *,
    subject: str,
    step: int | None,
    device: str,
    results: list[dict[str, Any]],
    samples: list[dict[str, Any]] | None = None,
    command: list[str] | None = None,
) -> dict[str, Any]:
    """Return one evaluation: command, time, versions, device, results by name with their protocols, samples.

    command: default this process's own.
    """
    return {
        "subject": subject,
        "step": step,
        "command": shlex.join(command or [sys.executable, *sys.argv]),
        "time": time.time(),
        "versions": {name: importlib.metadata.version(name) for name in VERSIONS},
        "device": device,
        "results": results,
        "samples": samples or [],
    }


def in_precision(results: list[dict[str, Any]], dtype: str) -> list[dict[str, Any]]:
    """Return the rows with what the model computed in; another precision than fp32 may give other answers, and is another protocol."""
    return [row | {"dtype": dtype} | Protocol(row["protocol_parts"]).having(dtype=dtype).row() for row in results]


def append_entry(run: RunDirectory, entry: dict[str, Any]) -> None:
    """Add an `entry_of` to the run's evals.json."""
    run.refuse_links(run.report)
    # Two evaluations of one run may end at the same time.
    with file_lock(run.evals.with_name(".evals.lock")):
        entries = read_json(run.evals)["entries"] if run.evals.exists() else []
        write_json(run.evals, {"entries": [*entries, entry]})
