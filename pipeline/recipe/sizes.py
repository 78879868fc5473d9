"""Sizes of a model by counting: presets, transformers' own types, parameters and FLOPs."""

import copy
import json
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from pipeline.process.errors import RecipeError
from pipeline.process.user_code import CodeFolder, guarded, import_attribute
from pipeline.recipe.schema import Recipe

# The recipe's sizes as fields of a config class of transformers, and what stands there for the sizes that it leaves
# open.

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
    return {**_open_sizes(recipe, config_class, fields), **options_of(recipe), **fields}


def config_class_of(model_type: str) -> Any:
    """Return the config class of a type of transformers, None when there is no such type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else None  # noqa: SIM401 - its get() is no lazy one


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


# The model's config fields out of a recipe: a preset, the sizes, and single options over them.

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
# Of preset modern_bigram: rows of its table for an id of the vocabulary. What they bring: docs/log.md, 2026-11-25.
BIGRAMS_PER_ID = 16
# Fields of Qwen3Config. Nothing of it is ours: transformers, llama.cpp, Ollama, vLLM, SGLang and MLX have the architecture.
PORTABLE_TYPE = "qwen3"
PORTABLE_PATTERNS = ("qwen2", "llama3", "gpt2")  # that llama.cpp knows; first how models of that type cut text
PORTABLE: dict[str, Any] = {"tie_word_embeddings": False}
PRESETS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "modern": MODERN,
    "modern_bigram": MODERN,
    "portable": PORTABLE,
}

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
    "bigram_embeddings": int | None,
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


def options_of(recipe: Recipe, *, vocab_size: int | None = None) -> dict[str, Any]:
    """Return the preset's options, those that follow from the vocabulary where its size is given, with the recipe's own over them."""
    grown = {}
    if recipe.model.preset == "modern_bigram" and vocab_size is not None:
        grown["bigram_embeddings"] = BIGRAMS_PER_ID * vocab_size
    return {**PRESETS[recipe.model.preset], **grown, **recipe.model.options}


def model_fields(
    recipe: Recipe, *, vocab_size: int, bos_token_id: int | None, eos_token_id: int | None, pad_token_id: int | None
) -> dict[str, Any]:
    """Arguments of the config class of model.type, in its own names."""
    model = recipe.model
    ids = {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id, "pad_token_id": pad_token_id}
    if model.type not in GPT2_NAMES and ":" not in model.type:
        return config_fields(recipe, {"vocab_size": vocab_size, **ids})
    sizes = {name: getattr(model, name) for name in LLAMA_NAMES if getattr(model, name) is not None}
    if model.type == "gpt2":
        sizes.pop("n_kv_head", None)
    return {**options_of(recipe, vocab_size=vocab_size), **sizes, "vocab_size": vocab_size, **ids}


# Parameters and FLOPs of a model: of Tandem and GPT-2 by plain arithmetic without torch, exact to the last parameter.

Convention = Literal["exact_causal", "nanochat", "full"]

# Inputs of the small gates of nanochat: of a value embedding's gate, and of the smear gate.
VALUE_GATE_CHANNELS = 12
SMEAR_GATE_CHANNELS = 24
# Model types whose sizes are arithmetic on their config. nanochat trains as a Tandem.
BY_ARITHMETIC = ("tandem", "gpt2", "nanochat")


def mean_visible_keys(window: int, rows: int) -> float:
    """Keys that a query of a row sees in the mean, itself included, when it sees `window` of them at most."""
    window = min(window, rows)
    return (window * (window + 1) / 2 + (rows - window) * window) / rows


KeysSeen = Callable[[int, int], float]
# Keys counted for a query, by (window, rows). A query of nanochat's window w sees w + 1 keys, and its formula counts w.
KEYS_SEEN: dict[str, KeysSeen] = {
    "exact_causal": mean_visible_keys,
    "nanochat": lambda window, rows: window - 1 if window < rows else rows,
    "full": lambda window, rows: rows,
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of Tandem, GPT-2 or nanochat over rows of row_tokens.

    windows: per layer the number of keys that a query sees at most, itself included; row_tokens where attention is full.
    vocab_rows: rows of the embedding (vocab_size rounded up to the model's multiple).
    """

    model_type: str = "tandem"
    n_layer: int
    n_embd: int
    n_head: int
    n_kv_head: int
    head_dim: int
    n_inner: int
    vocab_size: int
    vocab_rows: int
    row_tokens: int
    windows: list[int] = field(default_factory=list)
    tied: bool = False
    learned_positions: int = 0
    biases: bool = False
    norm_parameters: int = 0
    value_embedding_layers: int = 0
    residual_lambdas: bool = False
    backout: bool = False
    smear: bool = False
    bigram_embeddings: int = 0
    unknown: str | None = None  # as of CountedSizes: here all is known

    def parameters(self) -> dict[str, int]:
        """Return counts by role. scaling = matrices + head: what nanochat's rules take for the size of a model."""
        width, heads, kv = self.n_embd, self.n_head * self.head_dim, self.n_kv_head * self.head_dim
        attention = width * heads * 2 + width * kv * 2
        mlp = 2 * width * self.n_inner
        gates = self.value_embedding_layers * VALUE_GATE_CHANNELS * self.n_kv_head
        matrices = self.n_layer * (attention + mlp) + gates
        biases = self.n_layer * (heads + 2 * kv + width + self.n_inner + width) if self.biases else 0
        norms = self.norm_parameters * (2 * self.n_layer + 1) * width
        extras = 2 * self.n_layer * self.residual_lambdas + self.backout + (SMEAR_GATE_CHANNELS + 1) * self.smear
        extras += self.n_layer * bool(self.bigram_embeddings)
        head = self.vocab_rows * width
        counts = {
            "embeddings": (self.vocab_rows + self.bigram_embeddings + self.learned_positions) * width,
            "value_embeddings": self.value_embedding_layers * self.vocab_rows * kv,
            "head": 0 if self.tied else head,
            "matrices": matrices,
            "scalars": biases + norms + extras,
        }
        return {**counts, "total": sum(counts.values()), "scaling": matrices + head}

    @property
    def scaling(self) -> int:
        return self.parameters()["scaling"]

    @property
    def table_parameters(self) -> int:
        """Return those of the token, bigram and value embeddings, which are looked up and never multiplied; positions are not among them."""
        values = self.value_embedding_layers * self.n_kv_head * self.head_dim
        return self.vocab_rows * (self.n_embd + values) + self.bigram_embeddings * self.n_embd

    @property
    def variances(self) -> int:
        """NorMuon's second state: a row or column of each matrix of the blocks."""
        return self.n_layer * (4 * max(self.n_embd, self.n_head * self.head_dim) + 2 * self.n_inner)

    def flops_per_token(self, convention: Convention = "exact_causal", *, seen: KeysSeen | None = None) -> float:
        """FLOPs of forward and backward per row position.

        All three count 6 per parameter of a matrix product. exact_causal counts each visible query-key pair once,
        windows included. nanochat counts min(window, row) keys for every query. full counts every pair of the row, as
        eager attention computes them. Left out by all: norms, softmax, rotary turns, the optimizer. seen: mean keys of a
        query instead, as counted in rows whose documents are isolated.
        """
        pair = 12 * self.n_head * self.head_dim
        seen = seen or KEYS_SEEN[convention]
        linear = self.parameters()["scaling"] + SMEAR_GATE_CHANNELS * self.smear
        return 6 * linear + pair * sum(seen(window, self.row_tokens) for window in self.windows)


