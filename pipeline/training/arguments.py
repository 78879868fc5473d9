"""The recipe as transformers.TrainingArguments, for this number of processes."""

import os
from typing import Any

from transformers import TrainingArguments

from pipeline.artifacts.run_directory import RunDirectory
from pipeline.recipe import Recipe
from pipeline.recipe.batch import micro_batch, micro_steps
from pipeline.recipe.training_arguments import training_arguments


def build_arguments(recipe: Recipe, run: RunDirectory, **decided: Any) -> TrainingArguments:
    """decided: values that the hardware settled, such as bf16 and torch_compile."""
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    arguments = training_arguments(
        recipe,
        output_dir=str(run.checkpoints),
        max_steps=recipe.train["max_steps"],
        gradient_accumulation_steps=micro_steps(recipe, world_size),
    )
    if not decided.get("torch_compile", arguments.get("torch_compile")):
        decided |= {"torch_compile_mode": None, "torch_compile_backend": None}  # given, they would switch it on
    built = TrainingArguments(
        **{**arguments, "per_device_train_batch_size": micro_batch(recipe), **decided, "ignore_data_skip": True}
    )
    # One process stays on one device: with several in sight Trainer would wrap the model in DataParallel.
    built._n_gpu = min(built.n_gpu, 1)
    return built
