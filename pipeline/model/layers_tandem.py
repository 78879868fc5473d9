"""Norm, attention, MLP and block. Shapes: B batch, T token, D width, H heads, K width of a head."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from transformers.activations import ACT2FN
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D
from transformers.utils.generic import is_flash_attention_requested

from .configuration_tandem import VALUE_GATE_CHANNELS
from .initialization_tandem import with_role


class TandemRMSNorm(nn.Module):
    """RMSNorm without parameters, in the dtype of its input (autocast would leave it in fp32)."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.shape, self.eps = (width,), eps

    def forward(self, x):
        return F.rms_norm(x, self.shape, eps=self.eps).to(x.dtype)


def make_norm(config, width: int) -> nn.Module:
    if config.normalization == "rms_norm":
        return TandemRMSNorm(width, config.layer_norm_epsilon)
    return nn.LayerNorm(width, eps=config.layer_norm_epsilon)


def make_projection(config, width_in: int, width_out: int, role: str) -> nn.Module:
    """GPT-2's biased (in, out) matrix, or a plain (out, in) one."""
    return with_role(
        Conv1D(width_out, width_in) if config.use_bias else nn.Linear(width_in, width_out, bias=False), role
    )


@torch.compiler.assume_constant_result
def rotary_table(config, device):
    """rotary_angles of positions 0 to n_positions - 1; a compiled graph holds them as constants."""
    # Otherwise the compiler would compute cosine and sine anew inside every kernel that reads them, per head and layer.
    return rotary_angles(config, torch.arange(config.n_positions, device=device)[None])


def rotary_angles(config, position_ids):
    """Cosine and sine of RoPE, fp32, (B or 1, 1, T, K / 2)."""
    # Computed at every forward: a buffer outside the checkpoint would hold garbage after from_pretrained.
    channels = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=position_ids.device)
    frequencies = 1.0 / (config.rope_theta ** (channels / config.head_dim))
    angles = position_ids[:, None, :, None].float() * frequencies
    return angles.cos(), angles.sin()


def rotate(x_BHTK, rotary):
    """RoPE over the pairs (i, i + K / 2), turned by minus the angle as nanochat's weights expect; fp32."""
    cosine, sine = rotary
    first, second = x_BHTK.chunk(2, dim=-1)
    return torch.cat([first * cosine + second * sine, second * cosine - first * sine], dim=-1)


def eager_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Attention spelt out, (B, H, T, K) to (B, T, H, K), and its weights."""
    key = repeat_kv(key, module.num_key_value_groups)
    value = repeat_kv(value, module.num_key_value_groups)
    weights = query @ key.transpose(-1, -2) * scaling
    if attention_mask is not None:
        weights = weights + attention_mask
    weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(value.dtype)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class TandemAttention(nn.Module):
    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.n_head // config.n_kv_head
        self.is_causal = True
        self.sliding_window = config.windows[layer_idx]
        self.scaling = self.head_dim**-0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            self.scaling /= layer_idx + 1
        if config.qk_norm:
            self.scaling *= config.qk_norm_scale**2  # of queries and of keys, in one place that costs nothing
            self.qk_norm = TandemRMSNorm(self.head_dim, config.layer_norm_epsilon)
        width, kv_width = config.n_embd, config.n_kv_head * self.head_dim
        if config.use_bias:
            self.widths = [width, kv_width, kv_width]
            self.c_attn = make_projection(config, width, width + 2 * kv_width, "input")
        else:
            self.c_q = make_projection(config, width, width, "input")
            self.c_k = make_projection(config, width, kv_width, "input")
            self.c_v = make_projection(config, width, kv_width, "input")
        self.c_proj = make_projection(config, width, width, "output")
        self.resid_dropout = nn.Dropout(config.resid_pdrop)
        if config.has_value_embedding(layer_idx):
            self.value_embedding = with_role(nn.Embedding(config.padded_vocab_size, kv_width), "value_embedding")
            self.value_gate = with_role(nn.Linear(VALUE_GATE_CHANNELS, config.n_kv_head, bias=False), "gate")

    def forward(self, x_BTD, input_ids, rotary, attention_mask, past_key_values=None, **kwargs):
        if self.config.use_bias:
            projections = self.c_attn(x_BTD).split(self.widths, dim=-1)
        else:
            projections = self.c_q(x_BTD), self.c_k(x_BTD), self.c_v(x_BTD)
        query, key, value = (p.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in projections)
        if self.config.has_value_embedding(self.layer_idx):
            gate = 3 * torch.sigmoid(self.value_gate(x_BTD[..., :VALUE_GATE_CHANNELS]))  # (B, T, KV heads), 0 to 3
            embedded = self.value_embedding(input_ids).unflatten(-1, (-1, self.head_dim))
            value = value + (gate.unsqueeze(-1) * embedded.to(gate.dtype)).transpose(1, 2).to(value.dtype)
        if rotary is not None:
            query, key = rotate(query, rotary), rotate(key, rotary)
        if self.config.qk_norm:
            query, key = self.qk_norm(query), self.qk_norm(key)
        query, key = query.to(value.dtype), key.to(value.dtype)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        output, weights = self.attend(
            query,
            key,
            value,
            attention_mask,
            dropout=self.config.attn_pdrop if self.training else 0.0,
            **kwargs,
        )
        # An engine with attention of its own may give (T, H * K), as vLLM does.
        return self.resid_dropout(self.c_proj(output.reshape(*x_BTD.shape[:-1], -1))), weights

    def attend(self, query, key, value, attention_mask, **kwargs):
        """The attention function that the config names on (B, H, T, K): (B, T, H, K), and weights or None."""
        implementation = self.config._attn_implementation
        # Full causality, which sdpa computes faster, or a mask that was made for sdpa.
        skips_nothing = implementation == "flex_attention" and not isinstance(attention_mask, BlockMask)
        if skips_nothing or (value.dtype == torch.float32 and is_flash_attention_requested(self.config)):
            implementation = "sdpa"
        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention)
        given = {"scaling": self.scaling, "sliding_window": self.sliding_window}
        return attention(self, query, key, value, attention_mask, **given, **kwargs)


class TandemMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        inner = config.n_inner if config.n_inner is not None else 4 * config.n_embd
        self.c_fc = make_projection(config, config.n_embd, inner, "hidden")
        self.act = ACT2FN[config.activation_function]
        self.c_proj = make_projection(config, inner, config.n_embd, "output")
        self.dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, x_BTD):
        return self.dropout(self.c_proj(self.act(self.c_fc(x_BTD))))


class TandemBlock(GradientCheckpointingLayer):
    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.ln_1 = make_norm(config, config.n_embd)
        self.attn = TandemAttention(config, layer_idx)
        self.ln_2 = make_norm(config, config.n_embd)
        self.mlp = TandemMLP(config)

    def forward(self, x_BTD, embedding_BTD, lambdas, input_ids, rotary, attention_mask, **kwargs):
        """One layer. lambdas: the scalars of x and of the embedding, or None."""
        if lambdas is not None:
            x_BTD = lambdas[0] * x_BTD + lambdas[1] * embedding_BTD
        attended, _ = self.attn(self.ln_1(x_BTD), input_ids, rotary, attention_mask, **kwargs)
        x_BTD = x_BTD + attended
        return x_BTD + self.mlp(self.ln_2(x_BTD))
