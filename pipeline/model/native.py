"""Tandem models whose options are those of transformers' gpt2 or nanochat, and back."""

import re
from typing import Any

from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    NanoChatConfig,
    NanoChatForCausalLM,
)

from .configuration_tandem import TandemConfig

# Fields of TandemConfig that GPT2Config lacks and that do not change what the weights compute.
FREE = {"initialization", "vocab_multiple", "rope_theta", "qk_norm_scale", "sliding_window", "n_kv_head"}
EXTRAS = set(TandemConfig.__dataclass_fields__) - set(GPT2Config.__dataclass_fields__)
# What GPT-2 declares itself: the rest are every config's, and would be in config.json as if somebody had set
# them.
GPT2_FIELDS = tuple(GPT2Config.__annotations__)
# Special tokens and what else both sides call alike.
SHARED = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "initializer_range")
NANOCHAT_NAMES = {
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_key_value_heads": "n_kv_head",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
    "attention_dropout": "attn_pdrop",
    "rms_norm_eps": "layer_norm_epsilon",
    "final_logit_softcapping": "final_logit_softcapping",
}
# What transformers' nanochat always is.
NANOCHAT_OPTIONS: dict[str, Any] = {
    "normalization": "rms_norm",
    "position_embedding": "rope",
    "use_bias": False,
    "qk_norm": True,
    "qk_norm_scale": 1.0,
    "embedding_norm": True,
    "value_embeddings": False,
    "residual_lambdas": False,
    "backout": False,
    "smear": False,
    "bigram_embeddings": None,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
}
NANOCHAT_PARAMETERS = [
    (r"^transformer\.wte\.", "model.embed_tokens."),
    (r"^transformer\.h\.(\d+)\.attn\.c_([qkv])\.", r"model.layers.\1.self_attn.\2_proj."),
    (r"^transformer\.h\.(\d+)\.attn\.c_proj\.", r"model.layers.\1.self_attn.o_proj."),
    (r"^transformer\.h\.(\d+)\.mlp\.c_fc\.", r"model.layers.\1.mlp.fc1."),
    (r"^transformer\.h\.(\d+)\.mlp\.c_proj\.", r"model.layers.\1.mlp.fc2."),
]


def native_config(config: TandemConfig) -> GPT2Config | NanoChatConfig | None:
    """Return the config of transformers' own class that computes the same with the same weights, or None."""
    if config.padded_vocab_size != config.vocab_size or any(config.windows):
        return None
    if _is_gpt2(config):
        return GPT2Config(**{name: getattr(config, name) for name in GPT2_FIELDS})
    if all(getattr(config, name) == value for name, value in NANOCHAT_OPTIONS.items()):
        fields: dict[str, Any] = {theirs: getattr(config, ours) for theirs, ours in NANOCHAT_NAMES.items()}
        inner = config.n_inner if config.n_inner is not None else 4 * config.n_embd
        rope = {"rope_type": "default", "rope_theta": float(config.rope_theta)}
        shared: dict[str, Any] = {name: getattr(config, name) for name in SHARED}
        return NanoChatConfig(**fields, **shared, intermediate_size=inner, rope_parameters=rope)
    return None


def native_class(config):
    return {"gpt2": GPT2LMHeadModel, "nanochat": NanoChatForCausalLM}[config.model_type]


def tandem_config(config) -> TandemConfig | None:
    """Return the Tandem config that computes the same as transformers' gpt2 or nanochat, or None where there is
    none."""
    if config.model_type == "gpt2":
        if config.add_cross_attention or config.reorder_and_upcast_attn:
            return None
        return TandemConfig(**{name: getattr(config, name) for name in GPT2_FIELDS})
    rope = config.rope_parameters or {}
    if rope.get("rope_type", "default") != "default" or config.attention_bias:
        return None
    fields = {ours: getattr(config, theirs) for theirs, ours in NANOCHAT_NAMES.items()}
    shared = {name: getattr(config, name) for name in SHARED}
    options: dict[str, Any] = NANOCHAT_OPTIONS | fields | shared
    return TandemConfig(**options, n_inner=config.intermediate_size, rope_theta=rope["rope_theta"])


def to_native_name(name: str, model_type: str) -> str:
    if model_type == "nanochat":
        for ours, theirs in NANOCHAT_PARAMETERS:
            name = re.sub(ours, theirs, name)
    return name


def _is_gpt2(config) -> bool:
    """Return whether every option that GPT-2 has not is at its default."""
    for name in EXTRAS - FREE:
        if getattr(config, name) != TandemConfig.__dataclass_fields__[name].default:
            return False
    return config.n_kv_head == config.n_head
