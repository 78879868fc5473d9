"""Collectives over ranks, errors that all of them raise, and random states."""

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from pipeline.metrics import Numbers
from pipeline.process.errors import TandemError

Decision = TypeVar("Decision")


def num_ranks() -> int:
    """Return the number of processes that train together; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def on_rank_0(decide: Callable[[], Decision]) -> Decision:
    """Call `decide` on rank 0 only and give every rank its result; its TandemError or OSError is raised on every rank.

    Without it the other ranks would wait in their next collective for a rank that has left.
    """
    if num_ranks() == 1:
        return decide()
    outcome: list = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome = [decide(), None]
        except (TandemError, OSError) as error:
            outcome = [None, error]
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        outcome[1].of_all_ranks = True
        raise outcome[1]
    return outcome[0]


def on_every_rank(act: Callable[[], Decision]) -> list[Decision]:
    """Call `act` on every rank and give every rank all results, in rank order; a TandemError or OSError of one is
    raised on all."""
    result, error = None, None
    try:
        result = act()
    except (TandemError, OSError) as raised:
        error = raised
    outcomes = from_every_rank((result, error))
    for _, error in outcomes:
        if error is not None:
            error.of_all_ranks = True
            raise error
    return [value for value, _ in outcomes]


def from_every_rank(value: Any) -> list:
    """Return the value of every rank, in rank order; every rank must call this."""
    if num_ranks() == 1:
        return [value]
    values: list = [None] * num_ranks()
    dist.all_gather_object(values, value)
    return values


def numbers_of_every_rank(numbers: Numbers, device: torch.device) -> list[Numbers]:
    """Return the numbers of every rank, which all have the same names, by one gather on the device."""
    if num_ranks() == 1:
        return [numbers]
    own_1N = torch.tensor([list(numbers.values())], dtype=torch.float64, device=device)
    every_RN = own_1N.new_empty(num_ranks(), len(numbers))
    dist.all_gather_into_tensor(every_RN, own_1N)
    return [dict(zip(numbers, rank, strict=True)) for rank in every_RN.tolist()]


def store_of_ranks() -> Any:
    """Return the store in which a rank leaves messages for the others without waiting; None for one rank alone."""
    if num_ranks() == 1:
        return None
    store: Any = dist.PrefixStore("tandem", dist.distributed_c10d._get_default_store())
    # A connection of its own: the other one is blocked for as long as somebody waits for a key on it.
    return store.clone()


def get_rng_state() -> dict[str, torch.Tensor]:
    """Return the state of every generator that training may draw from; safetensors holds all of it."""
    # Python and numpy keep the second number of a pair of normal ones; Python has None where there is none.
    version, python, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()
    state = {
        "python": torch.tensor([version, *python], dtype=torch.int64),
        "python_gauss": torch.tensor([math.nan if gauss is None else gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "numpy_position": torch.tensor([position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.accelerator.is_available():
        state["accelerator"] = torch.get_device_module().get_rng_state()
    return state


def set_rng_state(state: dict[str, torch.Tensor]) -> None:
    """Put back what get_rng_state gave."""
    version, *python = state["python"].tolist()
    second = state["python_gauss"].item()
    gauss = None if math.isnan(second) else second
    random.setstate((version, tuple(python), gauss))
    position, has_gauss = state["numpy_position"].tolist()
    keys = state["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, position, has_gauss, state["numpy_gauss"].item()))
    torch.set_rng_state(state["torch"])
    if "accelerator" in state and torch.accelerator.is_available():
        torch.get_device_module().set_rng_state(state["accelerator"])


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Preserve the random state around evaluations and samples: training draws the same numbers as if they had not
    happened."""
    state = get_rng_state()
    try:
        yield
    finally:
        set_rng_state(state)
