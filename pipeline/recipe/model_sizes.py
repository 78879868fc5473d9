"""Sizes of a recipe's model, a config or a built model: by arithmetic (sizes.py) or counted (model_statistics.py)."""

from dataclasses import replace
from typing import Any

from pipeline.recipe.schema import Model, Recipe
from pipeline.recipe.sizes import BY_ARITHMETIC, GPT2_NAMES, LLAMA_NAMES, Sizes, arithmetic_sizes, options_of


def model_fields(
    model: Model, *, vocab_size: int, bos_token_id: int | None, eos_token_id: int | None, pad_token_id: int | None
) -> dict[str, Any]:
    """Return the arguments of the config class of model.type, in its own names."""
    ids = {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id, "pad_token_id": pad_token_id}
    if model.type not in GPT2_NAMES and ":" not in model.type:
        from pipeline.recipe.model_statistics import config_fields

        return config_fields(model, {"vocab_size": vocab_size, **ids})
    sizes = {name: getattr(model, name) for name in LLAMA_NAMES if getattr(model, name) is not None}
    if model.type == "gpt2":
        sizes.pop("n_kv_head", None)
    return {**options_of(model, vocab_size=vocab_size), **sizes, "vocab_size": vocab_size, **ids}


def sizes_of(recipe: Recipe, vocab_size: int | None = None) -> Sizes:
    """Return sizes of the recipe's model. Imports torch for a type of transformers or of the user's own.

    Raises ValueError when layers, width, heads or the vocabulary are not known yet, or the model cannot be built of
    them.
    """
    model = recipe.model
    vocab_size = vocab_size or recipe.tokenizer.vocab_size
    missing = [f"model.{name}" for name in ("n_layer", "n_embd", "n_head") if getattr(model, name) is None]
    if missing or vocab_size is None:
        raise ValueError(f"{', '.join(missing) or 'tokenizer.vocab_size'} not known")
    model_type = (model.start_config or {}).get("model_type", model.type)
    if model_type not in BY_ARITHMETIC or (model_type == "nanochat" and model.start_config is None):
        return _counted(recipe, vocab_size)
    options = {
        **(model.start_config or options_of(model, vocab_size=vocab_size)),
        **{name: getattr(model, name) for name in LLAMA_NAMES},
        "n_positions": model.n_positions or recipe.data.row_tokens,
        "vocab_size": vocab_size,
    }
    return arithmetic_sizes(options, model_type, recipe.data.row_tokens)


def _counted(recipe: Recipe, vocab_size: int) -> Sizes:
    model, rows = recipe.model, recipe.data.row_tokens
    if model.start_config is not None:
        from transformers import AutoConfig

        from pipeline.recipe.model_statistics import sizes_of_config

        given = {name: value for name, value in model.start_config.items() if name != "model_type"}
        return sizes_of_config(AutoConfig.for_model(model.start_config["model_type"], **given), rows)
    fields = model_fields(model, vocab_size=vocab_size, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    from pipeline.recipe.model_statistics import sizes_of_fields

    return sizes_of_fields(model.type, fields, rows, code=recipe.code, where=recipe.where("model.type"))


def sizes_from_config(config: Any, row_tokens: int) -> Sizes:
    """Return sizes of the causal language model of a transformers config. Raises ValueError when none can be built of
    it."""
    if config.model_type not in BY_ARITHMETIC:
        from pipeline.recipe.model_statistics import sizes_of_config

        return sizes_of_config(config, row_tokens)
    sizes = {ours: getattr(config, ours, getattr(config, theirs, None)) for ours, theirs in LLAMA_NAMES.items()}
    return arithmetic_sizes(vars(config) | sizes, config.model_type, row_tokens)


def sizes_from_model(model: Any, row_tokens: int) -> Sizes:
    """Return sizes of a model that has been built."""
    model = getattr(model, "_orig_mod", model)  # as torch.compile wraps it
    if model.config.model_type in BY_ARITHMETIC:
        sizes = sizes_from_config(model.config, row_tokens)
    else:
        from pipeline.recipe.model_statistics import sizes_of_model

        sizes = sizes_of_model(model, row_tokens)
    if not hasattr(model, "peft") or sizes.linear is None:
        return sizes
    # Of 6 FLOPs a weight and token, 2 are those of its gradient, which a frozen weight has not; adapters have all 6.
    # A table that is trained whole is looked up, a head that is has its gradient again. Counted although nothing
    # before them learns: gradients of what the first block's adapters read.
    factors = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)
    head = model.get_output_embeddings().weight
    trained_head = head.numel() if head.requires_grad else 0
    return replace(sizes, linear=2 / 3 * sizes.linear + 6 * factors + 2 * trained_head)
