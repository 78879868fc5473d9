"""The optimizers of `optimizer.type`: AdamW or Muon + AdamW with a rate per parameter group, or the user's own.

One torch Optimizer holds both kinds as marked groups. It keeps no reference to a parameter but `param_groups`:
Accelerate replaces the group dicts when it prepares an optimizer, and the parameters in them under FSDP2.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from functools import cache
from typing import Any

import accelerate.optimizer
import torch
from torch import Tensor
from torch.optim.adamw import adamw
from transformers.pytorch_utils import Conv1D

from pipeline.hardware.device import bf16_is_fast
from pipeline.model.groups import parameter_group
from pipeline.process.errors import RecipeError
from pipeline.recipe.schema import Group, Optimizer
from pipeline.training.muon import muon_step
from pipeline.training.norms import group_by_placement, local, total_norm

FUSED_DEVICES = {"cpu", "cuda", "mps", "xpu"}  # where torch has a fused AdamW
MEASURED_AT_ONCE = 1 << 24  # elements that are copied to measure their change
CONV1D = "_conv1d"  # marks the group of matrices that are stored (in, out)


class MuonAdamW(torch.optim.Optimizer):
    """AdamW for groups marked kind="adamw" (lr, betas, eps, weight_decay), Muon for kind="muon" (lr, momentum,
    weight_decay, outputs_first: stored (out, in) as nn.Linear does, or (in, out) as GPT-2's Conv1D does;
    product_dtype: a name of torch's).

    AdamW is torch's, fused where the device has it; Muon's step is muon_step's, compiled by `backend` unless it is
    None. States and checkpoints are the same either way.
    """

    _norms: list[tuple[Tensor, Tensor]] | None = None  # of the update that is measured

    def __init__(self, groups: Iterable[dict[str, Any]], *, backend: str | None = None):
        super().__init__(groups, defaults={})
        self.backend = backend
        for group in self.param_groups:
            if group["kind"] == "adamw":
                # Under this name load_state_dict knows that the step counters live on the parameters' device.
                group.setdefault("fused", all(p.device.type in FUSED_DEVICES for p in group["params"]))

    def measure_next_update(self, norms: list[tuple[Tensor, Tensor]]) -> None:
        """Have the next step append the norms of its changes, 0-dimensional on the device; the update itself stays the
        same to the last bit. Takes the memory of MEASURED_AT_ONCE elements, or of the largest parameter."""
        self._norms = norms

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if parameters := [p for p in group["params"] if p.grad is not None]:
                self._add_states(group, parameters)
                if group["kind"] == "muon":
                    muon_step(group, parameters, self.state, norms=self._norms, backend=self.backend)
                elif self._norms is None:
                    self._adamw(group, parameters)
                else:
                    for of_one_placement in group_by_placement(parameters):
                        for some in in_portions(of_one_placement, MEASURED_AT_ONCE):
                            before = [local(p).clone() for p in some]  # of a sharded one this rank's part, as Muon's
                            self._adamw(group, some)
                            torch._foreach_sub_(before, [local(p) for p in some])
                            self._norms.append((some[0], total_norm(before)))
        self._norms = None
        return loss

    def _add_states(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        for p in parameters:
            if not self.state[p] and group["kind"] == "muon":
                variance = torch.zeros(max(p.shape), dtype=p.dtype, device=p.device)
                self.state[p] = {"momentum": torch.zeros_like(p), "variance": variance}
            elif not self.state[p]:
                self.state[p] = {
                    "step": torch.zeros((), dtype=torch.float32, device=p.device if group["fused"] else "cpu"),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }

    def _adamw(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        adamw(  # of a sharded model this rank's parts, and what every rank has whole
            [local(p) for p in parameters],
            [local(p.grad) for p in parameters],  # type: ignore[arg-type]  # step() keeps those that have one
            [local(self.state[p]["exp_avg"]) for p in parameters],
            [local(self.state[p]["exp_avg_sq"]) for p in parameters],
            [],
            [self.state[p]["step"] for p in parameters],
            foreach=not group["fused"],
            fused=group["fused"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


# The optimizers by optimizer.type, each made from parameter_groups; a type's default settings: MATRIX_GROUP of
# recipe/dial.py.
OPTIMIZERS = {"adamw": MuonAdamW, "muon_adamw": MuonAdamW}


def in_portions(parameters: list[Tensor], elements: int) -> Iterator[list[Tensor]]:
    """Yield the parameters in order, in lists of at most so many elements or one parameter."""
    portion: list[Tensor] = []
    size = 0
    for p in parameters:
        if portion and size + p.numel() > elements:
            yield portion
            portion, size = [], 0
        portion.append(p)
        size += p.numel()
    if portion:
        yield portion


def parameter_groups(model: torch.nn.Module, settings: Optimizer, *, product_dtype: str) -> list[dict[str, Any]]:
    """Return one group per entry of optimizer.groups that the model has parameters for, in the schema's order.

    Every group carries name, lr and initial_lr, the peak that the schedule scales. Under Muon, matrices that GPT-2's
    Conv1D stores as (in, out) are a group of their own: matrices_conv1d. product_dtype: of Muon, a name of torch's.
    Raises RecipeError for a model that Muon cannot update.
    """
    muon = settings.type == "muon_adamw"
    stored_in_out = {id(module.weight) for module in model.modules() if isinstance(module, Conv1D)}
    members: dict[str, list[Tensor]] = defaultdict(list)
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        section: str = parameter_group(name, p)
        if muon and section == "matrices":
            if p.ndim != 2:
                raise RecipeError(
                    f"optimizer.type: muon_adamw updates matrices and {name} has shape {tuple(p.shape)}, "
                    "so this model cannot be trained with it. Use optimizer.type: adamw."
                )
            if id(p) in stored_in_out:
                section += CONV1D
        members[section].append(p)
    groups: list[dict[str, Any]] = []
    for field in fields(settings.groups):
        section_settings = getattr(settings.groups, field.name)
        for name in (field.name, field.name + CONV1D):
            if name not in members:
                continue
            group: dict[str, Any] = {"params": members.pop(name), "name": name, **rates(section_settings, settings)}
            if muon and field.name == "matrices":
                group |= muon_settings(section_settings, group["weight_decay"])
                group |= {"outputs_first": not name.endswith(CONV1D), "product_dtype": product_dtype}
            else:
                group |= {"kind": "adamw", "betas": tuple(section_settings.betas), "eps": section_settings.eps}
            groups.append(group)
    assert not members, f"parameter groups without an entry in optimizer.groups: {sorted(members)}"
    return groups


def rates(group: Group, settings: Optimizer) -> dict[str, float]:
    """Return lr and weight_decay, scaled as the recipe says, and initial_lr, which no schedule changes."""
    assert group.learning_rate is not None, "the recipe's reader fills every group"
    assert group.weight_decay is not None, "the recipe's reader fills every group"
    rate, decay = group.learning_rate, group.weight_decay
    if settings.rate_scale is not None:
        rate *= settings.rate_scale
    if settings.decay_scale is not None:
        decay *= settings.decay_scale
    return {"lr": rate, "initial_lr": rate, "weight_decay": decay}


def muon_settings(group: Group, weight_decay: float) -> dict[str, Any]:
    """Return the momentum of Muon, and the peaks that its schedule scales."""
    return {
        "kind": "muon",
        "momentum": group.momentum,
        "peak_momentum": group.momentum,
        "initial_weight_decay": weight_decay,
    }


def product_dtype(*, bf16: bool) -> str:
    """Return the dtype of Muon's products: bfloat16 where training computes in it on hardware that is fast, or float32.

    bfloat16 turns the last bits of a gradient into differences of 1e-3 in the loss after 20 steps, which would make a
    float32 run depend on its micro-batch; a bfloat16 run does so anyway. float16 has too little range for the
    polynomial.
    """
    return "bfloat16" if bf16 and bf16_is_fast() else "float32"


def cache_lomo_check() -> None:
    """Cache whether lomo_optim is installed: Accelerate searches the disk for it twice a step, which takes 0.4 ms."""
    check = getattr(accelerate.optimizer, "is_lomo_available", None)
    if check is not None and not hasattr(check, "cache_info"):
        accelerate.optimizer.is_lomo_available = cache(check)
