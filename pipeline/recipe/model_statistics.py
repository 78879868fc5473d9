"""Count parameters and FLOPs of models of transformers' types and of the user's own, on a model without weights.

Used where model.type, or the model to start from, is such a one; Tandem and GPT-2 have sizes.py, arithmetic alone.
"""

import copy
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

from pipeline.process.errors import RecipeError
from pipeline.process.user_code import CodeFolder, guarded, import_attribute
from pipeline.recipe.schema import Model
from pipeline.recipe.sizes import (
    LLAMA_NAMES,
    PRESETS,
    Sizes,
    SizesUnknownError,
    default_inner,
    layer_windows,
)

# Other names of the sizes in config classes, by ours; the first that a class has is used. The causal LM of an
# encoder-decoder is its decoder.
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
# What a layer may do with the keys of its row, as config.layer_types names it.
ATTENTION_KINDS = {"full_attention", "sliding_attention", "chunked_attention", "global", "local"}
FORWARD_AND_BACKWARD = 3  # the backward pass makes two products for each of the forward pass
_GATED: dict[tuple, bool] = {}
_COUNTED: dict[tuple, Sizes] = {}


def config_fields(model: Model, tokens: dict[str, int | None]) -> dict[str, Any]:
    """Return the arguments of the config class of model.type. tokens: vocab_size and the special tokens' ids.

    Sizes that the recipe leaves open are filled: heads of n_embd / n_head, an MLP as default_inner has it, other
    widths in the class's own proportion to hidden_size. An unknown type gets Llama's names.
    """
    given = {ours: getattr(model, ours) for ours in LLAMA_NAMES if getattr(model, ours) is not None}
    config_class = config_class_of(model.type)
    if config_class is None:
        return {**model.options, **{LLAMA_NAMES[ours]: value for ours, value in given.items()}, **tokens}
    known = known_fields(config_class)
    fields = {name: value for name, value in tokens.items() if name in known}
    for ours, value in given.items():
        name = field_name(config_class, ours)
        # A class may bound no positions and have no heads; then the recipe's number has no field, and needs none.
        has_no_use = ours in ("n_positions", "n_head") or (ours == "n_kv_head" and value == model.n_head)
        if name in known or not has_no_use:
            fields[name] = value
    return {**_open_sizes(model, config_class, fields), **PRESETS[model.preset], **model.options, **fields}


