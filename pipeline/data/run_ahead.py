"""The child process that prepares while training reads: takes its task from stdin, leaves a failure as failure.json."""

import os
import pickle
import sys
import threading
import time
from pathlib import Path
from typing import Any

from pipeline.artifacts.atomic import write_json
from pipeline.artifacts.errors import DataError, TandemError, of_panic
from pipeline.artifacts.retries import keep_retries_in
from pipeline.data.plan import ROLES, make_plan
from pipeline.data.prepare import RETRIES, locks
from pipeline.data.sliding import prepare_sliding
from pipeline.data.work import Workshop


def run_ahead(folder: Path) -> int:
    """Carry out the task {plan, recipe, tokenizer, from_step} that comes on stdin; returns the exit status."""
    content = sys.stdin.buffer.read()
    _end_with(os.getppid())
    os.nice(5)  # Training goes first; when it waits for rows, the processor is free anyway.
    task = pickle.loads(content)
    keep_retries_in(folder / RETRIES)
    try:
        carry_out(folder, task)
    except TandemError as error:
        return _failed(folder, error)
    except OSError as error:
        message = f"{error.filename or folder}: {error.strerror}, so the shards cannot be written. Free some space or move data.cache_dir; then run the same command again."
        name = "DiskFullError" if error.errno in (28, 122) else "CannotWriteError"
        write_json(folder / "failure.json", {"class": name, "message": message})
        return 74
    except BaseException as error:
        if panic := of_panic(error):
            return _failed(folder, panic)
        raise
    return 0


def _failed(folder: Path, error: TandemError) -> int:
    write_json(folder / "failure.json", {"class": type(error).__name__, "message": str(error)})
    return error.status


def _end_with(parent: int) -> None:
    """End when the training has ended: shards are whole or absent, so any moment will do."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def carry_out(folder: Path, task: dict[str, Any]) -> None:
    from pipeline.sources.open import open_sources

    recipe, plan, tokenizer = task["recipe"], task["plan"], task["tokenizer"]
    sources = open_sources(recipe, kind=plan["kind"])
    found = make_plan(recipe, tokenizer, sources=sources)
    for role in ROLES:
        if (found[role] or {}).get("sequences") != (plan[role] or {}).get("sequences"):
            raise DataError(
                f"{recipe.path or 'recipe'}: the {role} sources are not what they were when the run started a moment ago. "
                "Leave the files as they are while a run reads them, and run the same command again."
            )
    with locks(plan):
        workshop = Workshop(plan, tokenizer, sources=sources)
        if plan["keep_shards"]:
            prepare_sliding(workshop, folder, from_row=task["from_step"] * plan["rows_per_step"])
        else:
            for _ in workshop.prepare():
                pass
