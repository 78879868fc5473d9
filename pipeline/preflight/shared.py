"""Several machines of one run share its directory and its prepared data: proven before anything is written there."""

import os
import secrets
import socket
from pathlib import Path

import torch

from pipeline.artifacts.errors import CannotWriteError


def refuse_unshared(folder: Path, *, key: str = "run.directory") -> None:
    """Raises CannotWriteError on every rank when a machine of this run sees another folder under that path.

    key: what sets the folder. A file that rank 0 makes must be there for all. On a single machine there is nothing to prove.
    """
    if (
        not torch.distributed.is_initialized()
        or int(os.environ.get("LOCAL_WORLD_SIZE", 1)) == torch.distributed.get_world_size()
    ):
        return
    name = [f".shared-{secrets.token_hex(8)}"]
    torch.distributed.broadcast_object_list(name, src=0)
    mark = folder / name[0]
    first = torch.distributed.get_rank() == 0
    if first:
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
    torch.distributed.barrier()
    seen: list[tuple[str, bool]] = [("", False)] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(seen, (socket.gethostname(), _is_there(mark)))
    if first:
        mark.unlink()
    blind = sorted({host for host, there in seen if not there})
    if blind:
        raise CannotWriteError(
            f"{folder}: {', '.join(blind)} cannot see what {seen[0][0]} writes there, and all machines of a run share it. "
            f"Set {key} to a folder that all of them share."
        )


def _is_there(mark: Path) -> bool:
    """Network file systems remember for a while that a file was absent; listing its folder asks anew."""
    return mark.parent.is_dir() and mark.name in os.listdir(mark.parent)
