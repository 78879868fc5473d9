"""Sizes of models of transformers' own types and of the user's, counted on a model that is built without weights.

Loaded where model.type, or the model to start from, is such a one; of Tandem and GPT-2 recipe/sizes.py is arithmetic.
"""

import copy
import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from pipeline.process.errors import RecipeError
from pipeline.process.user_code import CodeFolder, guarded, import_attribute
from pipeline.recipe.schema import Recipe
from pipeline.recipe.sizes import (
    KEYS_SEEN,
    LLAMA_NAMES,
    Convention,
    KeysSeen,
    SizesUnknownError,
    default_inner,
    layer_windows,
    options_of,
)

# The recipe's sizes as fields of a config class of transformers, and what stands there for the sizes that it leaves
# open.

# Other names of the sizes, by the one that most classes know (as a field, or translated by attribute_map); the first
# that a class has is used. An encoder-decoder's causal LM is its decoder.
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

    The recipe's own sizes and options, and for sizes that neither names: heads of n_embd / n_head, an MLP as
    default_inner has it, other widths in the class's own proportion to hidden_size. An unknown type has the common
    names.
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
    return {**_open_sizes(recipe, config_class, fields), **options_of(recipe), **fields}


def config_class_of(model_type: str) -> Any:
    """Return the config class of a type of transformers, None when there is no such type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    # Not get(), which loads all of them.
    return CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else None  # noqa: SIM401


def known_fields(config_class: Any) -> set[str]:
    return {*config_class.__dataclass_fields__, *config_class.attribute_map} - {"model_type"}


def field_name(config_class: Any, ours: str) -> str:
    """Return a class's own name for one of the sizes of `model:`; Llama's where it has none."""
    known = known_fields(config_class)
    return next((name for name in OTHER_NAMES.get(ours, ()) if name in known), LLAMA_NAMES[ours])


def chosen_sizes(recipe: Recipe) -> dict[str, Any]:
    """Return the config's sizes that the recipe leaves open, as they are filled for a type of transformers."""
    model = recipe.model
    config_class = None if model.start_from or ":" in model.type else config_class_of(model.type)
    if config_class is None or model.type in ("tandem", "gpt2") or not (model.n_embd and model.n_head):
        return {}
    given = {field_name(config_class, ours): getattr(model, ours) for ours in LLAMA_NAMES if getattr(model, ours)}
    given["vocab_size"] = recipe.tokenizer.vocab_size or 512
    chosen = _open_sizes(recipe, config_class, given)
    experts = {n: v for n, v in _defaults(config_class).items() if "expert" in n and type(v) is int and v}
    return chosen | {n: v for n, v in experts.items() if n not in chosen and n not in model.options}


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

    Two matrices of one module, or one of twice the width, end in n_inner, and one begins with it."""
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
        matrices = [(name, p.shape[-2:]) for name, p in model.named_parameters() if p.ndim >= 2]
        ends = Counter(name.removesuffix(".weight").rpartition(".")[0] for name, shape in matrices if mark in shape)
        _gated[key] = max(ends.values(), default=0) >= 3 or any(2 * mark in shape for _, shape in matrices)
    return _gated[key]


# Sizes of any other model: it is built without weights, its parameters and the products of a forward pass are
# counted.

# What a layer may do with the keys of its row, as config.layer_types names it; of others the products say too little.
ATTENTION_KINDS = {"full_attention", "sliding_attention", "chunked_attention", "global", "local"}
FORWARD_AND_BACKWARD = 3  # the backward pass makes two products for each of the forward pass
_CACHE: dict[tuple, "CountedSizes"] = {}


@dataclass(frozen=True, kw_only=True)
class CountedSizes:
    """Sizes of a model over rows of row_tokens, counted on its modules; the same questions as of Sizes.

    counts: parameters by role. linear: FLOPs of a token's matrix products in a forward pass, pairs: (FLOPs of a
    visible query-key pair, window) of each attention layer; None where they are not known, for the reason in
    `unknown`. Heads are 0 where there are none. variances: rows or columns of all matrices, NorMuon's second state.
    """

    model_type: str
    n_layer: int
    n_embd: int
    n_head: int
    n_kv_head: int
    head_dim: int
    vocab_rows: int
    row_tokens: int
    counts: dict[str, int]
    variances: int
    linear: float | None
    pairs: list[tuple[float, int]]
    unknown: str | None = None
    mixture: bool = False

    @property
    def scaling(self) -> int | None:
        """parameters()["scaling"]; None for a mixture of experts where it is not known which of them a token
        passes."""
        return None if self.mixture and self.linear is None else self.counts["scaling"]

    def parameters(self) -> dict[str, int]:
        """Return counts by role; scaling: matrices that a token passes, of a mixture the experts that it is sent to,
        and the head."""
        return dict(self.counts)

    @property
    def windows(self) -> list[int]:
        return [window for _, window in self.pairs] or [self.row_tokens]

    @property
    def table_parameters(self) -> int:
        return self.counts["embeddings"]

    def flops_per_token(
        self, convention: Convention = "exact_causal", *, seen: KeysSeen | None = None
    ) -> float | None:
        """Return the FLOPs of forward and backward per row position, as Sizes does; None where they are not known."""
        if self.linear is None:
            return None
        seen = seen or KEYS_SEEN[convention]
        return FORWARD_AND_BACKWARD * (
            self.linear + sum(pair * seen(window, self.row_tokens) for pair, window in self.pairs)
        )


def sizes_of_fields(
    model_type: str,
    fields: dict[str, Any],
    row_tokens: int,
    *,
    code: CodeFolder | None = None,
    where: str = "model.type",
) -> CountedSizes:
    """Return sizes of the model that training builds from these fields of its config. code: where a type `module:attr`
    may lie, where: the beginning of a message about it.

    Raises SizesUnknownError, and RecipeError for code that may not be run.
    """
    key = (model_type, json.dumps(fields, sort_keys=True, default=str), row_tokens)
    if key not in _CACHE:
        try:
            model = _built(model_type, fields, code, where)
        except RecipeError:
            raise
        except Exception as error:  # of config classes, of layers, of the user's own code
            raise SizesUnknownError(
                f"a {model_type} cannot be built of these sizes ({type(error).__name__}: {_line(error)})"
            ) from error
        _CACHE[key] = _count(model, model, row_tokens)
    return _CACHE[key]


def sizes_of_model(model: Any, row_tokens: int) -> CountedSizes:
    """Return sizes of a model that has been built. Its parameters are counted on itself, its products on a twin
    without weights."""
    total = sum(p.numel() for p in model.parameters())
    key = (type(model), model.config.to_json_string(), total, row_tokens)
    if key not in _CACHE:
        try:
            twin: Any = _without_weights(type(model), model.config)
        except Exception as error:
            twin = f"it cannot be built a second time ({type(error).__name__}: {_line(error)})"
        _CACHE[key] = _count(model, twin, row_tokens)
    return _CACHE[key]


def sizes_of_config(config: Any, row_tokens: int) -> CountedSizes:
    """Return sizes of the causal LM of a config of transformers. Raises SizesUnknownError.

    Of a model that also reads pictures or sound they are those of its text part; all parameters are in the total
    alone.
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        MODEL_FOR_MULTIMODAL_LM_MAPPING,
    )

    whole, config = config, config.get_text_config()
    key = (type(whole), whole.to_json_string(), row_tokens)
    if key not in _CACHE:
        others = 0
        try:
            model = _without_weights(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)
            for mapping in (MODEL_FOR_MULTIMODAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
                if whole is not config and type(whole) in mapping:
                    others = _without_weights(mapping[type(whole)], whole).num_parameters() - model.num_parameters()
        except Exception as error:
            raise SizesUnknownError(
                f"no causal language model of type {config.model_type} can be built ({type(error).__name__}: "
                f"{_line(error)})"
            ) from error
        _CACHE[key] = _count(model, model, row_tokens)
        _CACHE[key].counts["total"] += others
    return _CACHE[key]


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

    config = copy.deepcopy(config)
    with torch.device("meta"):
        return model_class._from_config(config, attn_implementation="eager", dtype=torch.float32)


def _count(model: Any, twin: Any, row_tokens: int) -> CountedSizes:
    """twin: the model without weights, or why there is none."""
    config = model.config.get_text_config()
    width, heads = _read(config, "hidden_size"), _read(config, "num_attention_heads")
    counts, variances = _parameters(model)
    linear, pairs, unknown = (None, [], twin) if isinstance(twin, str) else _products(twin, row_tokens)
    if linear is not None:
        # Weights that no token of a row passes (other experts, a cross-attention) are not part of what scales.
        counts["scaling"] = min(counts["scaling"], round(linear / 2))
    embedding = model.get_input_embeddings()
    return CountedSizes(
        model_type=model.config.model_type,
        n_layer=_read(config, "num_hidden_layers"),
        n_embd=width,
        n_head=heads,
        n_kv_head=_read(config, "num_key_value_heads") or heads,
        head_dim=_read(config, "head_dim") or (width // heads if heads else 0),
        vocab_rows=getattr(embedding, "num_embeddings", None) or getattr(config, "vocab_size", None) or 0,
        row_tokens=row_tokens,
        counts=counts,
        variances=variances,
        linear=linear,
        pairs=pairs,
        unknown=unknown,
        mixture=_has_experts(model),
    )


def _parameters(model: Any) -> tuple[dict[str, int], int]:
    """Return counts by role, as Sizes.parameters has them, and the variances of the matrices. What is not trained is
    in the total alone."""
    import torch

    tables = {id(p) for m in model.modules() if isinstance(m, torch.nn.Embedding) for p in m.parameters(recurse=False)}
    output = model.get_output_embeddings()
    head = getattr(output, "weight", None)
    counts = dict.fromkeys(("embeddings", "value_embeddings", "head", "matrices", "scalars"), 0)
    variances = frozen = 0
    for parameter in model.parameters():  # a tied one comes once
        if not parameter.requires_grad:
            frozen += parameter.numel()
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
    total = sum(counts.values()) + frozen
    return {**counts, "total": total, "scaling": counts["matrices"] + (0 if head is None else head.numel())}, variances


def _products(model: Any, row_tokens: int) -> tuple[float | None, list[tuple[float, int]], str | None]:
    """FLOPs of a token's linear part and of each attention layer's pairs in a forward pass; or None, and why.

    torch counts the products of rows of a quarter, a half and a whole row: what grows with the square of the length is
    attention, and nothing may grow otherwise. It does not count element-wise recurrences, so models with a state are
    left out.
    """
    if getattr(model, "_is_stateful", False):
        return None, [], f"a {model.config.model_type} carries a state along the row, whose FLOPs torch does not count"
    config = model.config.get_text_config()
    if strange := set(getattr(config, "layer_types", None) or ()) - ATTENTION_KINDS:
        return None, [], f"its layers of {', '.join(sorted(strange))} are not counted"
    if _has_experts(model):
        config._experts_implementation = "batched_mm"  # one product for each expert of a token, whichever it is
    lengths = [max(1, row_tokens // 4), max(2, row_tokens // 2), row_tokens]
    try:
        counts = [_forward_flops(model, length) for length in lengths]
    except Exception as error:  # a model may look at its input's values, which are none here
        return None, [], f"a forward pass without weights fails ({type(error).__name__}: {_line(error)})"
    pairs, names = {}, [name for name in counts[-1] if name != "Global"]
    for name in names:
        pairs[name] = _square(lengths, [count.get(name, 0) for count in counts])
    whole = [count["Global"] for count in counts]
    square = _square(lengths, whole)
    linear = whole[-1] / lengths[-1] - square * lengths[-1]
    middle = linear * lengths[1] + square * lengths[1] ** 2
    if abs(middle - whole[1]) > 1e-9 * whole[1]:
        return None, [], "its FLOPs grow with the row in another way than those of full attention"
    deepest = {
        name: pair
        for name, pair in pairs.items()
        if pair > 1e-6 and not any(n.startswith(f"{name}.") and pairs[n] > 1e-6 for n in names)
    }
    windows = layer_windows(
        config.to_dict() | {"n_positions": row_tokens}, _read(config, "num_hidden_layers") or 1, row_tokens
    )
    found = [(pair, windows[min(_layer(name), len(windows) - 1)]) for name, pair in deepest.items()]
    if abs(sum(pair for pair, _ in found) - square) > 1e-6 * max(square, 1):
        return None, [], "which of its modules attend is not known"
    return linear, found, None


def _read(config: Any, name: str) -> int:
    """0 for what a config does not have, or has for each layer on its own."""
    try:
        value = getattr(config, name)
    except Exception:  # the latter has an error of its own
        return 0
    return value if isinstance(value, int) else 0


def _square(lengths: list[int], flops: list[int]) -> float:
    """Return the factor of the square of the length."""
    first, last = flops[0] / lengths[0], flops[-1] / lengths[-1]
    return (last - first) / (lengths[-1] - lengths[0])


def _layer(name: str) -> int:
    found = re.search(r"\.(\d+)(\.|$)", name)
    return int(found[1]) if found else 0


def _has_experts(model: Any) -> bool:
    return any(type(module).__name__.endswith("Experts") for module in model.modules())


def _forward_flops(model: Any, length: int) -> dict[str, int]:
    """FLOPs by the dotted name of the module, children included, and "Global"."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    ids = torch.zeros(1, length, dtype=torch.long, device="meta")
    # Without a mask some models look into the positions for packed documents, which the meta device cannot show, and
    # with a plain one a few look for padding.
    masks: tuple[dict, ...] = (
        {},
        {"attention_mask": torch.ones(1, length, dtype=torch.long, device="meta")},
        {"attention_mask": torch.zeros(1, 1, length, length, device="meta")},
    )
    for mask in masks:
        try:
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                model(input_ids=ids, use_cache=False, **mask)
            break
        except Exception:
            if mask is masks[-1]:
                raise
    return {name: sum(flops.values()) for name, flops in counter.flop_counts.items()}


def _line(error: Exception) -> str:
    """Return the end of a message of several lines: where strict dataclasses say the cause."""
    lines = str(error).strip().splitlines() or [""]
    return lines[-1].strip()
