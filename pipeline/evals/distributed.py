"""Communication between the ranks of an evaluation: once a share, when each has done its own."""

from typing import Any

import torch

from pipeline.process.errors import TandemError


class OtherRankFailed(RuntimeError):
    """Another rank's share of an evaluation failed; it says why itself."""


class EvaluationInterrupted(Exception):
    """A signal came in the middle of an evaluation or of sampling, which is given up."""


def summed_over_ranks(
    tensors: list[torch.Tensor], *, world_size: int, device: torch.device, error: Exception | None = None
) -> list[torch.Tensor]:
    """Return the sums over all ranks, on the CPU; every rank must call this. With a world_size of 1 each has its own sums.

    error: what this rank's share failed with. It is raised here, and OtherRankFailed on the ranks that went well; EvaluationInterrupted
    is raised on all of them.
    """
    if world_size == 1:
        if error is not None:
            raise error
        return tensors
    worst = torch.tensor([0 if error is None else 2 if isinstance(error, EvaluationInterrupted) else 1], device=device)
    torch.distributed.all_reduce(worst, op=torch.distributed.ReduceOp.MAX)
    _raise(error, worst=int(worst.item()))
    found = []
    for tensor in tensors:
        there = tensor.to(device)
        torch.distributed.all_reduce(there)
        found.append(there.cpu())
    return found


def gathered_over_ranks(mine: Any, *, world_size: int, error: Exception | None = None) -> list[Any]:
    """Return what each rank has, by rank; every rank must call this. With a world_size of 1 each has its own alone.

    error: as in summed_over_ranks, but a TandemError of one rank is raised on all.
    """
    if world_size == 1:
        if error is not None:
            raise error
        return [mine]
    severity = 0 if error is None else 2 if isinstance(error, EvaluationInterrupted) else 1
    shared = error if isinstance(error, TandemError) else None
    if shared is not None:
        shared.of_all_ranks = True
    everyones: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(everyones, (severity, shared, None if error else mine))
    of_one = next((shared for _, shared, _ in everyones if shared is not None), None)
    _raise(error or of_one, worst=max(severity for severity, _, _ in everyones))
    return [found for _, _, found in everyones]


def broadcast_bool(own: bool, device: torch.device | str) -> bool:
    """Return rank 0's value, so that all ranks go on or end together; every rank must call this."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return own
    value = torch.tensor([float(own)], device=device)
    torch.distributed.broadcast(value, src=0)
    return bool(value.item())


def _raise(error: Exception | None, *, worst: int) -> None:
    if worst == 2:
        raise EvaluationInterrupted
    if error is not None:
        raise error
    if worst:
        raise OtherRankFailed("another rank failed in its share of the evaluation")
