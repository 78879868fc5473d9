"""Several machines of one run share its directory and its prepared data: proven before anything is written there."""

import os
import secrets
import socket
from pathlib import Path

import torch

from pipeline.artifacts.atomic import remove_file
from pipeline.artifacts.errors import CannotWriteError


def refuse_unshared(folder: Path, *, key: str = "run.directory") -> None:
    """Raises CannotWriteError on every rank when a machine of this run sees another folder under that path, or cannot write there.

    key: what sets the folder. A file that rank 0 makes must be there for all, and each must be able to make one beside it.
    On a single machine there is nothing to prove.
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
    refusal = _refusal(mark, keep=True) if first else ""
    torch.distributed.barrier()
    there = not first and _is_there(mark)
    refusal = refusal or (_refusal(mark.with_name(f"{mark.name}-{torch.distributed.get_rank()}")) if there else "")
    seen: list[tuple[str, bool, str]] = [("", False, "")] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(seen, (socket.gethostname(), first or there, refusal))
    if first and not refusal:
        remove_file(mark)
    hosts = {host: reason for host, _, reason in seen if reason}
    blind = sorted({host for host, sees, _ in seen if not sees})
    if hosts:
        told = "; ".join(f"{host} ({reason})" for host, reason in sorted(hosts.items()))
        raise CannotWriteError(
            f"{folder}: cannot be written by {told}, and every machine of a run writes there. Set {key} to a folder that all of them can write."
        )
    if blind:
        raise CannotWriteError(
            f"{folder}: {', '.join(blind)} cannot see what {seen[0][0]} writes there, and all machines of a run share it. "
            f"Set {key} to a folder that all of them share."
        )


def _refusal(file: Path, *, keep: bool = False) -> str:
    """Why the file cannot be made here; empty when it can. Raises nothing: the other ranks wait for this one's word."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        if not keep:
            remove_file(file)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _is_there(mark: Path) -> bool:
    """Network file systems remember for a while that a file was absent; listing its folder asks anew."""
    try:
        return mark.name in os.listdir(mark.parent)
    except OSError:  # absent, or not for this user: the other ranks wait for this one's word
        return False