def config_class_of(model_type: str) -> Any:
    """Return the config class of a type of transformers, None when there is no such type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    # get() would load all of them.
    return CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else None  # noqa: SIM401


def known_fields(config_class: Any) -> set[str]:
    return {*config_class.__dataclass_fields__, *config_class.attribute_map} - {"model_type"}


def field_name(config_class: Any, ours: str) -> str:
    """Return a class's own name for one of the sizes of `model:`; Llama's where it has none."""
    known = known_fields(config_class)
    return next((name for name in OTHER_NAMES.get(ours, ()) if name in known), LLAMA_NAMES[ours])


def _open_sizes(model: Model, config_class: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return values of the sizes that neither the recipe's sizes (given, by the class's names) nor its options name."""
    defaults, names = _defaults(config_class), config_class.attribute_map
    width, heads = model.n_embd, model.n_head
    if not width or not heads:
        return {}
    named = {**model.options, **given}
    filled: dict[str, Any] = {}
    # Latent attention has widths for parts of a head, and head_dim follows from those.
    if "head_dim" in defaults and "qk_rope_head_dim" not in defaults:
        filled["head_dim"] = width // heads
    if type(defaults.get("rotary_dim")) is int:
        filled["rotary_dim"] = min(defaults["rotary_dim"], named.get("head_dim", width // heads))
    if "is_decoder" in defaults:  # else BERT and its kin would see what they are to predict
        filled["is_decoder"] = True
    class_width = defaults.get("hidden_size", defaults.get(names.get("hidden_size")))
    for name in PROPORTIONAL:
        default = defaults.get(name)
        if type(default) is int and default and type(class_width) is int:
            filled[name] = max(MULTIPLE, round(default * width / class_width / MULTIPLE) * MULTIPLE)
    inner = field_name(config_class, "n_inner")
    class_inner = defaults.get(inner, defaults.get(names.get(inner)))
    if inner not in named and type(class_inner) is int:  # None: the class itself takes 4 x hidden_size
        gated = _is_gated(config_class, {**filled, **named}, inner, mark=4 * width + 24)
        filled[inner] = default_inner(width, gated=gated)
    return {name: value for name, value in filled.items() if name not in named}


def _defaults(config_class: Any) -> dict[str, Any]:
    return {name: field.default for name, field in config_class.__dataclass_fields__.items()}


def _is_gated(config_class: Any, fields: dict[str, Any], inner: str, mark: int) -> bool:
    """Return whether the MLP has a third matrix, read off a model without weights. mark: a width like no other.

    Then three matrices of one module have n_inner on a side, or one has twice n_inner.
    """
    key = (config_class, inner, json.dumps(fields, sort_keys=True, default=str))
    if key not in _GATED:
        import torch
        from transformers import AutoModelForCausalLM

        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config_class(**{**fields, inner: mark}))
        except Exception:  # training and plan build the same and say what is wrong with it
            return False
        sides = Counter[str]()
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and mark in parameter.shape[-2:]:
                sides[name.removesuffix(".weight").rpartition(".")[0]] += 1
            elif parameter.ndim >= 2 and 2 * mark in parameter.shape[-2:]:
                sides[name] += 3
        _GATED[key] = max(sides.values(), default=0) >= 3
    return _GATED[key]


def sizes_of_fields(
    model_type: str, fields: dict[str, Any], row_tokens: int, *, code: CodeFolder | None, where: str
) -> Sizes:
    """Return sizes of the model that training builds from these fields of its config. code: where a type `module:attr`
    may lie, where: the beginning of a message about it.

    Raises SizesUnknownError, and RecipeError for code that may not be run.
    """
    key = (model_type, json.dumps(fields, sort_keys=True, default=str), row_tokens)
    return _counted(key, lambda: _built(model_type, fields, code, where), row_tokens, f"a {model_type} of these sizes")


def sizes_of_config(config: Any, row_tokens: int) -> Sizes:
    """Return sizes of the causal LM of a config of transformers, of its text part where it also reads pictures or
    sound. Raises SizesUnknownError."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = config.get_text_config()
    key = (type(config), config.to_json_string(), row_tokens)
    what = f"a causal language model of type {config.model_type}"
    return _counted(key, lambda: _without_weights(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config), row_tokens, what)


def sizes_of_model(model: Any, row_tokens: int) -> Sizes:
    """Return sizes of a model that has been built. Its parameters are counted on itself, its products on a twin
    without weights."""
    total = sum(p.numel() for p in model.parameters())
    key = (type(model), model.config.to_json_string(), total, row_tokens)
    if key not in _COUNTED:
        try:
            flops = _flops(_without_weights(type(model), model.config), row_tokens)
        except Exception as error:
            flops = (None, None, f"it cannot be built a second time ({_reason(error)})")
        _COUNTED[key] = _count(model, flops, row_tokens)
    return _COUNTED[key]


def _counted(key: tuple, build: Callable[[], Any], row_tokens: int, what: str) -> Sizes:
    if key not in _COUNTED:
        try:
            model = build()
        except RecipeError:
            raise
        except Exception as error:  # of config classes, of layers, of the user's own code
            raise SizesUnknownError(f"{what} cannot be built ({_reason(error)})") from error
        _COUNTED[key] = _count(model, _flops(model, row_tokens), row_tokens)
    return _COUNTED[key]


def _built(model_type: str, fields: dict[str, Any], code: CodeFolder | None, where: str) -> Any:
    if ":" not in model_type:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

        config_class = CONFIG_MAPPING[model_type]
        if unknown := sorted(fields.keys() - known_fields(config_class)):
            raise AttributeError(f"{config_class.__name__} has no field {', '.join(unknown)}")
        return _without_weights(MODEL_FOR_CAUSAL_LM_MAPPING[config_class], config_class(**fields))
    import torch

    target = import_attribute(model_type, code, where=where)
    with guarded(f"{where}: {model_type}"):
        if isinstance(target, type) and hasattr(target, "config_class"):
            return _without_weights(target, target.config_class(**fields))
        with torch.device("meta"):
            return target(**fields)


def _without_weights(model_class: Any, config: Any) -> Any:
    import torch

    with torch.device("meta"):
        return model_class._from_config(copy.deepcopy(config), attn_implementation="eager", dtype=torch.float32)


def _count(model: Any, flops: tuple[float | None, float | None, str | None], row_tokens: int) -> Sizes:
    config = model.config.get_text_config()
    width, heads = _read(config, "hidden_size"), _read(config, "num_attention_heads")
    linear, pair, unknown = flops
    counts, variances = _parameters(model)
    if linear is not None:  # 2 FLOPs a weight in a forward pass
        # Weights that no token of a row passes (other experts, a cross-attention) are not part of what scales.
        counts["scaling"] = min(counts["scaling"], round(linear / 2))
        linear *= FORWARD_AND_BACKWARD
    if pair is not None:
        pair *= FORWARD_AND_BACKWARD
    embedding = model.get_input_embeddings()
    return Sizes(
        model_type=model.config.model_type,
        n_layer=_read(config, "num_hidden_layers"),
        n_embd=width,
        n_head=heads,
        n_kv_head=_read(config, "num_key_value_heads") or heads,
        head_dim=_read(config, "head_dim") or (heads and width // heads),
        vocab_rows=getattr(embedding, "num_embeddings", None) or getattr(config, "vocab_size", None) or 0,
        row_tokens=row_tokens,
        counts=counts,
        table_parameters=counts["embeddings"],
        variances=variances,
        windows=_windows(config, row_tokens),
        linear=linear,
        pair=pair,
        unknown=unknown,
        mixture=_has_experts(model),
    )


def _read(config: Any, name: str) -> int:
    """Return 0 for what a config does not have, or has for each layer on its own."""
    try:
        value = getattr(config, name)
    except Exception:  # the latter has an error of its own
        return 0
    return value if isinstance(value, int) else 0


def _windows(config: Any, row_tokens: int) -> list[int]:
    layers = _read(config, "num_hidden_layers") or 1
    return layer_windows(config.to_dict() | {"n_positions": row_tokens}, layers, row_tokens)


def _parameters(model: Any) -> tuple[dict[str, int], int]:
    """Return counts by role, as Sizes.parameters has them, and the variances of the matrices. What is not trained is
    in the total alone."""
    import torch

    # By identity: a tied head is the same parameter as the table.
    tables = {id(p) for m in model.modules() if isinstance(m, torch.nn.Embedding) for p in m.parameters(recurse=False)}
    head = getattr(model.get_output_embeddings(), "weight", None)
    counts = dict.fromkeys(("embeddings", "value_embeddings", "head", "matrices", "scalars"), 0)
    variances = total = 0
    for parameter in model.parameters():  # a tied one comes once
        total += parameter.numel()
        if not parameter.requires_grad:
            continue
        if id(parameter) in tables:
            role = "embeddings"
        elif parameter is head:
            role = "head"
        elif parameter.ndim >= 2:
            role = "matrices"
            variances += parameter.numel() // min(parameter.shape[-2:])
        else:
            role = "scalars"
        counts[role] += parameter.numel()
    scaling = counts["matrices"]
    if head is not None:  # also a tied one
        scaling += head.numel()
    return {**counts, "total": total, "scaling": scaling}, variances


def _flops(model: Any, row_tokens: int) -> tuple[float | None, float | None, str | None]:
    """Return the FLOPs of a token's linear part and of a query-key pair of one layer, in a forward pass; or why they
    are not known.

    torch counts the products of rows of three lengths: what grows with the square of the length is attention, the rest
    must grow with the length. It does not count element-wise recurrences, so models with a state are left out.
    """
    config = model.config.get_text_config()
    if getattr(model, "_is_stateful", False):
        return None, None, f"a {config.model_type} carries a state along the row, whose FLOPs torch does not count"
    if strange := set(getattr(config, "layer_types", None) or ()) - ATTENTION_KINDS:
        return None, None, f"its layers of {', '.join(sorted(strange))} are not counted"
    if _has_experts(model):
        config._experts_implementation = "batched_mm"  # one product for each expert of a token, whichever it is
    short, middle, whole = max(1, row_tokens // 4), max(2, row_tokens // 2), row_tokens
    try:
        per_token = {length: _forward_flops(model, length) / length for length in (short, middle, whole)}
    except Exception as error:  # a model may look at its input's values, which are none here
        return None, None, f"a forward pass without weights fails ({_reason(error)})"
    # per token: linear + square x length. Two lengths give both, the third checks that nothing else is in it.
    square = (per_token[whole] - per_token[short]) / (whole - short)
    linear = per_token[whole] - square * whole
    if abs(linear + square * middle - per_token[middle]) > 1e-9 * per_token[middle]:
        return None, None, "its FLOPs grow with the row in another way than those of full attention"
    return linear, square / len(_windows(config, row_tokens)), None


def _has_experts(model: Any) -> bool:
    return any(type(module).__name__.endswith("Experts") for module in model.modules())


def _forward_flops(model: Any, length: int) -> int:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    # Without a mask some models look into the positions for packed documents, which the meta device cannot show.
    inputs = {"input_ids": torch.zeros(1, length, dtype=torch.long, device="meta")}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**inputs, use_cache=False)
    return counter.get_total_flops()


def _reason(error: Exception) -> str:
    """Return class and last line of an error: there strict dataclasses say the cause."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1].strip()}"
