"""What one rank decides, all ranks know: also when the decision is that the run cannot start."""

from collections.abc import Callable
from typing import TypeVar

import torch

from pipeline.artifacts.errors import TandemError

Decision = TypeVar("Decision")


def on_rank_0(decide: Callable[[], Decision]) -> Decision:
    """Call `decide` on rank 0 only and give every rank its result; its TandemError is raised on every rank.

    Without it the other ranks would wait in their next collective for a rank that has left.
    """
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return decide()
    outcome: list = [None, None]
    if torch.distributed.get_rank() == 0:
        try:
            outcome = [decide(), None]
        except TandemError as error:
            outcome = [None, error]
    torch.distributed.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]
