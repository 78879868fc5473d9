"""What the ranks of an evaluation tell each other: once, when each has done its share."""

import torch


class OtherRankFailed(RuntimeError):
    """Another rank's share of an evaluation failed; it says why itself."""


def summed_over_ranks(
    tensors: list[torch.Tensor], *, world_size: int, device: torch.device, error: Exception | None = None
) -> list[torch.Tensor]:
    """The sums over all ranks, on the CPU; every rank must call this. With a world_size of 1 each has its own sums.

    error: what this rank's share failed with. It is raised here, and OtherRankFailed on the ranks that went well.
    """
    if world_size == 1:
        if error is not None:
            raise error
        return tensors
    failed = torch.tensor([float(error is not None)], device=device)
    torch.distributed.all_reduce(failed)
    if error is not None:
        raise error
    if failed.item():
        raise OtherRankFailed("another rank failed in its share of the evaluation")
    found = []
    for tensor in tensors:
        there = tensor.to(device)
        torch.distributed.all_reduce(there)
        found.append(there.cpu())
    return found
