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

from pipeline.hardware.device import bf16_is_fast, decide_bf16
from pipeline.model.groups import parameter_group
from pipeline.process.errors import RecipeError
from pipeline.process.user_code import guarded, import_attribute
from pipeline.recipe.dial import MUON_FLOORS
from pipeline.recipe.schema import Group, Optimizer, Recipe
from pipeline.training.guard import total_norm
from pipeline.training.muon import alike, local, muon_step

FUSED_DEVICES = {"cpu", "cuda", "mps", "xpu"}  # where torch has a fused AdamW
MEASURED_AT_ONCE = 1 << 24  # elements that are copied to measure their change
# EMA-Nesterov's m, the moving average of the weights' changes, and how much of it the weights hold beside x.
DRIFT, LOOKAHEAD = "drift", "lookahead"
CONV1D = "_conv1d"  # marks the group of matrices that are stored (in, out)


class MuonAdamW(torch.optim.Optimizer):
    """AdamW for groups marked kind="adamw" (lr, betas, eps, weight_decay), Muon for kind="muon" (lr, momentum,
    weight_decay, outputs_first: stored (out, in) as nn.Linear does, or (in, out) as GPT-2's Conv1D does;
    product_dtype: a name of torch's; and where they are given update_floor and row_floor).

    A group with "lookahead" adds EMA-Nesterov (arXiv 2605.25395; modded-nanogpt, PR 308) to its rule A: between two
    steps its parameters hold y = x + (state's lookahead) m, where the gradient is taken, and a step makes x' = A(y),
    m' = average m + (1 - average)(x' - x) and y' = x' + (group's lookahead) m'. The norms that are measured are those
    of A.

    AdamW is torch's, fused where the device has it; Muon's step is muon_step's.
    """

    _norms: list[tuple[Tensor, Tensor]] | None = None  # of the update that is measured

    def __init__(self, groups: Iterable[dict[str, Any]]):
        super().__init__(groups, defaults={})
        for group in self.param_groups:
            wrong = [tuple(p.shape) for p in group["params"] if p.ndim != 2] if group["kind"] == "muon" else []
            if wrong:
                raise ValueError(f"Muon updates matrices; group {group['name']} has shapes {wrong}")
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
                if "lookahead" in group:
                    self._begin_drift(group, parameters)
                if group["kind"] == "muon":
                    muon_step(group, parameters, self.state, norms=self._norms)
                elif self._norms is None:
                    self._adamw(group, parameters)
                else:
                    for some_alike in alike(parameters):
                        for some in in_portions(some_alike, MEASURED_AT_ONCE):
                            before = [local(p).clone() for p in some]  # of a sharded one this rank's part, as Muon's
                            self._adamw(group, some)
                            torch._foreach_sub_(before, [local(p) for p in some])
                            self._norms.append((some[0], total_norm(before)))
                if "lookahead" in group:
                    self._end_drift(group, parameters)
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
            if "lookahead" in group and DRIFT not in self.state[p]:
                self.state[p] |= {DRIFT: torch.zeros_like(p), LOOKAHEAD: 0.0}

    def _begin_drift(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Take (1 - average) x off average m, so that no copy of x is held while the rule moves it: x is y - lookahead
        m.

        By the lookahead that was added, not by the schedule's, which goes on where a step is left out, and is another
        one in a fork.
        """
        drifts, average = [local(self.state[p][DRIFT]) for p in parameters], group["lookahead_average"]
        torch._foreach_mul_(drifts, [average + (1 - average) * self.state[p][LOOKAHEAD] for p in parameters])
        torch._foreach_add_(drifts, [local(p) for p in parameters], alpha=average - 1)

    def _end_drift(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        drifts, own = [local(self.state[p][DRIFT]) for p in parameters], [local(p) for p in parameters]
        torch._foreach_add_(drifts, own, alpha=1 - group["lookahead_average"])
        if group["lookahead"]:
            torch._foreach_add_(own, drifts, alpha=group["lookahead"])
        for p in parameters:
            self.state[p][LOOKAHEAD] = group["lookahead"]

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

AVERAGE = "average"  # a state of every parameter beside the update rule's: saved, gathered and restored with them


@torch.no_grad()
def average_weights(optimizer: Any, settings: Optimizer, *, last: bool) -> None:
    """Bring the moving average of the weights up to the step just made; after the last one mix it into them.

    A mixture learns more than the average alone, which lags. Source: modded-nanogpt, track 3, records 45 and 46.
    """
    assert settings.average_steps is not None
    # Those updated so far: an update rule takes a parameter whose state is empty for a new one.
    parameters = [p for group in optimizer.param_groups for p in group["params"] if optimizer.state.get(p)]
    if not parameters:
        raise RecipeError(
            "optimizer.average_steps: this optimizer keeps no state, with which the average is saved. Set it to null."
        )
    for p in parameters:
        optimizer.state[p].setdefault(AVERAGE, p.detach().clone())
    averages, own = [local(optimizer.state[p][AVERAGE]) for p in parameters], [local(p) for p in parameters]
    torch._foreach_lerp_(averages, own, 1 / settings.average_steps)
    if last:
        torch._foreach_lerp_(own, averages, settings.average_weight)


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


def build_optimizer(model: torch.nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """Return the optimizer of `optimizer.type`: one of OPTIMIZERS, or module:attr called with (model, recipe).

    Every group carries name, lr and initial_lr, the peak that the schedule scales. Raises RecipeError for a type that
    is not there and for a model that it cannot update.
    """
    if ":" in recipe.optimizer.type:
        return custom_optimizer(model, recipe)
    if recipe.optimizer.type not in OPTIMIZERS:
        raise RecipeError(
            f"optimizer.type is {recipe.optimizer.type}, which is no optimizer of ours. "
            f"Write {', '.join(OPTIMIZERS)} or module:attr; trainer leaves it to transformers.Trainer."
        )
    return OPTIMIZERS[recipe.optimizer.type](parameter_groups(model, recipe))


def parameter_groups(model: torch.nn.Module, recipe: Recipe) -> list[dict[str, Any]]:
    """Return one group per entry of optimizer.groups that the model has parameters for, in the schema's order.

    Under Muon, matrices that GPT-2's Conv1D stores as (in, out) are a group of their own: matrices_conv1d.
    """
    muon = recipe.optimizer.type == "muon_adamw"
    stored_in_out = {id(module.weight) for module in model.modules() if isinstance(module, Conv1D)}
    members: dict[str, list[Tensor]] = defaultdict(list)
    for name, p in model.named_parameters():
        if p.requires_grad:
            section: str = parameter_group(name, p)
            if muon and section == "matrices" and p.ndim != 2:
                raise RecipeError(
                    f"optimizer.type: muon_adamw updates matrices and {name} has shape {tuple(p.shape)}, "
                    "so this model cannot be trained with it. Use optimizer.type: adamw."
                )
            if muon and section == "matrices" and id(p) in stored_in_out:
                section += CONV1D
            members[section].append(p)
    groups: list[dict[str, Any]] = []
    for field in fields(recipe.optimizer.groups):
        for name in (field.name, field.name + CONV1D):
            if name in members:
                settings = getattr(recipe.optimizer.groups, field.name)
                group: dict[str, Any] = {"params": members.pop(name), "name": name}
                if muon and field.name == "matrices":
                    group |= muon_group(settings, recipe) | {"outputs_first": not name.endswith(CONV1D)}
                else:
                    group |= adamw_group(settings, recipe)
                groups.append(group)
    assert not members, f"parameter groups without an entry in optimizer.groups: {sorted(members)}"
    return groups


def rates(settings: Group, recipe: Recipe) -> dict[str, Any]:
    """Return lr and weight_decay, and what a schedule reads and never changes: initial_lr, decay_fraction,
    peak_lookahead."""
    assert settings.learning_rate is not None, "the recipe's reader fills every group"
    rate_scale = recipe.optimizer.rate_scale
    rate = settings.learning_rate * (1.0 if rate_scale is None else rate_scale)
    assert settings.weight_decay is not None
    decay_scale = recipe.optimizer.decay_scale
    decay = settings.weight_decay if decay_scale is None else settings.weight_decay * decay_scale
    group: dict[str, Any] = {"lr": rate, "initial_lr": rate, "weight_decay": decay}
    if settings.decay_fraction is not None:
        group["decay_fraction"] = settings.decay_fraction
    if recipe.optimizer.ema_nesterov is not None:
        group["lookahead_average"] = 1 - 1 / recipe.optimizer.ema_nesterov_steps
        group |= {"lookahead": 0.0, "peak_lookahead": recipe.optimizer.ema_nesterov}
        group["lookahead_span"] = recipe.optimizer.ema_nesterov_span
    return group


def adamw_group(settings: Group, recipe: Recipe) -> dict[str, Any]:
    assert settings.betas is not None, "the recipe's reader fills every group"
    return {"kind": "adamw", **rates(settings, recipe), "betas": tuple(settings.betas), "eps": settings.eps}


def muon_group(settings: Group, recipe: Recipe) -> dict[str, Any]:
    common = rates(settings, recipe)
    floors = {name: value for name in MUON_FLOORS if (value := getattr(settings, name)) is not None}
    return {
        **floors,
        "kind": "muon",
        **common,
        "momentum": settings.momentum,
        # What the schedule scales and never changes, beside initial_lr.
        "peak_momentum": settings.momentum,
        "initial_weight_decay": common["weight_decay"],
        "product_dtype": product_dtype(recipe),
    }


def product_dtype(recipe: Recipe) -> str:
    """Return what Muon multiplies in: bfloat16 where the training does and the hardware is fast at it, else float32.

    bfloat16 turns the last bits of a gradient into differences of 1e-3 in the loss after 20 steps, which would make a
    float32 run depend on its micro-batch; a bfloat16 run does so anyway. float16 has too little range for the
    polynomial.
    """
    bf16 = decide_bf16(recipe.train.get("bf16"), fp16=bool(recipe.train.get("fp16")))
    return "bfloat16" if bf16 and bf16_is_fast() else "float32"


def look_for_lomo_once() -> None:
    """Keep the answer that Accelerate searches the disk for twice a step, 0.4 ms: whether lomo_optim is installed."""
    ask = getattr(accelerate.optimizer, "is_lomo_available", None)
    if ask is not None and not hasattr(ask, "cache_info"):
        accelerate.optimizer.is_lomo_available = cache(ask)


def custom_optimizer(model: torch.nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """Return what the recipe's module:attr makes of (model, recipe)."""
    where = recipe.where("optimizer.type")
    factory = import_attribute(recipe.optimizer.type, recipe.code, where=where)
    with guarded(f"{where}: {recipe.optimizer.type}"):
        optimizer = factory(model, recipe)
    for i, group in enumerate(optimizer.param_groups):
        group.setdefault("initial_lr", group["lr"])
        group.setdefault("name", f"group_{i}")
    return optimizer
