"""A function or a script on several ranks, each a process of its own: forked from one that imported, for six seconds a rank less."""

import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import torch.multiprocessing

# What the ranks of the tests import. No tensor is computed before the fork: threads do not survive it.
IMPORTED = ("transformers.models.auto.modeling_auto", "pipeline.training.build", "pipeline.training.distributed",
            "pipeline.run.checks", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
            "pipeline.evals.chat", "pipeline.evals.core")  # fmt: skip


def on_ranks(function: Callable, *arguments, ranks: int = 2) -> None:
    """Call function(rank, *arguments) on each rank, with the environment of the first call of all; raise what one of them raises."""
    multiprocessing.set_forkserver_preload(list(IMPORTED))
    torch.multiprocessing.start_processes(function, arguments, nprocs=ranks, start_method="forkserver")


def printed_on_ranks(script: Path, folder: Path, *arguments: object, ranks: int = 2, **environment: str) -> list[str]:
    """Return what `python SCRIPT FOLDER RANK RANKS ARGUMENTS` prints on each rank."""
    on_ranks(_run_script, script, folder, ranks, arguments, environment, ranks=ranks)
    return [(folder / f"printed-{rank}").read_text() for rank in range(ranks)]


def _run_script(rank: int, script: Path, folder: Path, ranks: int, arguments: tuple, environment: dict) -> None:
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", **environment}
    os.dup2(os.open(folder / f"printed-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    sys.argv = [str(script), str(folder), str(rank), str(ranks), *map(str, arguments)]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
