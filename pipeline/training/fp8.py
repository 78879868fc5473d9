"""train.fp8: matrices of the blocks multiplied in float8 by torchao; everything else stays in bfloat16.

The converted modules are nn.Linear with another product: their weights keep names, float32 and identity, so that
optimizer, checkpoints and export see no difference.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pipeline.process.errors import RecipeError

ROLES = ("input", "hidden", "output")  # of the blocks' matrices; gates and the head are others
MULTIPLE = 16  # of both widths, as the float8 kernels ask for


def is_converted(module: nn.Module, name: str = "") -> bool:
    """Return whether train.fp8 converts the module; name: its place in the model, which torchao hands to its filters
    too."""
    return (
        isinstance(module, nn.Linear)
        and getattr(module, "init_role", None) in ROLES
        and module.in_features % MULTIPLE == 0
        and module.out_features % MULTIPLE == 0
    )


def convert_to_fp8(model: nn.Module, device: torch.device) -> None:
    """Let the model's matrices multiply in float8; the rest of the step is bfloat16 autocast's.

    Scales are made anew for each tensor, from its largest value. Not on CUDA float8 is imitated: right, slow, and
    refused by preflight.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # Padding is for micro-batches whose positions are no multiple of 16, and costs nothing otherwise.
    config = Float8LinearConfig(emulate=device.type != "cuda", pad_inner_dim=True)
    convert_to_float8_training(model, config=config, module_filter_fn=is_converted)


def refuse_without_fp8(model: nn.Module, where: str) -> None:
    """Raise RecipeError for a model none of whose matrices train.fp8 would convert."""
    if not any(is_converted(module) for module in model.modules()):
        raise RecipeError(
            f"{where}: a {type(model).__name__} of these sizes has no matrix for it: only those of a Tandem's blocks "
            f"without bias count, with widths that {MULTIPLE} divides. Remove the key, or change the model."
        )


@contextmanager
def without_fp8(model: nn.Module) -> Iterator[None]:
    """Let the model compute as if it had never been converted: scores and samples are those of the model that is
    saved.

    The class is swapped, not the modules or an attribute: compiled graphs of steps find all as it was when they come
    again.
    """
    converted = [m for m in model.modules() if isinstance(m, nn.Linear) and type(m).__module__.startswith("torchao.")]
    classes: list[Any] = [type(module) for module in converted]
    try:
        for module in converted:
            module.__class__ = nn.Linear
        yield
    finally:
        for module, kind in zip(converted, classes, strict=True):
            module.__class__ = kind
