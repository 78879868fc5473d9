"""What transformers makes of `train:`, tried before data are prepared: its arguments, its optimizer and its schedule.

Their types and bounds were checked when the recipe was read (recipe/fates.py); what single values mean together, and which
packages they need, only transformers can say. It is asked with one small matrix, one update of it, and the state of that
update as a checkpoint would keep it. Imports torch.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.artifacts.errors import RecipeError, TandemError
from pipeline.artifacts.run_directory import RunDirectory
from pipeline.recipe import Recipe
from pipeline.recipe.fates import FATES
from pipeline.recipe.problems import show

SIDE = 128  # of the matrix that is updated: from 4,096 elements on some optimizers keep their state in 8 bits
STEPS = 100  # of a run whose length only the data know


def trainer_problems(recipe: Recipe) -> list[TandemError]:
    """Return what transformers refuses of the recipe's `train:`, by the key without which it refuses nothing."""
    reason = _refusal(recipe)
    if reason is None:
        return []
    given = [name for name in recipe.train if f"train.{name}" in recipe.places]
    wrong = next((name for name in given if _refusal(_without(recipe, name)) is None), None)
    if wrong is None:
        return [
            RecipeError(
                f"{recipe.path}: train: is refused by transformers ({reason}). Change the keys that it speaks of."
            )
        ]
    what = f"is {show(recipe.train[wrong])}, which cannot be used here ({reason}). Correct it, or leave it out."
    return [RecipeError(f"{recipe.where(f'train.{wrong}')}: {what}")]


def _without(recipe: Recipe, name: str) -> Recipe:
    return replace(recipe, train=recipe.train | {name: FATES[name].default})


def _refusal(recipe: Recipe) -> str | None:
    """Return why transformers would not train with these settings, in its words; None when it would."""
    import torch
    from safetensors.torch import load, save
    from transformers import Trainer, get_scheduler

    from pipeline.hardware.device import decide_bf16, device_info
    from pipeline.training.arguments import build_arguments
    from pipeline.training.optimizer_state import load_optimizer_state, optimizer_settings, optimizer_tensors

    steps = recipe.train.get("max_steps") or STEPS
    known = replace(recipe, train=recipe.train | {"max_steps": steps})
    run = RunDirectory(Path(recipe.run.directory) / str(recipe.run.name))
    decided: dict[str, Any] = {
        "bf16": decide_bf16(recipe.train.get("bf16"), fp16=bool(recipe.train.get("fp16"))),
        "torch_compile": False,
        "use_cpu": device_info().kind == "cpu",
    }
    try:
        args = build_arguments(known, run, **decided)
        if recipe.optimizer.type != "trainer":
            return None
        model = torch.nn.Linear(SIDE, SIDE, bias=False, device=args.device)
        model.weight.grad = torch.ones_like(model.weight)
        # These optimizers need no model: those that do are refused (optim_target_modules), or not among recipe/fates.py's.
        optimizer_class, settings = Trainer.get_optimizer_cls_and_kwargs(args)
        optimizer = optimizer_class([{"params": [model.weight], "weight_decay": args.weight_decay}], **settings)
        schedule = get_scheduler(
            args.lr_scheduler_type,
            optimizer=optimizer,
            num_warmup_steps=args.get_warmup_steps(steps),
            num_training_steps=steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,  # type: ignore[arg-type]  # text is for its own command line
        )
        optimizer.step()
        schedule.step()
        tensors = load(save(optimizer_tensors(optimizer, model)))
        settings = json.loads(json.dumps(optimizer_settings(optimizer)))
        load_optimizer_state(optimizer, model, tensors, settings=settings)
    except Exception as error:  # of transformers, torch, and the packages of optimizers
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return None
