"""Sizes of a model: presets, and parameters and FLOPs by arithmetic."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from pipeline.recipe.schema import Model

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
# Fields of Qwen3Config. Nothing of it is ours: transformers, llama.cpp, Ollama, vLLM, SGLang and MLX have the
# architecture.
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
    name: f"model.{name}"
    for name in ("n_layer", "n_embd", "n_head", "n_kv_head", "n_inner", "n_positions", "head_dim")
} | {
    "vocab_size": "tokenizer.vocab_size",
    "bos_token_id": "the tokenizer",
    "eos_token_id": "the tokenizer",
    "pad_token_id": "the tokenizer",
}
# Config classes that keep GPT-2's names for the sizes; the others of transformers share Llama's
# (recipe/model_statistics.py).
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
    """Return the width of an MLP where none is given: 4 x n_embd of two matrices; of three 8/3 of it, for as many
    parameters.

    The latter rounded up to a multiple of 64, below a width of 256 of 8.
    """
    if not gated:
        return 4 * n_embd
    multiple = 64 if n_embd >= 256 else 8
    return -(-8 * n_embd // (3 * multiple)) * multiple


def options_of(model: Model, *, vocab_size: int | None = None) -> dict[str, Any]:
    """Return the preset's options, those that follow from the vocabulary where its size is given, with the recipe's
    own over them."""
    options = dict(PRESETS[model.preset])
    if model.preset == "modern_bigram" and vocab_size is not None:
        options["bigram_embeddings"] = BIGRAMS_PER_ID * vocab_size
    return options | model.options


Convention = Literal["exact_causal", "nanochat", "full"]

# Inputs of the small gates of nanochat: of a value embedding's gate, and of the smear gate.
VALUE_GATE_CHANNELS = 12
SMEAR_GATE_CHANNELS = 24
# Model types whose sizes are arithmetic on their config. nanochat trains as a Tandem.
BY_ARITHMETIC = ("tandem", "gpt2", "nanochat")


def mean_visible_keys(window: int, rows: int) -> float:
    """Return the keys that a query sees in the mean over a row, itself included; `window` of them at most."""
    window = min(window, rows)
    return (window * (window + 1) / 2 + (rows - window) * window) / rows


KeysSeen = Callable[[int, int], float]
# Keys counted for a query, by (window, rows). A query of nanochat's window w sees w + 1 keys, and its formula counts
# w.
KEYS_SEEN: dict[str, KeysSeen] = {
    "exact_causal": mean_visible_keys,
    "nanochat": lambda window, rows: window - 1 if window < rows else rows,
    "full": lambda window, rows: rows,
}


class SizesUnknownError(ValueError):
    """The model cannot be built without weights, for the reason in the message."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a model over rows of row_tokens: by arithmetic below, or counted on its modules (model_statistics.py).

    counts: parameters by role; scaling: matrices that a token passes, of a mixture the experts that it is sent to, and
    the head, which nanochat's rules take for the size of a model. linear: FLOPs of a token's matrix products, forward
    and backward; pair: those of a visible query-key pair in one layer. Both are None where they are not known, for the
    reason in `unknown`. windows: per layer the keys that a query sees at most, itself included. vocab_rows: of the
    embedding. Heads are 0 where there are none.
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
    table_parameters: int  # of what is looked up and never multiplied; positions are not among them
    variances: int  # NorMuon's second state: a row or column of each matrix of the blocks
    windows: list[int]
    linear: float | None
    pair: float | None
    unknown: str | None = None
    mixture: bool = False

    @property
    def scaling(self) -> int | None:
        """Return counts["scaling"]; None for a mixture of experts when those that a token passes are not known."""
        if self.mixture and self.linear is None:
            return None
        return self.counts["scaling"]

    def parameters(self) -> dict[str, int]:
        return dict(self.counts)

    def flops_per_token(
        self, convention: Convention = "exact_causal", *, seen: KeysSeen | None = None
    ) -> float | None:
        """Return the FLOPs of forward and backward per row position; None where they are not known.

        exact_causal counts each visible query-key pair once, windows included. nanochat counts min(window, row) keys
        for every query. full counts every pair of the row, as eager attention computes them. Left out by all: norms,
        softmax, rotary turns, the optimizer. seen: mean keys of a query instead, as counted in rows whose documents are
        isolated.
        """
        if self.linear is None or self.pair is None:
            return None
        seen = seen or KEYS_SEEN[convention]
        return self.linear + self.pair * sum(seen(window, self.row_tokens) for window in self.windows)


