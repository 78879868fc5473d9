"""The recipe's sizes as fields of a config class of transformers, and what stands there for the sizes that it leaves open.

A config class has the sizes of its largest model as defaults, so that one that a small recipe does not name would make it
twenty times as large. Imports transformers where it is called.
"""

import json
from typing import Any

from pipeline.recipe.presets import LLAMA_NAMES, default_inner
from pipeline.recipe.schema import Recipe

# Other names of the sizes, by the one that most classes know (as a field, or translated by attribute_map); the first that a
# class has is used. An encoder-decoder's causal LM is its decoder.
OTHER_NAMES = {
    "n_layer": ("decoder_layers", "num_decoder_layers", "num_hidden_layers", "num_layers"),
    "n_head": ("decoder_attention_heads", "num_decoder_attention_heads", "num_attention_heads", "num_heads"),
    "n_kv_head": ("num_key_value_heads",),
    "n_inner": ("decoder_ffn_dim", "intermediate_size", "n_inner", "ffn_dim", "inner_dim", "d_inner", "dff", "dim_ff"),
    "n_positions": ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len"),
}
# Further widths, which keep the proportion to hidden_size that the class gives them.
PROPORTIONAL = (
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "intermediate_size_mlp",
    "dense_intermediate_size",
    "prefix_dense_intermediate_size",
    "q_lora_rank",
    "kv_lora_rank",
    "o_lora_rank",
    "embedding_size",
    "word_embed_proj_dim",
    "hidden_size_per_layer_input",
)
MULTIPLE = 8  # of proportional widths
_gated: dict[tuple, bool] = {}


def config_fields(recipe: Recipe, tokens: dict[str, int | None]) -> dict[str, Any]:
    """Arguments of the config class of model.type. tokens: vocab_size and the special tokens' ids.

    The recipe's own sizes and options, and for sizes that neither names: heads of n_embd / n_head, an MLP as default_inner
    has it, other widths in the class's own proportion to hidden_size. An unknown type has the common names.
    """
    model = recipe.model
    config_class = config_class_of(model.type)
    given = {ours: getattr(model, ours) for ours in LLAMA_NAMES if getattr(model, ours) is not None}
    if config_class is None:
        return {**model.options, **{LLAMA_NAMES[ours]: value for ours, value in given.items()}, **tokens}
    known = known_fields(config_class)
    fields = {name: value for name, value in tokens.items() if name in known}
    for ours, value in given.items():
        name = field_name(config_class, ours)
        # Positions may be without an end, and heads without a number: only the recipe needs to give that.
        needless = ours in ("n_positions", "n_head") or (ours == "n_kv_head" and value == model.n_head)
        if name in known or not needless:
            fields[name] = value
    return {**_open_sizes(recipe, config_class, fields), **model.options, **fields}


def config_class_of(model_type: str) -> Any:
    """The config class of a type of transformers, None when there is no such type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else None  # noqa: SIM401 - its get() is no lazy one


def known_fields(config_class: Any) -> set[str]:
    return {*config_class.__dataclass_fields__, *config_class.attribute_map} - {"model_type"}


def field_name(config_class: Any, ours: str) -> str:
    """A class's own name for one of the sizes of `model:`; Llama's where it has none."""
    known = known_fields(config_class)
    return next((name for name in OTHER_NAMES.get(ours, ()) if name in known), LLAMA_NAMES[ours])


def chosen_sizes(recipe: Recipe) -> dict[str, Any]:
    """The config's sizes that the recipe leaves open, as they are filled for a type of transformers."""
    model = recipe.model
    config_class = None if model.start_from or ":" in model.type else config_class_of(model.type)
    if config_class is None or model.type in ("tandem", "gpt2") or not (model.n_embd and model.n_head):
        return {}
    given = {field_name(config_class, ours): getattr(model, ours) for ours in LLAMA_NAMES if getattr(model, ours)}
    given["vocab_size"] = recipe.tokenizer.vocab_size or 512
    chosen = {**_open_sizes(recipe, config_class, given), **model.options}
    counts = [name for name in _defaults(config_class) if "expert" in name and name not in chosen]
    return {n: v for n, v in chosen.items() if n not in model.options} | {
        n: v for n in counts if type(v := _defaults(config_class)[n]) is int and v
    }


def _open_sizes(recipe: Recipe, config_class: Any, given: dict[str, Any]) -> dict[str, Any]:
    """given: the fields that the recipe's sizes set, by the class's names."""
    model, defaults, known = recipe.model, _defaults(config_class), known_fields(config_class)
    width, heads = model.n_embd, model.n_head
    if not width or not heads:
        return {}
    named = {**model.options, **given}
    filled: dict[str, Any] = {}
    # Latent attention has widths of heads for parts of them; there head_dim follows from those.
    if "head_dim" in defaults and "qk_rope_head_dim" not in defaults:
        filled["head_dim"] = width * (defaults.get("expand", 1) if "num_heads" in defaults else 1) // heads
    if "d_head" in defaults:
        filled["d_head"] = width // heads
    if type(defaults.get("rotary_dim")) is int:
        filled["rotary_dim"] = min(defaults["rotary_dim"], named.get("head_dim", width // heads))
    if "is_decoder" in defaults:  # else BERT and its kin would see what they are to predict
        filled["is_decoder"] = True
    if "vocab_size_per_layer_input" in defaults:
        filled["vocab_size_per_layer_input"] = given.get("vocab_size")
    own_width = defaults.get("hidden_size", defaults.get(config_class.attribute_map.get("hidden_size")))
    for name in PROPORTIONAL:
        if type(default := defaults.get(name)) is int and default and type(own_width) is int:
            filled[name] = max(MULTIPLE, round(default * width / own_width / MULTIPLE) * MULTIPLE)
    inner = field_name(config_class, "n_inner")
    own_inner = defaults.get(inner, defaults.get(config_class.attribute_map.get(inner)))
    if inner in known and inner not in named and type(own_inner) is int:  # None: the class itself says 4 x hidden_size
        fields = {**filled, **named}
        filled[inner] = default_inner(width, gated=_is_gated(config_class, fields, inner, width))
    return {name: value for name, value in filled.items() if name not in named}


def _defaults(config_class: Any) -> dict[str, Any]:
    return {name: field.default for name, field in config_class.__dataclass_fields__.items()}


def _is_gated(config_class: Any, fields: dict[str, Any], inner: str, width: int) -> bool:
    """Return whether the MLP has a third matrix, read off a model without weights.

    Two matrices of one module, or one of twice the width, end in n_inner."""
    key = (config_class, inner, json.dumps(fields, sort_keys=True, default=str))
    if key not in _gated:
        import torch
        from transformers import AutoModelForCausalLM

        mark = 4 * width + 24  # a width that nothing else has
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config_class(**{**fields, inner: mark}))
        except Exception:  # training and plan build the same and say what is wrong with it
            return False
        into: dict[str, int] = {}
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                module = name.removesuffix(".weight").rpartition(".")[0]
                shape = parameter.shape[-2:]
                into[module] = into.get(module, 0) + (2 if 2 * mark in shape else 1 if mark in shape else 0)
        _gated[key] = max(into.values(), default=0) >= 3 or any(
            2 * mark in parameter.shape[-2:] for parameter in model.parameters() if parameter.ndim >= 2
        )
    return _gated[key]
