"""Parameters and FLOPs of a model: of Tandem and GPT-2 by plain arithmetic without torch, exact to the last parameter.

Checked in tests/recipe/test_sizes.py against the models themselves, a count of visible query-key pairs, and the
published numbers of nanochat. All other models are counted on their modules (counted_sizes.py).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pipeline.recipe.presets import default_inner, model_fields, options_of

if TYPE_CHECKING:
    from pipeline.recipe.counted_sizes import CountedSizes
    from pipeline.recipe.schema import Recipe

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
    unknown: str | None = None  # as of CountedSizes: here all is known

    def parameters(self) -> dict[str, int]:
        """Counts by role. scaling = matrices + head: what nanochat's rules take for the size of a model."""
        width, heads, kv = self.n_embd, self.n_head * self.head_dim, self.n_kv_head * self.head_dim
        attention = width * heads * 2 + width * kv * 2
        mlp = 2 * width * self.n_inner
        gates = self.value_embedding_layers * VALUE_GATE_CHANNELS * self.n_kv_head
        matrices = self.n_layer * (attention + mlp) + gates
        biases = self.n_layer * (heads + 2 * kv + width + self.n_inner + width) if self.biases else 0
        norms = self.norm_parameters * (2 * self.n_layer + 1) * width
        extras = 2 * self.n_layer * self.residual_lambdas + self.backout + (SMEAR_GATE_CHANNELS + 1) * self.smear
        head = self.vocab_rows * width
        counts = {
            "embeddings": self.vocab_rows * width + self.learned_positions * width,
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
        """Of the token and the value embeddings, which are looked up and never multiplied; positions are not among them."""
        return self.vocab_rows * (self.n_embd + self.value_embedding_layers * self.n_kv_head * self.head_dim)

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


def sizes_of(recipe: "Recipe", vocab_size: int | None = None) -> "Sizes | CountedSizes":
    """Sizes of the recipe's model. Imports torch for a type of transformers or of the user's own.

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
        **(model.start_config or options_of(recipe)),
        "n_layer": model.n_layer,
        "n_embd": model.n_embd,
        "n_head": model.n_head,
        "n_kv_head": model.n_kv_head,
        "n_inner": model.n_inner,
        "n_positions": model.n_positions or recipe.data.row_tokens,
        "vocab_size": vocab_size,
    }
    return _sizes(options, model_type, recipe.data.row_tokens)


def _counted(recipe: "Recipe", vocab_size: int) -> "CountedSizes":
    from pipeline.recipe.counted_sizes import sizes_of_config, sizes_of_fields

    model, rows = recipe.model, recipe.data.row_tokens
    if model.start_config is not None:
        from transformers import AutoConfig

        given = {name: value for name, value in model.start_config.items() if name != "model_type"}
        return sizes_of_config(AutoConfig.for_model(model.start_config["model_type"], **given), rows)
    fields = model_fields(recipe, vocab_size=vocab_size, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    return sizes_of_fields(model.type, fields, rows, code=recipe.code, where=recipe.where("model.type"))


def sizes_from_config(config: Any, row_tokens: int) -> "Sizes | CountedSizes":
    """Sizes of the causal language model of a transformers config. Raises ValueError when none can be built of it."""
    if config.model_type not in BY_ARITHMETIC:
        from pipeline.recipe.counted_sizes import sizes_of_config

        return sizes_of_config(config, row_tokens)
    names = {
        "n_layer": "num_hidden_layers",
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
    }
    options = {f: getattr(config, f) for f in vars(config)} | {
        ours: getattr(config, theirs) for ours, theirs in names.items()
    }
    options.setdefault("n_kv_head", getattr(config, "num_key_value_heads", None))
    options.setdefault("n_inner", getattr(config, "intermediate_size", None))
    return _sizes(options, config.model_type, row_tokens)


def sizes_from_model(model: Any, row_tokens: int) -> "Sizes | CountedSizes":
    """Sizes of a model that has been built."""
    model = getattr(model, "_orig_mod", model)  # as torch.compile wraps it
    if model.config.model_type in BY_ARITHMETIC:
        return sizes_from_config(model.config, row_tokens)
    from pipeline.recipe.counted_sizes import sizes_of_model

    return sizes_of_model(model, row_tokens)


def _sizes(options: dict[str, Any], model_type: str, row_tokens: int) -> Sizes:
    layers, width, heads = options["n_layer"], options["n_embd"], options["n_head"]
    gpt2_like = model_type in ("tandem", "gpt2")
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
        learned_positions=options["n_positions"]
        if gpt2_like and options.get("position_embedding", "learned") == "learned"
        else 0,
        biases=gpt2_like and options.get("use_bias", True),
        norm_parameters=norm,
        value_embedding_layers=(layers + 1) // 2 if options.get("value_embeddings") else 0,
        residual_lambdas=bool(options.get("residual_lambdas")),
        backout=bool(options.get("backout")),
        smear=bool(options.get("smear")),
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
