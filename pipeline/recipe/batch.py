"""The global batch, whether its documents see each other, and the horizon in optimizer steps."""

import math

from pipeline.recipe.schema import Recipe
from pipeline.recipe.sizes import sizes_of

KEY, AUTO = "train.per_device_train_batch_size", "auto"
HORIZON_KEYS = ("tokens", "tokens_per_param", "flops")


def rows_per_step(recipe: Recipe) -> int:
    """Rows of one optimizer step over all processes. data.batch_tokens must be known."""
    assert recipe.data.batch_tokens, "data.batch_tokens is known once the number of processes is"
    return recipe.data.batch_tokens // recipe.data.row_tokens


def isolates_documents(recipe: Recipe) -> bool:
    """Whether the documents of a packed row do not see each other: positions restart, and attention ends there."""
    return recipe.stage == "sft" or recipe.data.isolate_documents


def is_auto(recipe: Recipe) -> bool:
    """Whether the micro-batch is to be found (preflight/micro_batch.py)."""
    return recipe.train.get("per_device_train_batch_size") == AUTO


def micro_batch(recipe: Recipe) -> int:
    """Rows of one forward pass of one process: as given, or what `auto` came to."""
    rows = recipe.micro_batch if is_auto(recipe) else recipe.train["per_device_train_batch_size"]
    assert rows is not None, "auto is a number once the plan is made"
    return rows


def micro_steps(recipe: Recipe, world_size: int) -> int:
    """Micro-steps of an optimizer step: the rows of a step dealt to world_size processes, the last micro-step filled up."""
    return math.ceil(rows_per_step(recipe) / (world_size * micro_batch(recipe)))


def with_batch_tokens(recipe: Recipe, world_size: int) -> int:
    """The global batch in tokens: as given, or computed from train.gradient_accumulation_steps and the processes."""
    if recipe.data.batch_tokens:
        return recipe.data.batch_tokens
    return world_size * micro_batch(recipe) * recipe.train["gradient_accumulation_steps"] * recipe.data.row_tokens


def horizon_steps(recipe: Recipe, batch_tokens: int) -> int | None:
    """Optimizer steps of the run; None when it is given in epochs and only the data know.

    Raises ValueError when they follow from sizes that cannot be known (recipe/sizes.py).
    """
    if "max_steps" in recipe.train:
        return recipe.train["max_steps"]
    run = recipe.run
    if run.tokens is not None:
        return run.tokens // batch_tokens
    if run.tokens_per_param is not None:
        sizes = sizes_of(recipe)
        if sizes.scaling is None:
            raise ValueError(f"the parameters that a token passes are not known: {sizes.unknown}")
        return int(run.tokens_per_param * sizes.scaling) // batch_tokens
    if run.flops is not None:
        sizes = sizes_of(recipe)
        flops = sizes.flops_per_token("nanochat")
        if flops is None:
            raise ValueError(f"the FLOPs of a token are not known: {sizes.unknown}")
        return int(run.flops / flops) // batch_tokens
    return None
