"""The random state of a process, as tensors: python, numpy, torch and the accelerator."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def get_rng_state() -> dict[str, torch.Tensor]:
    """Return the state of every generator that training may draw from; safetensors holds all of it."""
    version, python, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()
    state = {
        "python": torch.tensor([version, *python], dtype=torch.int64),
        "python_gauss": torch.tensor([float("nan") if gauss is None else gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "numpy_position": torch.tensor([position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.accelerator.is_available():
        state["accelerator"] = _accelerator_module().get_rng_state()
    return state


def set_rng_state(state: dict[str, torch.Tensor]) -> None:
    """Put back what get_rng_state gave."""
    version, *python = state["python"].tolist()
    gauss = state["python_gauss"].item()
    random.setstate((version, tuple(python), None if np.isnan(gauss) else gauss))
    position, has_gauss = state["numpy_position"].tolist()
    keys = state["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, position, has_gauss, state["numpy_gauss"].item()))
    torch.set_rng_state(state["torch"])
    if "accelerator" in state and torch.accelerator.is_available():
        _accelerator_module().set_rng_state(state["accelerator"])


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Preserve the random state around evaluations and samples: training draws the same numbers as if they had not happened."""
    state = get_rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


def _accelerator_module():
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return getattr(torch, accelerator.type)
