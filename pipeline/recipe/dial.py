"""The depth dial: sizes, horizon, batch, and the rates and decay of every parameter group."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pipeline.recipe.batch import StepRows
from pipeline.recipe.model_sizes import sizes_of
from pipeline.recipe.schema import Bpb, Data, Model, Recipe, Run, with_values
from pipeline.recipe.sizes import Sizes, SizesUnknownError
from pipeline.recipe.start_from import start_folder

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
    # eps of the three below is not nanochat's 1e-10: at the first step every block adds zero and the norms undo any
    # scale, so the true gradient of the lambdas is zero, and 1e-10 turns its rounding noise into a full step
    # (docs/log.md, eps).
    "scalars": {"learning_rate": 0.005, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.05},
    "x0_lambdas": {"learning_rate": 0.5, "betas": [0.96, 0.95], "eps": 1e-6, "weight_decay": 0.0},
    "gates": {"learning_rate": 0.2, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.0},
}
# The optimizers over optimizer.groups, by optimizer.type, with the settings of the matrices; training/optimizer.py
# builds them.
MATRIX_GROUP: dict[str, dict[str, Any]] = {
    # A value of small models (docs/log.md: 0.27 BPB better than one rate for all at width 256); nothing larger has
    # been measured.
    "adamw": {"learning_rate": 3e-3, "betas": [0.9, 0.95], "eps": 1e-10, "weight_decay": 0.1},
    "muon_adamw": {"learning_rate": 0.02, "momentum": 0.97, "weight_decay": MATRIX_DECAY},
}
# fill(key, value) sets an open key by the dial; with cause=None by a plain default, which is not worth a line.
Fill = Callable[..., None]


def horizon_steps(recipe: Recipe) -> int | None:
    """Return the optimizer steps of the run; None when it is given in epochs and only the data know. data.batch_tokens
    must be known.

    Raises ValueError when they follow from sizes that cannot be known (recipe/sizes.py).
    """
    if "max_steps" in recipe.train:
        return recipe.train["max_steps"]
    run, tokens = recipe.run, recipe.run.tokens
    if run.tokens_per_param is not None:
        sizes = sizes_of(recipe)
        if sizes.scaling is None:
            raise ValueError(f"the parameters that a token passes are not known: {sizes.unknown}")
        tokens = int(run.tokens_per_param * sizes.scaling)
    elif run.flops is not None:
        sizes = sizes_of(recipe)
        flops = sizes.flops_per_token("nanochat")
        if flops is None:
            raise ValueError(f"the FLOPs of a token are not known: {sizes.unknown}")
        tokens = int(run.flops / flops)
    return None if tokens is None else recipe.step_rows.steps(tokens // recipe.data.row_tokens)


@dataclass(frozen=True)
class RowSettings:
    """Values that plan the rows of a run.

    total_rows, epochs: the horizon, one of them None. isolated: documents of a row do not see each other. start_folder:
    of model.start_from, where it is here.
    """

    data: Data
    bpb: Bpb
    run: Run
    kind: Literal["text", "chat"]
    seed: int
    step_rows: StepRows
    total_rows: int | None
    epochs: float | None
    isolated: bool
    start_from: str | None
    start_folder: Path | None


def row_settings(recipe: Recipe) -> RowSettings:
    """Return what the run's rows are planned by."""
    if recipe.data.batch_tokens is None:  # no entry has set it, which knows the number of processes
        recipe = with_values(recipe, {"data.batch_tokens": recipe.global_batch_tokens(1)})
    rows, steps = recipe.step_rows, horizon_steps(recipe)
    total_rows, epochs = None, None
    if steps and steps > 0:
        total_rows = rows.before(steps)
    else:
        epochs = float(recipe.train.get("num_train_epochs") or 1.0)
    sources = recipe.source_settings()
    return RowSettings(
        data=recipe.data,
        bpb=recipe.evals.bpb,
        run=recipe.run,
        kind=sources.kind,
        seed=sources.seed,
        step_rows=rows,
        total_rows=total_rows,
        epochs=epochs,
        isolated=recipe.isolates_documents,
        start_from=recipe.model.start_from,
        start_folder=start_folder(recipe),
    )