def arithmetic_sizes(options: dict[str, Any], model_type: str, row_tokens: int) -> Sizes:
    """Return sizes of Tandem, GPT-2 or nanochat by their config."""
    gpt2_like = model_type in ("tandem", "gpt2")  # else nanochat: no learned positions, norms or biases
    layers, width, heads = options["n_layer"], options["n_embd"], options["n_head"]
    kv_heads = options.get("n_kv_head") or heads
    head_dim = options.get("head_dim") or width // heads
    inner = options.get("n_inner") or default_inner(width, gated=False)
    queries, keys = heads * head_dim, kv_heads * head_dim
    # 1. Tables: of tokens, whose number is rounded up, of pairs of them, of positions, and of values.
    multiple = options.get("vocab_multiple") or 1
    vocab_rows = math.ceil(options["vocab_size"] / multiple) * multiple
    bigrams = options.get("bigram_embeddings") or 0
    positions = value_layers = 0
    if gpt2_like and options.get("position_embedding", "learned") == "learned":
        positions = options["n_positions"]
    if options.get("value_embeddings"):
        value_layers = (layers + 1) // 2  # every other layer, the last one among them
    values = value_layers * vocab_rows * keys
    # 2. Matrices: queries and output, keys and values, the two of the MLP, and the gates of value embeddings.
    block = 2 * width * queries + 2 * width * keys + 2 * width * inner
    matrices = layers * block + value_layers * VALUE_GATE_CHANNELS * kv_heads
    head = own_head = vocab_rows * width
    if options.get("tie_word_embeddings", gpt2_like):  # then the table of tokens is the head
        own_head = 0
    # 3. Biases, norms, and the numbers by which a block is mixed in.
    scalars = smear_inputs = 0
    if gpt2_like and options.get("use_bias", True):
        scalars += layers * (queries + 2 * keys + width + inner + width)
    if gpt2_like and options.get("normalization") != "rms_norm":  # LayerNorm has a weight and a bias
        scalars += 2 * (2 * layers + 1) * width
    if options.get("residual_lambdas"):
        scalars += 2 * layers
    if options.get("backout"):
        scalars += 1
    if options.get("smear"):
        smear_inputs = SMEAR_GATE_CHANNELS
        scalars += smear_inputs + 1
    if bigrams:
        scalars += layers
    counts = {
        "embeddings": (vocab_rows + bigrams + positions) * width,
        "value_embeddings": values,
        "head": own_head,
        "matrices": matrices,
        "scalars": scalars,
    }
    scaling = matrices + head
    return Sizes(
        model_type=model_type,
        n_layer=layers,
        n_embd=width,
        n_head=heads,
        n_kv_head=kv_heads,
        head_dim=head_dim,
        vocab_rows=vocab_rows,
        row_tokens=row_tokens,
        counts={**counts, "total": sum(counts.values()), "scaling": scaling},
        table_parameters=(vocab_rows + bigrams) * width + values,
        variances=layers * (4 * max(width, queries) + 2 * inner),
        windows=layer_windows(options, layers, row_tokens),
        # 6 FLOPs a weight, forward and backward; 12 for a pair and channel, as its two products make 4 forward.
        linear=6 * (scaling + smear_inputs),
        pair=12 * queries,
    )


def layer_windows(options: dict[str, Any], layers: int, row_tokens: int) -> list[int]:
    """Return the keys seen per layer, the query itself included, as transformers counts sliding_window. options: as a
    config names them."""
    window = options.get("sliding_window")
    if pattern := options.get("window_pattern"):
        window = window or short_window(options["n_positions"])
        sliding = [pattern[i % len(pattern)] == "S" for i in range(layers - 1)] + [False]
    elif kinds := options.get("layer_types"):
        sliding = ["sliding" in kind for kind in kinds]
    elif kinds := options.get("attention_layers"):  # GPT-Neo's
        window, sliding = options.get("window_size"), [kind == "local" for kind in kinds]
    else:
        sliding = [True] * layers
    short = min(window or row_tokens, row_tokens)
    return [short if slides else row_tokens for slides in sliding]


def short_window(n_positions: int) -> int:
    """Return Tandem's default window: a query, and before it a quarter of the longest sequence rounded up to 128."""
    return math.ceil(n_positions / 4 / 128) * 128 + 1
