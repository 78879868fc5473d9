"""Parameters and FLOPs of a decoder from its sizes: plain arithmetic, exact to the last parameter.

Checked in tests/recipe/test_sizes.py against the models themselves, a count of visible query-key pairs, and the
published numbers of nanochat.
"""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pipeline.recipe.schema import Recipe

Convention = Literal["exact_causal", "nanochat", "full"]

# Inputs of the small gates of nanochat: of a value embedding's gate, and of the smear gate.
VALUE_GATE_CHANNELS = 12
SMEAR_GATE_CHANNELS = 24
# Model types whose MLP is two matrices; the other decoders of transformers have a third, the gate.
PLAIN_MLP = {"tandem", "gpt2", "nanochat", "gpt_neo", "gpt_neox", "gptj", "codegen", "opt", "bloom", "phi", "falcon", "starcoder2", "gpt_bigcode", "mpt", "stablelm_alpha"}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a dense decoder over rows of row_tokens.

    windows: per layer the number of keys that a query sees at most, itself included; row_tokens where attention is full.
    vocab_rows: rows of the embedding (vocab_size rounded up to the model's multiple).
    """

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
    gated_mlp: bool = False
    learned_positions: int = 0
    biases: bool = False
    norm_parameters: int = 0
    value_embedding_layers: int = 0
    residual_lambdas: bool = False
    backout: bool = False
    smear: bool = False

    def parameters(self) -> dict[str, int]:
        """Counts by role. scaling = matrices + head: what nanochat's rules take for the size of a model."""
        width, heads, kv = self.n_embd, self.n_head * self.head_dim, self.n_kv_head * self.head_dim
        attention = width * heads * 2 + width * kv * 2
        mlp = width * self.n_inner * (3 if self.gated_mlp else 2)
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
    def table_parameters(self) -> int:
        """Of the token and the value embeddings, which are looked up and never multiplied; positions are not among them."""
        return self.vocab_rows * (self.n_embd + self.value_embedding_layers * self.n_kv_head * self.head_dim)

    def flops_per_token(self, convention: Convention = "exact_causal") -> float:
        """FLOPs of forward and backward per row position.

        All three count 6 per parameter of a matrix product. exact_causal counts each visible query-key pair once,
        windows included. nanochat counts min(window, row) keys for every query. full counts every pair of the row, as
        eager attention computes them. Left out by all: norms, softmax, rotary turns, the optimizer.
        """
        pair = 12 * self.n_head * self.head_dim
        keys = {
            "exact_causal": self._mean_visible_keys,
            "nanochat": self._nanochat_keys,
            "full": lambda _: self.row_tokens,
        }[convention]
        linear = self.parameters()["scaling"] + SMEAR_GATE_CHANNELS * self.smear
        return 6 * linear + pair * sum(keys(window) for window in self.windows)

    def _mean_visible_keys(self, window: int) -> float:
        rows, window = self.row_tokens, min(window, self.row_tokens)
        return (window * (window + 1) / 2 + (rows - window) * window) / rows

    def _nanochat_keys(self, window: int) -> int:
        # A query of nanochat's window w sees w + 1 keys, and its formula counts w.
        return window - 1 if window < self.row_tokens else self.row_tokens


def sizes_of(recipe: "Recipe", vocab_size: int | None = None) -> Sizes:
    """Sizes of the recipe's model. Raises ValueError when layers, width, heads or the vocabulary are not known yet."""
    from pipeline.recipe.presets import options_of

    model = recipe.model
    vocab_size = vocab_size or recipe.tokenizer.vocab_size
    missing = [f"model.{name}" for name in ("n_layer", "n_embd", "n_head") if getattr(model, name) is None]
    missing += ["tokenizer.vocab_size"] if vocab_size is None else []
    if missing:
        raise ValueError(f"{', '.join(missing)} not known")
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
    return _sizes(options, options.get("model_type", model.type), recipe.data.row_tokens)


def sizes_from_config(config: Any, row_tokens: int) -> Sizes:
    """Sizes of any dense decoder from its transformers config."""
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


def _sizes(options: dict[str, Any], model_type: str, row_tokens: int) -> Sizes:
    layers, width, heads = options["n_layer"], options["n_embd"], options["n_head"]
    gpt2_like = model_type in ("tandem", "gpt2")
    multiple = options.get("vocab_multiple") or 1
    vocab = options["vocab_size"]
    norm = (
        {"layer_norm": 2, "rms_norm": 0}[options.get("normalization") or "layer_norm"]
        if gpt2_like
        else 0
        if model_type == "nanochat"
        else 1
    )
    return Sizes(
        n_layer=layers,
        n_embd=width,
        n_head=heads,
        n_kv_head=options.get("n_kv_head") or heads,
        head_dim=options.get("head_dim") or width // heads,
        n_inner=options.get("n_inner") or 4 * width,
        vocab_size=vocab,
        vocab_rows=math.ceil(vocab / multiple) * multiple,
        row_tokens=row_tokens,
        windows=_windows(options, layers, row_tokens),
        tied=options.get("tie_word_embeddings", gpt2_like),
        gated_mlp=model_type not in PLAIN_MLP,
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


def _windows(options: dict[str, Any], layers: int, row_tokens: int) -> list[int]:
    """Keys seen per layer, the query itself included, as transformers counts sliding_window."""
    window = options.get("sliding_window")
    if pattern := options.get("window_pattern"):
        window = window or short_window(options["n_positions"])
        sliding = [pattern[i % len(pattern)] == "S" for i in range(layers - 1)] + [False]
    elif kinds := options.get("layer_types"):
        sliding = ["sliding" in kind for kind in kinds]
    else:
        sliding = [bool(window)] * layers
    return [min(window, row_tokens) if slides and window else row_tokens for slides in sliding]


def short_window(n_positions: int) -> int:
    """Tandem's default window: a query, and before it a quarter of the longest sequence rounded up to 128."""
    return math.ceil(n_positions / 4 / 128) * 128 + 1
