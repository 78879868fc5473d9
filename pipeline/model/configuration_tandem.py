"""The configuration of a Tandem model: GPT-2's, plus options that are all off by default."""

from typing import ClassVar, Literal

from huggingface_hub.dataclasses import strict
from transformers import GPT2Config

SMEAR_CHANNELS = 24  # channels of the embedding that decide how much of the token before is mixed in
VALUE_GATE_CHANNELS = 12  # channels of the layer's input that gate its value embedding


@strict
class TandemConfig(GPT2Config):
    """GPT2Config with the options of current small language models; at their defaults the model is GPT-2.

    n_kv_head: key and value heads shared by groups of query heads; None is n_head.
    normalization: `rms_norm` has no parameters; its epsilon is layer_norm_epsilon.
    position_embedding: `learned` (GPT-2's table) or `rope` with base rope_theta.
    use_bias: GPT-2's biased projections, query, key and value in one (in, out) matrix named c_attn. Without, every
        projection is a plain (out, in) matrix and c_q, c_k, c_v are three, which Muon needs.
    qk_norm: RMSNorm over each head of queries and keys, after RoPE; both are then multiplied by qk_norm_scale.
    embedding_norm: normalization right after the token (and position) embedding.
    final_logit_softcapping: c in c * tanh(logits / c).
    value_embeddings: every second layer, the last among them, adds a gated embedding of the token to its values.
    residual_lambdas: each layer starts from resid_lambda * x + x0_lambda * embedding.
    backout: subtracts a learned share of the middle layer's output before the last norm.
    smear: adds a gated share of the embedding of the token before.
    bigram_embeddings: rows of a table of embeddings for pairs of tokens, hashed, which every layer adds a learned
    share of
        (modded-nanogpt PR 201, which has five times the vocabulary); None: none. For small models: nanochat found
        nothing at depth 25.
    window_pattern: S (sliding) and L (full) per layer, repeated over the layers; the last layer is always full.
    sliding_window: keys that a token sees in an S layer, itself included (as everywhere in transformers). The
        default is one more than a quarter of n_positions rounded up to 128: the token itself and that many before.
    initialization: `gpt2`, or `nanochat` (uniform inputs, zero outputs, wide embedding, near-zero head).
    vocab_multiple: embedding and head get a multiple of this many rows; the logits are cropped to vocab_size.

    Raises ValueError naming every combination that cannot work.
    """

    model_type = "tandem"
    attribute_map = GPT2Config.attribute_map | {"num_key_value_heads": "n_kv_head"}

    # Tables and blocks are gathered one by one; the rest, and with it the head whose weight the loss reads, with the
    # model.
    base_model_fsdp_plan: ClassVar[dict[str, str]] = dict.fromkeys(
        ("wte", "bigram_embedding", "h.*"), "free_full_weight"
    )

    n_kv_head: int | None = None
    normalization: Literal["layer_norm", "rms_norm"] = "layer_norm"
    position_embedding: Literal["learned", "rope"] = "learned"
    rope_theta: float | int = 10000.0
    use_bias: bool = True
    qk_norm: bool = False
    qk_norm_scale: float | int = 1.0
    embedding_norm: bool = False
    final_logit_softcapping: float | int | None = None
    value_embeddings: bool = False
    residual_lambdas: bool = False
    backout: bool = False
    smear: bool = False
    bigram_embeddings: int | None = None
    window_pattern: str | None = None
    sliding_window: int | None = None
    initialization: Literal["gpt2", "nanochat"] = "gpt2"
    vocab_multiple: int = 1

    def __post_init__(self, **kwargs):
        none = []
        for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_kv_head", "n_inner"):
            size = getattr(self, name)
            if size is not None and size < 1:
                none.append(f"{name} is {size}")
        if none:
            raise ValueError(f"the model cannot be built: {', '.join(none)}")
        if self.n_kv_head is None:
            self.n_kv_head = self.n_head
        if self.window_pattern is None:
            self.sliding_window = None
        elif self.sliding_window is None:
            self.sliding_window = -(-self.n_positions // 4 // 128) * 128 + 1
        for name in ("rope_theta", "qk_norm_scale", "final_logit_softcapping"):
            if (value := getattr(self, name)) is not None:
                setattr(self, name, float(value))  # a recipe may say 15
        if problems := self._problems():
            raise ValueError("the model cannot be built: " + "; ".join(problems))
        super().__post_init__(**kwargs)

    def _problems(self) -> list[str]:
        checks = [
            (self.n_embd % self.n_head, f"n_embd {self.n_embd} is not a multiple of n_head {self.n_head}"),
            (
                self.n_head % (self.n_kv_head or self.n_head),
                f"n_head {self.n_head} is not a multiple of n_kv_head {self.n_kv_head}",
            ),
            (
                self.position_embedding == "rope" and self.n_embd // self.n_head % 2,
                f"rope turns pairs of channels and a head has {self.n_embd // self.n_head}: make it even",
            ),
            (
                self.smear and self.n_embd < SMEAR_CHANNELS,
                f"smear reads {SMEAR_CHANNELS} channels and n_embd is {self.n_embd}",
            ),
            (
                self.bigram_embeddings is not None and self.bigram_embeddings < 2,
                f"bigram_embeddings {self.bigram_embeddings} must be at least 2 (null switches it off)",
            ),
            (
                self.bigram_embeddings is not None and self.smear and self.n_layer < 2,
                "bigram_embeddings beside smear need two layers, in whose caches the last token lies",
            ),
            (
                self.value_embeddings and self.n_embd < VALUE_GATE_CHANNELS,
                f"value_embeddings read {VALUE_GATE_CHANNELS} channels and n_embd is {self.n_embd}",
            ),
            (
                self.window_pattern is not None and (not self.window_pattern or set(self.window_pattern) - set("SL")),
                f"window_pattern {self.window_pattern!r} must be letters S (sliding) and L (full)",
            ),
            (
                self.sliding_window is not None and self.sliding_window < 1,
                f"sliding_window {self.sliding_window} must be at least 1",
            ),
            (self.vocab_multiple < 1, f"vocab_multiple {self.vocab_multiple} must be at least 1"),
            (
                self.final_logit_softcapping is not None and self.final_logit_softcapping <= 0,
                f"final_logit_softcapping {self.final_logit_softcapping} must be positive (null switches it off)",
            ),
            (self.add_cross_attention, "add_cross_attention is not supported: a decoder only"),
            (self.reorder_and_upcast_attn, "reorder_and_upcast_attn is not supported"),
        ]
        return [problem for wrong, problem in checks if wrong]

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def padded_vocab_size(self) -> int:
        """Return rows of the embedding and the head."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def windows(self) -> list[int | None]:
        """Keys that a token sees, itself included, per layer; None where it sees all before it."""
        if self.window_pattern is None:
            return [None] * self.n_layer
        letters = [self.window_pattern[i % len(self.window_pattern)] for i in range(self.n_layer)]
        letters[-1] = "L"
        return [self.sliding_window if letter == "S" else None for letter in letters]

    @property
    def layer_types(self) -> list[str]:
        """Return what transformers' caches read. The first layer of a smearing model also carries smear's state, the
        next one (or without smear the first) the last token for bigram_embeddings."""
        types = ["full_attention" if window is None else "sliding_attention" for window in self.windows]
        with_state = []
        if self.smear:
            with_state.append(0)
        if self.bigram_embeddings is not None:
            with_state.append(self.bigram_state_layer)
        for layer in with_state:
            types[layer] = "hybrid" if types[layer] == "full_attention" else "hybrid_sliding"
        return types

    @property
    def bigram_state_layer(self) -> int:
        return int(self.smear)

    @property
    def base_model_tp_plan(self) -> dict[str, str] | None:  # type: ignore[override]
        """Return how ranks split the blocks by heads, or None where they cannot and transformers and vLLM refuse.

        Query, key and value in one matrix (use_bias) would be split across the three; a value embedding is looked up
        whole.
        """
        if self.use_bias or self.value_embeddings:
            return None
        split = {f"h.*.attn.{name}": "colwise" for name in ("c_q", "c_k", "c_v")}
        return split | {"h.*.attn.c_proj": "rowwise", "h.*.mlp.c_fc": "colwise", "h.*.mlp.c_proj": "rowwise"}

    @property
    def why_not_in_vllm(self) -> list[str]:
        """Return what vLLM, handing over one new token at a time and keeping attention's state only, would compute
        wrongly."""
        rows = self.padded_vocab_size
        checks = [
            (self.smear, "smear reads the token before each one, which vLLM does not keep"),
            (self.bigram_embeddings, "bigram_embeddings read the token before each one, which vLLM does not keep"),
            (
                rows != self.vocab_size,
                f"its embedding is padded to {rows} rows for {self.vocab_size} tokens, and vLLM loads a row a token",
            ),
        ]
        return [problem for wrong, problem in checks if wrong]

    def has_value_embedding(self, layer: int) -> bool:
        return self.value_embeddings and layer % 2 == (self.n_layer - 1) % 2
