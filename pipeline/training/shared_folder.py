"""Several machines of one run share its directory and its prepared data: proven before anything is written there."""

import os
import secrets
import socket
from pathlib import Path

import torch.distributed as dist

from pipeline.process.errors import CannotWriteError
from pipeline.training.distributed import from_every_rank, num_ranks


def refuse_unshared(folder: Path, *, key: str = "run.directory") -> None:
    """Raise CannotWriteError on every rank when a machine of this run sees another folder under that path, or cannot
    write there. key: of the recipe, that sets the folder.

    Each rank makes a file and must see the one of rank 0. On a single machine there is nothing to prove.
    """
    if num_ranks() in (1, int(os.environ.get("LOCAL_WORLD_SIZE", 1))):
        return
    # 1. Every rank makes a file, under a name that no other start has.
    name = f".shared-{from_every_rank(secrets.token_hex(8))[0]}"
    own = folder / f"{name}-{dist.get_rank()}"
    refusal, sees_first = "", False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        own.touch()
    except OSError as error:  # raised below, on every rank
        refusal = error.strerror or str(error)
    # 2. When all have, each looks for the one of rank 0.
    dist.barrier()
    try:
        # Listed: a network file system remembers for a while that a file did not exist, until its folder is listed.
        sees_first = f"{name}-0" in os.listdir(folder)
    except OSError as error:
        refusal = refusal or error.strerror or str(error)
    # 3. What each machine found; all ranks raise the same.
    outcomes = from_every_rank((socket.gethostname(), refusal, sees_first))
    if not refusal:
        own.unlink(missing_ok=True)
    refused = sorted({f"{host} ({reason})" for host, reason, _ in outcomes if reason})
    blind = sorted({host for host, _, sees in outcomes if not sees})
    if refused:
        raise CannotWriteError(
            f"{folder}: cannot be written by {', '.join(refused)}, and every machine of a run writes there. Set {key} "
            "to a folder that all of them can write."
        )
    if blind:
        raise CannotWriteError(
            f"{folder}: {', '.join(blind)} cannot see what {outcomes[0][0]} writes there, and all machines of a run "
            f"share it. Set {key} to a folder that all of them share."
        )