def fill_sizes(model: Model, fill: Fill) -> None:
    """Fill n_layer, n_embd and n_head from model.depth."""
    if model.depth is None:
        return
    fill("model.n_layer", model.depth)
    width = model.n_embd or width_of(model, model.depth)
    fill("model.n_embd", width)
    if width % model.head_dim == 0:
        fill("model.n_head", width // model.head_dim)


def width_of(model: Model, depth: int) -> int:
    """Return the width at a depth: aspect_ratio per layer, rounded up to whole heads."""
    return math.ceil(depth * model.aspect_ratio / model.head_dim) * model.head_dim


def fill_batch(recipe: Recipe, fill: Fill) -> None:
    """Fill data.batch_tokens under the dial: the batch that suits the model's size, in whole rows."""
    # 1. The sizes that scale (matrices of the blocks and the head): of this model, and of the one that the reference
    #    batch was tuned for. nanochat's rule has training tokens D in place of parameters N; both models train on the
    #    same tokens per parameter, so the ratio is the same.
    num_parameters = _scaling(sizes_of(recipe))
    num_reference = _scaling(sizes_at_depth(recipe, REFERENCE_DEPTH))
    # 2. The batch beyond which more tokens a step bring less grows as D^0.383 (Power Lines, arXiv 2505.13738).
    batch = REFERENCE_BATCH_TOKENS * (num_parameters / num_reference) ** BATCH_EXPONENT
    # 3. The nearest power of two: devices and micro-batches divide it.
    batch = 2 ** round(math.log2(batch))
    # 4. Whole rows, one at least.
    num_rows = max(1, round(batch / recipe.data.row_tokens))
    fill("data.batch_tokens", num_rows * recipe.data.row_tokens)


def fill_rates(recipe: Recipe, fill: Fill) -> None:
    """Fill optimizer.rate_scale and every group's settings: the reference values, under the dial scaled to this
    model's batch, width and tokens."""
    groups = {**ADAM_GROUPS, "matrices": MATRIX_GROUP[recipe.optimizer.type]}
    scales: dict[str, float] = {}
    batch_scale = 1.0
    dial = recipe.model.depth is not None and recipe.tokenizer.vocab_size is not None
    if dial:
        sizes = sizes_of(recipe)
        # 1. Gradients of a larger batch have less noise: all rates follow the square root of the batch.
        if recipe.data.batch_tokens:
            batch_scale = math.sqrt(recipe.data.batch_tokens / REFERENCE_BATCH_TOKENS)
        # 2. Embeddings and head under AdamW: 1 / sqrt(width), from the width at which nanochat tuned them. Muon's
        #    update has the same norm at every width.
        for group in WIDTH_SCALED:
            scales[f"{group}.learning_rate"] = math.sqrt(REFERENCE_WIDTH / sizes.n_embd)
        # 3. Gates: nanochat keeps 0.2 at every batch, so step 1 is undone. Below the batches it was tuned at, where
        #    all other rates are smaller, 0.2 drives backout past 1 before the blocks add anything: the last state
        #    changes its sign (docs/log.md, gates). So it is never undone upwards.
        scales["gates.learning_rate"] = min(1.0, 1 / batch_scale)
        # 4. Muon's decay: weights average the updates of batch / (rate x decay) tokens, which should stay the same
        #    share of the D trained tokens (arXiv 2405.13698). With rates as sqrt(batch), decay follows sqrt(batch) / D,
        #    and D is the parameters times a constant.
        if recipe.optimizer.type == "muon_adamw":
            num_reference = _scaling(sizes_at_depth(recipe, REFERENCE_DEPTH))
            scales["matrices.weight_decay"] = batch_scale * num_reference / _scaling(sizes)
    cause = "model.depth" if dial else None
    fill("optimizer.rate_scale", batch_scale, cause)
    for group, settings in groups.items():
        for name, value in settings.items():
            scale = scales.get(f"{group}.{name}", 1.0)
            if scale == 1:
                fill(f"optimizer.groups.{group}.{name}", value, None)
            else:
                fill(f"optimizer.groups.{group}.{name}", value * scale, "model.depth")


def group_settings(optimizer_type: str, group: str) -> set[str]:
    """Return names of the settings that a group has under an optimizer type."""
    if group == "matrices":
        return set(MATRIX_GROUP[optimizer_type])
    return set(ADAM_GROUPS[group])


def _scaling(sizes: Sizes) -> int:
    if sizes.scaling is None:
        raise SizesUnknownError(f"the parameters that a token passes are not known ({sizes.unknown})")
    return sizes.scaling


def sizes_at_depth(recipe: Recipe, depth: int) -> Sizes:
    width = width_of(recipe.model, depth)
    heads = width // recipe.model.head_dim
    model = replace(recipe.model, n_layer=depth, n_embd=width, n_head=heads, n_kv_head=None, n_inner=None)
    return sizes_of(replace(recipe, model=model))
