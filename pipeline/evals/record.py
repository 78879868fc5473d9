"""report/evals.json: every evaluation of a run that was made by command, with what it takes to repeat it."""

import importlib.metadata
import shlex
import time
from typing import Any

from pipeline.artifacts.atomic import read_json, write_json
from pipeline.artifacts.cache import file_lock
from pipeline.evals.subject import Subject

VERSIONS = ("torch", "transformers", "tokenizers")


def record(
    subject: Subject, *, argv: list[str], device: str, results: list[dict], samples: list[dict]
) -> dict[str, Any]:
    """The entry: command, time, versions, device, results by name with their protocol ids, samples.

    It is appended to the run's evals.json when the subject belongs to a run; earlier entries stay.
    """
    entry = {
        "subject": subject.name,
        "step": subject.step,
        "command": shlex.join(["python", "-m", "pipeline.evals", *argv]),
        "time": time.time(),
        "versions": {name: importlib.metadata.version(name) for name in VERSIONS},
        "device": device,
        "results": results,
        "samples": samples,
    }
    if subject.run is not None:
        # Two evaluations of one run may end at the same time.
        with file_lock(subject.run.evals.with_name(".evals.lock")):
            path = subject.run.evals
            entries = read_json(path)["entries"] if path.exists() else []
            write_json(path, {"entries": [*entries, entry]})
    return entry
