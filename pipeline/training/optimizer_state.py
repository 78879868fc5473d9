"""An optimizer's state as named tensors for safetensors, and back, for any torch optimizer. No pickle."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from pipeline.model.saved import cut_like
from pipeline.process.errors import DataError

Tensors = dict[str, Tensor]

NO_STATE = "none"
NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}


def optimizer_tensors(optimizer: Any, model: torch.nn.Module) -> Tensors:
    """Return all state by name, not copied.

    model: the bare model whose parameters the optimizer updates. Raises TypeError for state that is neither a tensor
    nor a number.
    """
    tensors: Tensors = {}
    for parameter, name in named_members(optimizer, model):
        state = optimizer.state.get(parameter) or {NO_STATE: torch.empty(0)}
        for key, value in state.items():
            tensors[f"{name}/{key}"] = as_tensor(value, what=f"{name}/{key}")
    return tensors


def optimizer_settings(optimizer: Any) -> list[dict[str, Any]]:
    """Return rates, betas and the other settings of every group as they are now, without the parameters: JSON."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def load_optimizer_state(
    optimizer: Any, model: torch.nn.Module, tensors: Tensors, settings: list[dict[str, Any]] | None = None
) -> None:
    """Put the state of `optimizer_tensors` (copied) into an optimizer over the same parameters, whatever their order.

    settings: of `optimizer_settings`; without them the groups keep what they have, which suits a schedule that sets
    them from the step, or a fork with other rates. Raises DataError naming all parameters that are missing or extra.
    """
    members = named_members(optimizer, model)
    saved: dict[str, Tensors] = defaultdict(dict)
    for key, value in tensors.items():
        name, _, state = key.rpartition("/")
        saved[name][state] = value
    refuse_differences({name for _, name in members}, set(saved))
    plain = optimizer.state_dict()
    plain["state"] = {
        i: {key: as_state(value, parameter) for key, value in saved[name].items()}
        for i, (parameter, name) in enumerate(members)
        if NO_STATE not in saved[name]
    }
    if settings is not None:
        plain["param_groups"] = [
            now | {key: tuple(value) if isinstance(now.get(key), tuple) else value for key, value in then.items()}
            for now, then in zip(plain["param_groups"], settings, strict=True)
        ]
    optimizer.load_state_dict(plain)


def named_members(optimizer: Any, model: torch.nn.Module) -> list[tuple[Tensor, str]]:
    """Return the optimizer's parameters in its own order, which is the numbering of its state_dict, with their
    names."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [(p, names[id(p)]) for group in optimizer.param_groups for p in group["params"]]


def refuse_differences(names: set[str], saved: set[str]) -> None:
    """Raise DataError naming the parameters without a state, and the states without a parameter."""
    problems = [f"{name} is missing" for name in sorted(names - saved)]
    problems += [f"{name} is not a parameter here" for name in sorted(saved - names)]
    if problems:
        raise DataError(
            f"optimizer state: {'; '.join(problems)}, so the run cannot continue exactly. Use the recipe that wrote "
            "it, or model.start_from to start a new run from the weights."
        )


def as_tensor(value: Any, *, what: str) -> Tensor:
    if isinstance(value, Tensor):
        if value.ndim == 0 and value.dtype in NUMBERS.values():
            raise TypeError(f"{what} is a {value.dtype} scalar tensor; it would come back as a Python number")
        return value.detach()
    if type(value) not in NUMBERS:
        raise TypeError(f"{what} is a {type(value).__name__}; only tensors and numbers can be kept without pickle")
    return torch.tensor(value, dtype=NUMBERS[type(value)])


def as_state(value: Tensor, parameter: Tensor) -> Any:
    if value.ndim == 0:
        # Counters stay on the CPU; load_state_dict moves them where the update rule wants them on the device.
        return value.item() if value.dtype in NUMBERS.values() else value.clone()
    if isinstance(parameter, DTensor) and value.shape == parameter.shape:
        return cut_like(value, parameter)
    return value.to(parameter.device, copy=True)
