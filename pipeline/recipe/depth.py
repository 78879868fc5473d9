"""The depth dial and the settings of the parameter groups.

One number sets the others in the order sizes, horizon, batch, rates, decay, each from the values then in force and each
only where the recipe says nothing. The formulas and constants are nanochat's (base_train.py and gpt.py, July 2026); they
were tuned on its shapes: aspect ratio 64, head_dim 128, vocabulary 32,768, Muon.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pipeline.recipe.counted_sizes import CountedSizes, SizesUnknownError
from pipeline.recipe.schema import Recipe
from pipeline.recipe.sizes import Sizes, sizes_of

REFERENCE_BATCH_TOKENS = 2**19
REFERENCE_DEPTH = 12
REFERENCE_WIDTH = 768
BATCH_EXPONENT = 0.383
TOKENS_PER_PARAM = 10.5
MATRIX_DECAY = 0.28
WIDTH_SCALED = ("embeddings", "value_embeddings", "head")

# Peak rates, betas and decay per group at width 768 and a batch of 2^19 tokens.
ADAM_GROUPS: dict[str, dict[str, Any]] = {
    "embeddings": {"learning_rate": 0.3, "betas": [0.8, 0.995], "eps": 1e-10, "weight_decay": 0.001},
    "value_embeddings": {"learning_rate": 0.15, "betas": [0.8, 0.995], "eps": 1e-10, "weight_decay": 0.01},
    "head": {"learning_rate": 0.008, "betas": [0.8, 0.96], "eps": 1e-10, "weight_decay": 0.01},
    # eps of the three below is not nanochat's 1e-10: at the first step every block adds zero and the norms undo any scale, so
    # the true gradient of the lambdas is zero, and 1e-10 turns its rounding noise into a full step (docs/log.md, eps).
    "scalars": {"learning_rate": 0.005, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.05},
    "x0_lambdas": {"learning_rate": 0.5, "betas": [0.96, 0.95], "eps": 1e-6, "weight_decay": 0.0},
    "gates": {"learning_rate": 0.2, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.0},
}
MATRIX_GROUP: dict[str, dict[str, Any]] = {
    "muon_adamw": {"learning_rate": 0.02, "momentum": 0.97, "weight_decay": MATRIX_DECAY},
    # A value of small models (docs/log.md: 0.27 BPB better than one rate for all at width 256); nothing larger has been measured.
    "adamw": {"learning_rate": 3e-3, "betas": [0.9, 0.95], "eps": 1e-10, "weight_decay": 0.1},
}

# fill(key, value) sets an open key by the dial; with cause=None by a plain default, which is not worth a line.
Fill = Callable[..., None]


def fill_sizes(recipe: Recipe, fill: Fill) -> None:
    """n_layer, n_embd and n_head from model.depth."""
    model = recipe.model
    if model.depth is None:
        return
    fill("model.n_layer", model.depth)
    width = model.n_embd or width_of(recipe, model.depth)
    fill("model.n_embd", width)
    if width % model.head_dim == 0:
        fill("model.n_head", width // model.head_dim)


def width_of(recipe: Recipe, depth: int) -> int:
    """Width at a depth: aspect_ratio per layer, rounded up to whole heads."""
    return math.ceil(depth * recipe.model.aspect_ratio / recipe.model.head_dim) * recipe.model.head_dim


def fill_batch(recipe: Recipe, fill: Fill) -> None:
    """data.batch_tokens: 2^19 x (N / N at depth 12)^0.383 to the nearest power of two, then to whole rows.

    nanochat's rule has training tokens D in place of parameters N; both depths have the same tokens per parameter.
    """
    ratio = _scaling(recipe) / _reference_scaling(recipe)
    batch = 2 ** round(math.log2(REFERENCE_BATCH_TOKENS * ratio**BATCH_EXPONENT))
    fill("data.batch_tokens", max(1, round(batch / recipe.data.row_tokens)) * recipe.data.row_tokens)


def fill_rates(recipe: Recipe, fill: Fill) -> None:
    """The rates' common factor and every group's settings.

    Under the dial rates follow sqrt(batch / 2^19), the gates' only up to 2^19, those of embeddings and head also
    (width / 768)^-0.5, and the decay of the matrices 0.28 x sqrt(batch / 2^19) x (D at depth 12 / D). Without it the
    reference values are taken as they are.
    """
    dial = recipe.model.depth is not None and recipe.tokenizer.vocab_size is not None
    batch_scale = (
        math.sqrt(recipe.data.batch_tokens / REFERENCE_BATCH_TOKENS) if dial and recipe.data.batch_tokens else 1.0
    )
    fill("optimizer.rate_scale", batch_scale, "model.depth" if dial else None)
    for group, settings in {**ADAM_GROUPS, "matrices": MATRIX_GROUP[recipe.optimizer.type]}.items():
        for name, value in settings.items():
            scale = 1.0
            if dial and name == "learning_rate" and group in WIDTH_SCALED:
                scale = math.sqrt(REFERENCE_WIDTH / sizes_of(recipe).n_embd)
            if dial and name == "learning_rate" and group == "gates":
                # nanochat keeps 0.2 at every batch. Below those it was tuned at, where all other rates are smaller, 0.2 drives
                # backout past 1 before the blocks add anything: the last state changes its sign (docs/log.md, gates).
                scale = min(1.0, 1 / batch_scale)
            if dial and name == "weight_decay" and group == "matrices" and recipe.optimizer.type == "muon_adamw":
                scale = batch_scale * _reference_scaling(recipe) / _scaling(recipe)
            fill(
                f"optimizer.groups.{group}.{name}",
                value if scale == 1 else value * scale,
                "model.depth" if scale != 1 else None,
            )


def group_settings(optimizer_type: str, group: str) -> set[str]:
    """Names of the settings that a group has under an optimizer type."""
    return set(MATRIX_GROUP[optimizer_type] if group == "matrices" else ADAM_GROUPS[group])


def _scaling(recipe: Recipe) -> int:
    return _known_scaling(sizes_of(recipe))


def _reference_scaling(recipe: Recipe) -> int:
    return _known_scaling(_at_depth(recipe, REFERENCE_DEPTH))


def _known_scaling(sizes: Sizes | CountedSizes) -> int:
    if sizes.scaling is None:
        raise SizesUnknownError(f"the parameters that a token passes are not known ({sizes.unknown})")
    return sizes.scaling


def _at_depth(recipe: Recipe, depth: int) -> Sizes | CountedSizes:
    width = width_of(recipe, depth)
    heads = width // recipe.model.head_dim
    model = replace(recipe.model, n_layer=depth, n_embd=width, n_head=heads, n_kv_head=None, n_inner=None)
    return sizes_of(replace(recipe, model=model))
