"""What one rank decides, all ranks know: also when the decision is that the run cannot start."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from pipeline.artifacts.errors import TandemError

Decision = TypeVar("Decision")


def on_rank_0(decide: Callable[[], Decision]) -> Decision:
    """Call `decide` on rank 0 only and give every rank its result; its TandemError or OSError is raised on every rank.

    Without it the other ranks would wait in their next collective for a rank that has left.
    """
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return decide()
    outcome: list = [None, None]
    if torch.distributed.get_rank() == 0:
        try:
            outcome = [decide(), None]
        except (TandemError, OSError) as error:
            outcome = [None, error]
    torch.distributed.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        outcome[1].of_all_ranks = True
        raise outcome[1]
    return outcome[0]


def from_every_rank(value: Any) -> list:
    """What every rank has to say, in rank order; every rank must call this."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return [value]
    values: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def numbers_of_every_rank(numbers: dict[str, float], device: torch.device) -> list[dict[str, float]]:
    """The numbers of every rank, which all have the same names, by one gather on the device."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return [numbers]
    own_1N = torch.tensor([list(numbers.values())], dtype=torch.float64, device=device)
    every_RN = own_1N.new_empty(torch.distributed.get_world_size(), len(numbers))
    torch.distributed.all_gather_into_tensor(every_RN, own_1N)
    return [dict(zip(numbers, rank, strict=True)) for rank in every_RN.tolist()]


def store_of_ranks() -> Any:
    """Where a rank leaves word for the others without waiting for them; None for one rank alone."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return None
    store: Any = torch.distributed.PrefixStore("tandem", torch.distributed.distributed_c10d._get_default_store())
    # A connection of its own: the other one is held for as long as somebody waits for a key on it.
    return store.clone()
