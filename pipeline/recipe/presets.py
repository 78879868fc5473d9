"""The model's config fields out of a recipe: a preset, the sizes, and single options over them."""

from typing import Any, Literal

from pipeline.recipe.schema import Recipe

# The current nanochat as options of TandemConfig (nanochat's gpt.py of July 2026).
MODERN: dict[str, Any] = {
    "normalization": "rms_norm",
    "position_embedding": "rope",
    "rope_theta": 100_000.0,
    "use_bias": False,
    "qk_norm": True,
    "qk_norm_scale": 1.2,
    "embedding_norm": True,
    "activation_function": "relu2",
    "tie_word_embeddings": False,
    "final_logit_softcapping": 15.0,
    "value_embeddings": True,
    "residual_lambdas": True,
    "backout": True,
    "smear": True,
    "window_pattern": "SSSL",
    "initialization": "nanochat",
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "vocab_multiple": 64,
}
PRESETS: dict[str, dict[str, Any]] = {"gpt2": {}, "modern": MODERN}

# What model.options may hold for model.type tandem, and of which type: TandemConfig's own fields and GPT2Config's.
TANDEM_OPTIONS: dict[str, Any] = {
    "normalization": Literal["layer_norm", "rms_norm"],
    "position_embedding": Literal["learned", "rope"],
    "rope_theta": float,
    "use_bias": bool,
    "qk_norm": bool,
    "qk_norm_scale": float,
    "embedding_norm": bool,
    "final_logit_softcapping": float | None,
    "value_embeddings": bool,
    "residual_lambdas": bool,
    "backout": bool,
    "smear": bool,
    "window_pattern": str | None,
    "sliding_window": int | None,
    "initialization": Literal["gpt2", "nanochat"],
    "vocab_multiple": int,
    "activation_function": str,
    "resid_pdrop": float,
    "embd_pdrop": float,
    "attn_pdrop": float,
    "layer_norm_epsilon": float,
    "initializer_range": float,
    "tie_word_embeddings": bool,
    "scale_attn_weights": bool,
    "scale_attn_by_inverse_layer_idx": bool,
}
# Keys of `model:` (and of the tokenizer) that people look for among the options.
NOT_OPTIONS = {
    name: f"model.{name}" for name in ("n_layer", "n_embd", "n_head", "n_kv_head", "n_inner", "n_positions", "head_dim")
} | {
    "vocab_size": "tokenizer.vocab_size",
    "bos_token_id": "the tokenizer",
    "eos_token_id": "the tokenizer",
    "pad_token_id": "the tokenizer",
}
# Config classes that keep GPT-2's names for the sizes; the others of transformers share Llama's (transformers_config.py).
GPT2_NAMES = {"tandem", "gpt2"}
LLAMA_NAMES = {
    "n_layer": "num_hidden_layers",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
}


def default_inner(n_embd: int, *, gated: bool) -> int:
    """Width of an MLP where none is given: 4 x n_embd of two matrices; of three 8/3 of it, which makes as many parameters.

    The latter rounded up to a multiple of 64, below a width of 256 of 8.
    """
    if not gated:
        return 4 * n_embd
    multiple = 64 if n_embd >= 256 else 8
    return -(-8 * n_embd // (3 * multiple)) * multiple


def options_of(recipe: Recipe) -> dict[str, Any]:
    """The preset's options with the recipe's own over them."""
    return {**PRESETS[recipe.model.preset], **recipe.model.options}


def model_fields(
    recipe: Recipe, *, vocab_size: int, bos_token_id: int | None, eos_token_id: int | None, pad_token_id: int | None
) -> dict[str, Any]:
    """Arguments of the config class of model.type, in its own names."""
    model = recipe.model
    ids = {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id, "pad_token_id": pad_token_id}
    if model.type not in GPT2_NAMES and ":" not in model.type:
        from pipeline.recipe.transformers_config import config_fields

        return config_fields(recipe, {"vocab_size": vocab_size, **ids})
    sizes = {name: getattr(model, name) for name in LLAMA_NAMES if getattr(model, name) is not None}
    if model.type == "gpt2":
        sizes.pop("n_kv_head", None)
    return {**options_of(recipe), **sizes, "vocab_size": vocab_size, **ids}
