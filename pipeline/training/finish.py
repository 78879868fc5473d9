"""The end of a run: the finished model in model/, loadable anywhere, and the results in the manifest."""

import time
from typing import Any

import torch

from pipeline.artifacts.atomic import remove_folder
from pipeline.artifacts.checkpoints import problems, read_seal, whole_folder
from pipeline.artifacts.run_directory import RunDirectory
from pipeline.model.export import save_model


def write_finished_model(run: RunDirectory, model: Any, tokenizer: Any, *, dtype: str, step: int) -> None:
    """Write model/ whole or not at all, in the type that hub.dtype names; one that an earlier start left stays when it is
    that one, unharmed."""
    facts = {"step": step, "run": run.name, "dtype": dtype}
    if run.model.exists():
        if not problems(run.model) and facts.items() <= read_seal(run.model).items():
            return
        remove_folder(run.model)
    with whole_folder(run.model, **facts) as folder:
        save_model(model, folder, dtype=getattr(torch, dtype))
        tokenizer.save_pretrained(folder)


def mark_finished(run: RunDirectory) -> None:
    """From now on the same command says that the run has finished, and exits 0."""
    run.update_manifest(finished=time.time())