def sizes_of(recipe: Recipe, vocab_size: int | None = None) -> "Sizes | CountedSizes":
    """Return sizes of the recipe's model. Imports torch for a type of transformers or of the user's own.

    Raises ValueError when layers, width, heads or the vocabulary are not known yet, or the model cannot be built of them.
    """
    model = recipe.model
    vocab_size = vocab_size or recipe.tokenizer.vocab_size
    missing = [f"model.{name}" for name in ("n_layer", "n_embd", "n_head") if getattr(model, name) is None]
    missing += ["tokenizer.vocab_size"] if vocab_size is None else []
    if missing:
        raise ValueError(f"{', '.join(missing)} not known")
    assert vocab_size is not None
    model_type = (model.start_config or {}).get("model_type", model.type)
    if model_type not in BY_ARITHMETIC or (model_type == "nanochat" and model.start_config is None):
        return _counted(recipe, vocab_size)
    options = {
        **(model.start_config or options_of(recipe, vocab_size=vocab_size)),
        **{name: getattr(model, name) for name in LLAMA_NAMES},
        "n_positions": model.n_positions or recipe.data.row_tokens,
        "vocab_size": vocab_size,
    }
    return _sizes(options, model_type, recipe.data.row_tokens)


def _counted(recipe: Recipe, vocab_size: int) -> "CountedSizes":
    model, rows = recipe.model, recipe.data.row_tokens
    if model.start_config is not None:
        from transformers import AutoConfig

        given = {name: value for name, value in model.start_config.items() if name != "model_type"}
        return sizes_of_config(AutoConfig.for_model(model.start_config["model_type"], **given), rows)
    fields = model_fields(recipe, vocab_size=vocab_size, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    return sizes_of_fields(model.type, fields, rows, code=recipe.code, where=recipe.where("model.type"))


def sizes_from_config(config: Any, row_tokens: int) -> "Sizes | CountedSizes":
    """Return sizes of the causal language model of a transformers config. Raises ValueError when none can be built of it."""
    if config.model_type not in BY_ARITHMETIC:
        return sizes_of_config(config, row_tokens)
    sizes = {ours: getattr(config, ours, getattr(config, theirs, None)) for ours, theirs in LLAMA_NAMES.items()}
    return _sizes(vars(config) | sizes, config.model_type, row_tokens)


def sizes_from_model(model: Any, row_tokens: int) -> "Sizes | CountedSizes":
    """Return sizes of a model that has been built."""
    model = getattr(model, "_orig_mod", model)  # as torch.compile wraps it
    if model.config.model_type in BY_ARITHMETIC:
        return sizes_from_config(model.config, row_tokens)
    return sizes_of_model(model, row_tokens)


def _sizes(options: dict[str, Any], model_type: str, row_tokens: int) -> Sizes:
    layers, width, heads = options["n_layer"], options["n_embd"], options["n_head"]
    gpt2_like = model_type in ("tandem", "gpt2")
    learned = gpt2_like and options.get("position_embedding", "learned") == "learned"
    multiple = options.get("vocab_multiple") or 1
    vocab = options["vocab_size"]
    norm = {"layer_norm": 2, "rms_norm": 0}[options.get("normalization") or "layer_norm"] if gpt2_like else 0
    return Sizes(
        model_type=model_type,
        n_layer=layers,
        n_embd=width,
        n_head=heads,
        n_kv_head=options.get("n_kv_head") or heads,
        head_dim=options.get("head_dim") or width // heads,
        n_inner=options.get("n_inner") or default_inner(width, gated=False),
        vocab_size=vocab,
        vocab_rows=math.ceil(vocab / multiple) * multiple,
        row_tokens=row_tokens,
        windows=layer_windows(options, layers, row_tokens),
        tied=options.get("tie_word_embeddings", gpt2_like),
        learned_positions=options["n_positions"] if learned else 0,
        biases=gpt2_like and options.get("use_bias", True),
        norm_parameters=norm,
        value_embedding_layers=(layers + 1) // 2 if options.get("value_embeddings") else 0,
        residual_lambdas=bool(options.get("residual_lambdas")),
        backout=bool(options.get("backout")),
        smear=bool(options.get("smear")),
        bigram_embeddings=options.get("bigram_embeddings") or 0,
    )


def layer_windows(options: dict[str, Any], layers: int, row_tokens: int) -> list[int]:
    """Keys seen per layer, the query itself included, as transformers counts sliding_window. options: as a config names them."""
    window = options.get("sliding_window")
    if pattern := options.get("window_pattern"):
        window = window or short_window(options["n_positions"])
        sliding = [pattern[i % len(pattern)] == "S" for i in range(layers - 1)] + [False]
    elif kinds := options.get("layer_types"):
        sliding = ["sliding" in kind for kind in kinds]
    elif kinds := options.get("attention_layers"):  # GPT-Neo's
        window, sliding = options.get("window_size"), [kind == "local" for kind in kinds]
    else:
        sliding = [bool(window)] * layers
    return [min(window, row_tokens) if slides and window else row_tokens for slides in sliding]


def short_window(n_positions: int) -> int:
    """Tandem's default window: a query, and before it a quarter of the longest sequence rounded up to 128."""
    return math.ceil(n_positions / 4 / 128) * 128 + 1


# Sizes of any other model: it is built without weights, its parameters and the products of a forward pass are
# counted.

# What a layer may do with the keys of its row, as config.layer_types names it; of others the products say too little.
ATTENTION_KINDS = {"full_attention", "sliding_attention", "chunked_attention", "global", "local"}
FORWARD_AND_BACKWARD = 3  # the backward pass makes two products for each of the forward pass
_CACHE: dict[tuple, "CountedSizes"] = {}


class SizesUnknownError(ValueError):
    """The model cannot be built without weights, for the reason in the message."""


@dataclass(frozen=True, kw_only=True)
class CountedSizes:
    """Sizes of a model over rows of row_tokens, counted on its modules; the same questions as of Sizes.

    counts: parameters by role. linear: FLOPs of a token's matrix products in a forward pass, pairs: (FLOPs of a visible
    query-key pair, window) of each attention layer; None where they are not known, for the reason in `unknown`. Heads are 0
    where there are none.
    variances: rows or columns of all matrices, NorMuon's second state.
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
        """parameters()["scaling"]; None for a mixture of experts where it is not known which of them a token passes."""
        return None if self.mixture and self.linear is None else self.counts["scaling"]

    def parameters(self) -> dict[str, int]:
        """Return counts by role; scaling: matrices that a token passes, of a mixture the experts that it is sent to, and the head."""
        return dict(self.counts)

    @property
    def windows(self) -> list[int]:
        return [window for _, window in self.pairs] or [self.row_tokens]

    @property
    def table_parameters(self) -> int:
        return self.counts["embeddings"]

    def flops_per_token(self, convention: Convention = "exact_causal", *, seen: KeysSeen | None = None) -> float | None:
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
    """Return sizes of the model that training builds from these fields of its config. code: where a type `module:attr` may lie, where: the beginning of a message about it.

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
    """Return sizes of a model that has been built. Its parameters are counted on itself, its products on a twin without weights."""
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
    """Return sizes of the causal LM of a config of transformers. Raises SizesUnknownError."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    key = (type(config), config.to_json_string(), row_tokens)
    if key not in _CACHE:
        try:
            model = _without_weights(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)
        except Exception as error:
            raise SizesUnknownError(
                f"no causal language model of type {config.model_type} can be built ({type(error).__name__}: {_line(error)})"
            ) from error
        _CACHE[key] = _count(model, model, row_tokens)
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
    """Return counts by role, as Sizes.parameters has them, and the variances of the matrices."""
    import torch

    tables = {id(p) for m in model.modules() if isinstance(m, torch.nn.Embedding) for p in m.parameters(recurse=False)}
    output = model.get_output_embeddings()
    head = getattr(output, "weight", None)
    counts = dict.fromkeys(("embeddings", "value_embeddings", "head", "matrices", "scalars"), 0)
    variances = 0
    for parameter in model.parameters():  # a tied one comes once
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
    total = sum(counts.values())
    return {**counts, "total": total, "scaling": counts["matrices"] + (0 if head is None else head.numel())}, variances


def _products(model: Any, row_tokens: int) -> tuple[float | None, list[tuple[float, int]], str | None]:
    """FLOPs of a token's linear part and of each attention layer's pairs in a forward pass; or None, and why.

    torch counts the products of rows of a quarter, a half and a whole row: what grows with the square of the length is
    attention, and nothing may grow otherwise. It does not count element-wise recurrences, so models with a state are left out.
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
    deepest = {name: pair for name, pair in pairs.items() if pair > 1e-6 and not any(n.startswith(f"{name}.") and pairs[n] > 1e-6 for n in names)}  # fmt: skip
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
    # Without a mask some models look into the positions for packed documents, which the meta device cannot show, and with a
    # plain one a few look for padding.
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
