"""The Tandem model: GPT-2 with TandemConfig's options. Shapes: B batch, T token, D width, V vocabulary."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import DynamicCache
from transformers.generation import GenerationMixin
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    causal_mask_function,
    create_causal_mask,
    create_sliding_window_causal_mask,
    packed_sequence_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils.generic import can_return_tuple, is_flash_attention_requested
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_tandem import SMEAR_CHANNELS, VALUE_GATE_CHANNELS, TandemConfig

# The cache's field of an output: past_key_values, and cache since transformers 5.24. Functions take it by place here.
CACHE = list(BaseModelOutputWithPast.__dataclass_fields__)[1]

# Initial weights. Every parameter is set here: after to_empty() nothing else would do it.

# What transformers makes itself, when the vocabulary is resized.
NEW_ROWS = {nn.Embedding: "embedding", nn.Linear: "head"}


def with_role(module: Any, role: str) -> Any:
    """Return the module, marked with what it is for, which decides its initial weights.

    Marked on the module itself because transformers shows a model's leaves to _init_weights one by one, and passes
    over those of foreign classes that own no parameters (an attention, a block).
    """
    module.init_role = role
    return module


def init_module(module: Any, config) -> None:
    """Sets the parameters that this module itself owns (not those of its children)."""
    if role := getattr(module, "init_role", NEW_ROWS.get(type(module))):
        init_matrix = _init_nanochat if config.initialization == "nanochat" else _init_gpt2
        if role == "bigram_embedding":
            init.zeros_(module.weight)
        else:
            init_matrix(module.weight, role, config)
        if getattr(module, "bias", None) is not None:
            init.zeros_(module.bias)
    elif isinstance(module, nn.LayerNorm):
        init.ones_(module.weight)
        init.zeros_(module.bias)
    else:
        _init_scalars(module, config)


def _init_gpt2(weight, role: str, config) -> None:
    """Normal, with the outputs into the residual stream divided by the root of their number (GPT-2 paper)."""
    std = config.initializer_range
    init.normal_(weight, mean=0.0, std=std / math.sqrt(2 * config.n_layer) if role == "output" else std)


def _init_nanochat(weight, role: str, config) -> None:
    """nanochat's: blocks begin as the identity, the head near zero, the embedding wide."""
    bound = math.sqrt(3 / config.n_embd)  # of a uniform distribution with standard deviation 1 / sqrt(n_embd)
    if role == "output":
        init.zeros_(weight)
    elif role == "embedding" and not config.tie_word_embeddings:
        init.normal_(weight, mean=0.0, std=0.8)
    elif role in ("embedding", "position"):  # nanochat has neither a tied nor a position embedding: GPT-2's
        init.normal_(weight, mean=0.0, std=config.initializer_range)
    elif role == "head":
        init.normal_(weight, mean=0.0, std=0.001)
    elif role == "gate":
        init.uniform_(weight, 0.0, 0.02)
    elif role == "hidden":
        init.uniform_(weight, -0.4 * bound, 0.4 * bound)
    else:
        init.uniform_(weight, -bound, bound)


def _init_scalars(module, config) -> None:
    """The model's own scalars, alike under both initializations: the options are defined by where they begin."""
    own = dict(module.named_parameters(recurse=False))
    depth_L = torch.arange(config.n_layer, dtype=torch.float32) / max(config.n_layer - 1, 1)
    if "resid_lambdas" in own:
        init.copy_(own["resid_lambdas"], 1.15 - 0.10 * depth_L)
    if "x0_lambdas" in own:
        init.copy_(own["x0_lambdas"], 0.20 - 0.15 * depth_L)
    if "bigram_lambdas" in own:
        init.constant_(own["bigram_lambdas"], 0.1)
    if "backout_lambda" in own:
        init.constant_(own["backout_lambda"], 0.2)
    if "smear_lambda" in own:
        init.zeros_(own["smear_lambda"])


# Attention masks of full and sliding layers, and none at all where causality is the whole mask.

BLOCK = 128  # tokens a side of what FlexAttention computes or skips, its own default


def attention_masks(config, inputs_embeds, attention_mask=None, position_ids=None, past_key_values=None) -> dict:
    """Return the mask of each kind of layer, {"full_attention": ..., "sliding_attention": ...}, as the attention
    function takes it.

    position_ids without attention_mask and cache are rows of packed documents: a position that does not continue the
    one before begins a document, and documents do not see each other.
    """
    if isinstance(attention_mask, dict):
        return attention_mask  # made before by generate, for a static cache
    grows = attention_mask is not None or past_key_values is not None
    config = _with_kernel_for(config, inputs_embeds, grows=grows)
    kinds = {("full_attention" if window is None else "sliding_attention"): window for window in config.windows}
    if grows:
        makers = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
        return {kind: makers[kind](config, inputs_embeds, attention_mask, past_key_values) for kind in kinds}
    documents_BT = None if position_ids is None else _documents(position_ids, inputs_embeds.shape[0])
    return {kind: _row_mask(config, inputs_embeds, window, documents_BT) for kind, window in kinds.items()}


def _documents(position_ids, batch_size: int):
    """The number of the document that each position belongs to, (B, T)."""
    position_ids = position_ids.expand(batch_size, -1)
    return (position_ids.diff(dim=-1, prepend=position_ids[:, :1] - 1) != 1).cumsum(-1)


def _row_mask(config, inputs_embeds, window: int | None, documents_BT):
    implementation = config._attn_implementation
    batch_size, length = inputs_embeds.shape[:2]
    window = window if window is not None and window < length else None
    if implementation not in ALL_MASK_ATTENTION_FUNCTIONS._global_mapping:
        return None
    # transformers builds this mask whenever it is traced, and an explicit mask rules out the causal kernels.
    if implementation in ("sdpa", "flex_attention") and window is None and documents_BT is None:
        return None
    if implementation == "flex_attention":
        list_blocks = _window_blocks if documents_BT is None else _blocks
        blocks = list_blocks(window, length, inputs_embeds.device, documents_BT)
        given = {"BLOCK_SIZE": (BLOCK, BLOCK), "mask_mod": _visible(window, documents_BT)}
        return BlockMask((length, length), *blocks, **given)
    return ALL_MASK_ATTENTION_FUNCTIONS[implementation](
        batch_size=batch_size,
        q_length=length,
        kv_length=length,
        q_offset=0,
        kv_offset=0,
        mask_function=_visible(window, documents_BT),
        attention_mask=None,
        allow_is_causal_skip=False,
        dtype=inputs_embeds.dtype,
        config=config,
        use_vmap=False,
        device=inputs_embeds.device,
    )


def _visible(window: int | None, documents_BT=None):
    """The function of (row, head, query, key) that says whether the query sees the key."""
    visible = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    return visible if documents_BT is None else and_masks(visible, packed_sequence_mask_function(documents_BT))


def _blocks(window: int | None, length: int, device, documents_BT=None) -> tuple:
    """Return which blocks FlexAttention computes under the mask and which without it, in the order of BlockMask's
    arguments.

    Told from the first and last token of each block, since documents are numbered upwards along a row: no mask of T x
    T is made, as create_block_mask would.
    """
    first_N = torch.arange(0, length, BLOCK, device=device)
    last_N = first_N + (BLOCK - 1)
    first_query, last_query = first_N[None, :, None], last_N[None, :, None]
    some = first_N <= last_query
    every = (last_N <= first_query) & (last_query < length)  # queries past the row's end are left to the mask
    if window is not None:
        some = some & (first_query - last_N < window)
        every = every & (last_query - first_N < window)
    if documents_BT is not None:
        begins_BN, ends_BN = documents_BT[:, first_N], documents_BT[:, last_N.clamp(max=length - 1)]
        some = some & (ends_BN[:, None, :] >= begins_BN[:, :, None])
        every = every & (begins_BN[:, None, :] == ends_BN[:, :, None])
    masked, whole = (some & ~every)[:, None], every[:, None]
    return *_listed(masked), *_listed(whole), *_listed(masked.mT), *_listed(whole.mT)


@torch.compiler.assume_constant_result
def _window_blocks(window: int, length: int, device, documents_BT: None) -> tuple:
    """Return the blocks of a window alone: the same in every row and at every step, so a compiled graph holds them as
    constants."""
    return _blocks(window, length, device)


def _listed(blocks_B1NN):
    """How many blocks each row of blocks has, (B, 1, N), and their numbers before all others, (B, 1, N, N); int32."""
    blocks_B1NN = blocks_B1NN.int().contiguous()
    order = blocks_B1NN.argsort(dim=-1, descending=True, stable=True)
    # FlexAttention's kernel finds a row's blocks by the stride of the dimension of 1, which the compiler would choose
    # freely.
    N = blocks_B1NN.shape[-1]
    counts_B1N = blocks_B1NN.sum(-1, dtype=torch.int32)
    return counts_B1N.as_strided(counts_B1N.shape, (N, N, 1)), order.int().as_strided(
        order.shape, (N * N, N * N, N, 1)
    )


def _with_kernel_for(config, inputs_embeds, *, grows: bool):
    """The config that masks are made by: with sdpa where the kernel that it names does not serve.

    FlexAttention would be compiled anew for each length of a row that grows (generation); flash kernels take no
    float32.
    """
    flex = config._attn_implementation == "flex_attention"
    if not (grows if flex else in_float32(inputs_embeds) and is_flash_attention_requested(config)):
        return config
    config = copy.copy(config)
    config._attn_implementation = "sdpa"
    return config


def in_float32(states) -> bool:
    """Return whether a projection of these states is in float32."""
    return states.dtype == torch.float32 and not torch.is_autocast_enabled(states.device.type)


def flash_documents(config, inputs_embeds, position_ids) -> dict:
    """Return where the documents of a batch begin, as the flash kernels of transformers take it; for other attention
    nothing.

    Without it they take position_ids to their word in a batch of one row only, and in a larger one documents see each
    other. The number of documents is read from the device: the one host sync of such a forward.
    """
    if not is_flash_attention_requested(config):
        return {}
    batch_size, length = inputs_embeds.shape[:2]
    documents_BT = _documents(position_ids, batch_size)
    begins_BT = documents_BT.diff(dim=-1, prepend=documents_BT[:, :1] - 1) != 0
    begins = F.pad(begins_BT.flatten().nonzero()[:, 0], (0, 1), value=batch_size * length).int()
    return {"cu_seq_lens_q": begins, "cu_seq_lens_k": begins, "max_length_q": length, "max_length_k": length}


def positions(attention_mask, past_length, length: int, device) -> torch.Tensor:
    """Position of each token, (B or 1, T): its number among the row's unmasked tokens, so that left padding shifts
    nothing."""
    if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
        return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
    return (torch.arange(length, device=device) + past_length)[None]


# Cross-entropy of the next token that never holds the logits of a whole batch in fp32.

# Elements of the logits held at a time: on a CPU 32 MiB in fp32, which stay in its caches from pass to pass, elsewhere
# 128 MiB. A compiled step holds 4 bytes of each (logits and gradient in bf16) where an eager one holds 12.
CHUNK_ELEMENTS = {"cpu": 2**23}
OTHER_CHUNK_ELEMENTS = 2**25
FUSED_CHUNK_ELEMENTS = 3 * 2**25
SAFE_EXPONENT = 60.0  # exp of it, times any vocabulary, is far from the largest fp32
IGNORED = -100  # the label of a position without a target, as everywhere in transformers


def chunk_rows(num_rows: int, vocab_size: int, device: str, *, fused_bf16: bool = False) -> int:
    """Return rows of one chunk: the fewest chunks of equal size within the elements of the kind of device."""
    other = FUSED_CHUNK_ELEMENTS if fused_bf16 else OTHER_CHUNK_ELEMENTS
    chunks = max(1, -(-num_rows * vocab_size // CHUNK_ELEMENTS.get(device, other)))
    return max(1, -(-num_rows // chunks))


def exponentials(hidden_ND, weight_VD, target_N1, softcap: float | None):
    """Of a chunk: exp of its logits but for a factor a row, their sums (N, 1), nats (N, 1), and logits / softcap or
    None.

    fp32; the product itself is in hidden_ND's dtype. In place wherever it can be.
    """
    logits = (hidden_ND @ weight_VD.t()).float()
    capped = None
    if softcap is not None:
        capped = logits.div_(softcap).tanh_()
        logits = capped * softcap
    of_target = logits.gather(1, target_N1)
    if softcap is None or softcap > SAFE_EXPONENT:  # else the cap bounds the exponent: a pass less
        largest = logits.amax(-1, keepdim=True)
        logits, of_target = logits.sub_(largest), of_target - largest
    exponential = logits.exp_()
    sums = exponential.sum(-1, keepdim=True)
    return exponential, sums, sums.log() - of_target, capped


def token_nll(hidden_ND, weight_VD, labels_N, *, softcap: float | None = None):
    """Nats of each label: (N,) float32, 0 where the label is -100. Without gradients."""
    dtype = _compute_dtype(hidden_ND)
    hidden_ND, weight_VD = hidden_ND.to(dtype), weight_VD.to(dtype)
    rows = chunk_rows(hidden_ND.shape[0], weight_VD.shape[0], hidden_ND.device.type)
    parts = []
    for hidden, labels in zip(hidden_ND.split(rows), labels_N.split(rows), strict=True):
        _, _, nats, _ = exponentials(hidden, weight_VD, labels.clamp(min=0)[:, None], softcap)
        parts.append(nats.squeeze(1).masked_fill(labels == IGNORED, 0.0))
    return torch.cat(parts)


def summed_cross_entropy(hidden_ND, weight_VD, labels_N, *, softcap: float | None = None):
    """Sum of the labels' nats, float32, exact over all chunks; differentiable in hidden_ND and weight_VD. Beside it
    the nats themselves, as token_nll gives them.

    Under autocast the products are in its dtype, everything from the logits on is float32.
    """
    if not torch.is_grad_enabled():
        nats_N = token_nll(hidden_ND, weight_VD, labels_N, softcap=softcap)
        return nats_N.sum(), nats_N
    return _SummedCrossEntropy.apply(hidden_ND, weight_VD, labels_N, softcap, _compute_dtype(hidden_ND))


def _compute_dtype(tensor) -> torch.dtype:
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


def loss_and_gradients(
    hidden_ND: torch.Tensor, weight_VD: torch.Tensor, labels_N: torch.Tensor, softcap: float | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the summed nats and each label's (N,), fp32, and the sum's gradients of hidden_ND and weight_VD in the
    dtypes of these; dtype: of the products."""
    weight = weight_VD.to(dtype)
    total = torch.zeros((), dtype=torch.float32, device=weight.device)
    parts: list[torch.Tensor] = []
    hidden_gradients: list[torch.Tensor] = []
    weight_gradient = torch.zeros_like(weight_VD, dtype=torch.float32)
    fused = torch.compiler.is_compiling()
    logits_gradient = fused_logits_gradient if fused else eager_logits_gradient
    fused_bf16 = fused and dtype.itemsize == 2
    rows = chunk_rows(hidden_ND.shape[0], weight_VD.shape[0], weight.device.type, fused_bf16=fused_bf16)
    for hidden, labels in zip(hidden_ND.to(dtype).split(rows), labels_N.split(rows), strict=True):
        nats, gradient = logits_gradient(hidden, weight, labels, softcap)
        parts.append(nats)
        total = total + nats.sum()
        hidden_gradients.append((gradient @ weight).to(hidden_ND.dtype))
        if dtype == torch.float32:
            torch.addmm(weight_gradient, gradient.t(), hidden, out=weight_gradient)
        else:
            weight_gradient += gradient.t() @ hidden
    return total, torch.cat(parts), torch.cat(hidden_gradients), weight_gradient.to(weight_VD.dtype)


def eager_logits_gradient(hidden, weight, labels, softcap: float | None):
    """Return the nats (rows,) of a chunk and their gradient of its logits (rows, V) in the dtype of hidden.

    Each operation is a pass over the chunk, so they work in place: two fp32 tensors (rows, V) at a time, one without
    a softcap.
    """
    ignored = (labels == IGNORED)[:, None]
    target = labels.clamp(min=0)[:, None]
    gradient, sums, nats, capped = exponentials(hidden, weight, target, softcap)
    counted = torch.ones_like(sums).masked_fill(ignored, 0.0)
    gradient.mul_(counted / sums).scatter_add_(1, target, -counted)
    if capped is not None:
        one = torch.ones((), dtype=torch.float32, device=weight.device)
        gradient.mul_(torch.addcmul(one, capped, capped, value=-1.0, out=capped))
    del capped  # what follows holds the gradient in dtype only
    return nats.masked_fill(ignored, 0.0).squeeze(1), gradient.to(hidden.dtype)


def fused_logits_gradient(hidden, weight, labels, softcap: float | None):
    """Return what eager_logits_gradient returns, in a form that the compiler fuses.

    The logits are read again for each sum, and the target is found by comparison, since a scatter would end the
    fusion: no fp32 tensor of the chunk reaches memory, but for the tanh of the softcap on a CPU, where the compiler
    keeps it rather than computing it twice.
    """
    logits = hidden @ weight.t()
    is_target = torch.arange(weight.shape[0], device=weight.device) == labels[:, None]
    values = logits.float()
    slope = None
    if softcap is not None:
        capped = torch.tanh(values / softcap)
        values, slope = capped * softcap, 1 - capped * capped
    largest = 0.0
    if softcap is None or softcap > SAFE_EXPONENT:
        largest = values.amax(-1, keepdim=True)
    log_sums = torch.exp(values - largest).sum(-1, keepdim=True).log() + largest
    of_target = torch.where(is_target, values, 0.0).sum(-1)
    counted = labels != IGNORED
    gradient = (torch.exp(values - log_sums) - is_target.float()) * counted[:, None]
    if slope is not None:
        gradient = gradient * slope
    nats = torch.where(counted, log_sums.squeeze(1) - of_target, 0.0)
    return nats, gradient.to(hidden.dtype)


class _SummedCrossEntropy(torch.autograd.Function):
    """The gradients are computed in forward, while a chunk's logits are at hand; backward only scales them."""

    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, labels_N, softcap, dtype):
        total, nats_N, hidden_gradient_ND, weight_gradient_VD = loss_and_gradients(
            hidden_ND, weight_VD, labels_N, softcap, dtype
        )
        ctx.save_for_backward(hidden_gradient_ND, weight_gradient_VD)
        ctx.mark_non_differentiable(nats_N)
        return total, nats_N

    @staticmethod
    def backward(ctx, loss_gradient, _):
        hidden_gradient_ND, weight_gradient_VD = ctx.saved_tensors
        scale = loss_gradient.to(torch.float32)
        return (
            (hidden_gradient_ND * scale).to(hidden_gradient_ND.dtype),
            (weight_gradient_VD * scale).to(weight_gradient_VD.dtype),
            None,
            None,
            None,
        )


def head_logits(head, hidden_BTD, *, vocab_size: int, softcap: float | None):
    logits = head(hidden_BTD)[..., :vocab_size]
    return logits if softcap is None else softcap * torch.tanh(logits.float() / softcap)


def head_loss(
    head,
    hidden_BTD,
    shift_labels,
    *,
    vocab_size: int,
    softcap: float | None = None,
    num_items_in_batch=None,
    per_token_loss: bool = False,
):
    """Return the nats' sum over num_items_in_batch (their mean without it) and the nats (B, T); with per_token_loss
    the nats and None."""
    hidden_ND, labels_N = hidden_BTD.flatten(0, 1), shift_labels.flatten().to(hidden_BTD.device)
    if isinstance(head, nn.Linear):
        weight_VD = head.weight[:vocab_size]
        if per_token_loss:
            return token_nll(hidden_ND, weight_VD, labels_N, softcap=softcap).view(shift_labels.shape), None
        total, nats_N = summed_cross_entropy(hidden_ND, weight_VD, labels_N, softcap=softcap)
    else:  # PEFT has wrapped the head: its weight is the old one, and a product with that leaves the adapter out
        logits = head_logits(head, hidden_ND, vocab_size=vocab_size, softcap=softcap)
        nats_N = F.cross_entropy(logits.float(), labels_N, reduction="none")
        if per_token_loss:
            return nats_N.view(shift_labels.shape), None
        total, nats_N = nats_N.sum(), nats_N.detach()
    if num_items_in_batch is None:
        num_items_in_batch = (labels_N != IGNORED).sum().clamp(min=1)
    elif torch.is_tensor(num_items_in_batch):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch, nats_N.view(shift_labels.shape)


# Norm, attention, MLP and block. Shapes: B batch, T token, D width, H heads, K width of a head.


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
    matrix = Conv1D(width_out, width_in) if config.use_bias else nn.Linear(width_in, width_out, bias=False)
    return with_role(matrix, role)


@torch.compiler.assume_constant_result
def rotary_table(length, head_dim, theta, device):
    """rotary_angles of positions 0 to length - 1; a compiled graph holds them as constants."""
    # Otherwise the compiler would compute cosine and sine anew inside every kernel that reads them, per head and
    # layer.
    return rotary_angles(torch.arange(length, device=device)[None], head_dim, theta)  # torch 2.11 takes no config here


def rotary_angles(position_ids, head_dim, theta):
    """Cosine and sine of RoPE, fp32, (B or 1, 1, T, K / 2)."""
    # Computed at every forward: a buffer outside the checkpoint would hold garbage after from_pretrained.
    channels = torch.arange(0, head_dim, 2, dtype=torch.float32, device=position_ids.device)
    frequencies = 1.0 / (theta ** (channels / head_dim))
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


def positions_to_keep(hidden_BTD, logits_to_keep):
    """Return the positions of which logits are wanted: the last n, or all of them for 0; those of a (N,) tensor; of
    each row those of a (B, N) one; flat (N, D) where a (B, T) mask is true.

    As transformers' slice_logits_to_keep, which 5.19 does not have.
    """
    if isinstance(logits_to_keep, int):
        return hidden_BTD[:, -logits_to_keep:]
    if logits_to_keep.ndim == 1:
        return hidden_BTD[:, logits_to_keep]
    if logits_to_keep.dtype == torch.bool:
        return hidden_BTD[logits_to_keep]
    return torch.take_along_dim(hidden_BTD, logits_to_keep[..., None], dim=1)


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
        # 1. Queries, keys and values, (B, H, T, K).
        query, key, value = (p.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in projections)
        if self.config.has_value_embedding(self.layer_idx):
            gate = 3 * torch.sigmoid(self.value_gate(x_BTD[..., :VALUE_GATE_CHANNELS]))  # (B, T, KV heads), 0 to 3
            embedded = self.value_embedding(input_ids).unflatten(-1, (-1, self.head_dim))
            value = value + (gate.unsqueeze(-1) * embedded.to(gate.dtype)).transpose(1, 2).to(value.dtype)
        # 2. Positions, then the norm of each head; both in the dtype of the values afterwards.
        if rotary is not None:
            query, key = rotate(query, rotary), rotate(key, rotary)
        if self.config.qk_norm:
            query, key = self.qk_norm(query), self.qk_norm(key)
        query, key = query.to(value.dtype), key.to(value.dtype)
        if past_key_values is not None:
            # A paged one adds to kwargs
            key, value = past_key_values.update(key, value, self.layer_idx, kwargs=kwargs)
        # 3. Attention.
        implementation = self.implementation(value, attention_mask)
        attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention)
        # vLLM reads this one call out of the source of `forward`. A `scaling` that it does not find spelt out becomes
        # head_dim**-0.5 there, without a word.
        output, weights = attention_interface(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.config.attn_pdrop if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        # An engine with attention of its own may give (T, H * K), as vLLM does.
        return self.resid_dropout(self.c_proj(output.reshape(*x_BTD.shape[:-1], -1))), weights

    def implementation(self, value, attention_mask):
        """Return the name of the attention function: the config's, or sdpa where that one cannot compute this or is
        slower."""
        implementation = self.config._attn_implementation
        # Full causality, which sdpa computes faster, or a mask that was made for sdpa.
        skips_nothing = implementation == "flex_attention" and not isinstance(attention_mask, BlockMask)
        if skips_nothing or (value.dtype == torch.float32 and is_flash_attention_requested(self.config)):
            return "sdpa"
        return implementation


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


@dataclass
class TandemOutput(CausalLMOutputWithPast):
    """nats: while training, of each target (B, T) float32, without gradients, 0 where the label is -100."""

    nats: torch.Tensor | None = None


class TandemPreTrainedModel(PreTrainedModel):
    config_class = TandemConfig
    config: TandemConfig
    base_model_prefix = "transformer"
    supports_gradient_checkpointing = True
    _no_split_modules = ["TandemBlock"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values", "cache"]  # noqa: RUF012
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": TandemBlock,
        "attentions": OutputRecorder(TandemAttention, index=1, layer_name=".attn"),
    }

    @torch.no_grad()
    def _init_weights(self, module):
        init_module(module, self.config)

    def resize_token_embeddings(self, new_num_tokens=None, pad_to_multiple_of=None, mean_resizing=True):
        """As transformers has it, with the value embeddings; the rows that vocab_multiple adds stay outside the
        vocabulary."""
        if new_num_tokens is None and pad_to_multiple_of is None:
            return self.get_input_embeddings()
        config, multiple = self.config, pad_to_multiple_of or 1
        if not isinstance(multiple, int):
            return super().resize_token_embeddings(new_num_tokens, multiple)  # which refuses it
        vocab_size = -(-(new_num_tokens or config.vocab_size) // multiple) * multiple
        # First without the rows outside: a new id must not get one of them, which nothing has ever trained.
        self._resize_rows(config.vocab_size, mean_resizing)
        config.vocab_size = vocab_size
        self._resize_rows(config.padded_vocab_size, mean_resizing)
        config.vocab_size = self.vocab_size = vocab_size
        return self.get_input_embeddings()

    def _resize_rows(self, rows: int, mean_resizing: bool) -> None:
        super().resize_token_embeddings(rows, mean_resizing=mean_resizing)
        for name, module in self.named_modules():
            if isinstance(module, nn.Embedding) and name.endswith("value_embedding"):
                self._get_resized_embeddings(module, rows, mean_resizing=mean_resizing)


class TandemModel(TandemPreTrainedModel):
    """The decoder without its head; last_hidden_state is normalized."""

    _input_embed_layer = "wte"

    def __init__(self, config: TandemConfig):
        super().__init__(config)
        if config._attn_implementation == "vllm" and (reasons := config.why_not_in_vllm):
            raise ValueError(f"vLLM cannot run this model: {'; '.join(reasons)}")
        self.wte = with_role(nn.Embedding(config.padded_vocab_size, config.n_embd), "embedding")
        if config.position_embedding == "learned":
            self.wpe = with_role(nn.Embedding(config.n_positions, config.n_embd), "position")
        if config.embedding_norm:
            self.ln_embedding = make_norm(config, config.n_embd)
        if config.bigram_embeddings:
            # Drawn from no generator: all other initial weights are those of the model without it.
            sizes = config.bigram_embeddings, config.n_embd
            self.bigram_embedding = with_role(nn.Embedding(*sizes, _weight=torch.zeros(sizes)), "bigram_embedding")
            self.bigram_lambdas = nn.Parameter(torch.empty(config.n_layer))
        if config.smear:
            self.smear_gate = with_role(nn.Linear(SMEAR_CHANNELS, 1, bias=False), "gate")
            self.smear_lambda = nn.Parameter(torch.empty(1))
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.ModuleList([TandemBlock(config, layer_idx) for layer_idx in range(config.n_layer)])
        if config.residual_lambdas:
            self.resid_lambdas = nn.Parameter(torch.empty(config.n_layer))
            self.x0_lambdas = nn.Parameter(torch.empty(config.n_layer))
        if config.backout:
            self.backout_lambda = nn.Parameter(torch.empty(1))
        self.ln_f = make_norm(config, config.n_embd)
        self.gradient_checkpointing = False
        self.stream_dtype = None  # that the residual stream begins in, where the embedding is stored in another one
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        past_key_values = kwargs.pop("cache", past_key_values)  # its name since transformers 5.24
        config = self.config
        # 1. What is given, and whether a cache is kept.
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("forward takes exactly one of input_ids and inputs_embeds")
        if input_ids is None and (config.value_embeddings or config.bigram_embeddings):
            raise ValueError(
                "a model with value_embeddings or bigram_embeddings needs input_ids: it embeds them again"
            )
        if use_cache is None:
            # Rows of packed documents get none by default: with a cache they would be one text.
            packed = position_ids is not None and attention_mask is None
            use_cache = config.use_cache and not self.training and (past_key_values is not None or not packed)
        if self.gradient_checkpointing and self.training:
            use_cache, past_key_values = False, None
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=config)

        # 2. The embeddings, and what each token sees: masks, and positions, at which documents begin.
        x_BTD = self.wte(input_ids) if inputs_embeds is None else inputs_embeds
        if self.stream_dtype is not None:
            x_BTD = x_BTD.to(self.stream_dtype)
        masks = attention_masks(config, x_BTD, attention_mask, position_ids, past_key_values)
        packed = position_ids is not None and attention_mask is None and past_key_values is None
        if packed:
            kwargs |= flash_documents(config, x_BTD, position_ids)
        # Positions decide where smear may look back; without them only a row's first token has nothing before it.
        restarts = position_ids is not None or attention_mask is not None or past_key_values is not None
        if position_ids is None:
            past_length = 0 if past_key_values is None else past_key_values.get_seq_length()
            if config.position_embedding == "learned" and x_BTD.shape[1] > config.n_positions:
                raise ValueError(
                    f"a row of {x_BTD.shape[1]} tokens: the model has {config.n_positions} learned positions"
                )
            position_ids = positions(attention_mask, past_length, x_BTD.shape[1], x_BTD.device)

        # 3. What is added to the embeddings.
        if config.position_embedding == "learned":
            x_BTD = x_BTD + self.wpe(position_ids)
        if config.normalization == "rms_norm" and torch.is_autocast_enabled(x_BTD.device.type):
            x_BTD = x_BTD.to(torch.get_autocast_dtype(x_BTD.device.type))  # the whole residual stream, as in nanochat
        if config.embedding_norm:
            x_BTD = self.ln_embedding(x_BTD)
        if config.smear:
            x_BTD = self._smear(x_BTD, position_ids if restarts else None, past_key_values)
        x_BTD = self.drop(x_BTD)

        # 4. The blocks. A row that begins at 0 takes its rotation from a table that a compiled graph holds.
        rotary, rope = None, (config.head_dim, config.rope_theta)
        if config.position_embedding == "rope" and not restarts and x_BTD.shape[1] <= config.n_positions:
            table = rotary_table(config.n_positions, *rope, x_BTD.device)
            rotary = tuple(angles[:, :, : x_BTD.shape[1]] for angles in table)
        elif config.position_embedding == "rope":
            rotary = rotary_angles(position_ids, *rope)
        embedding_BTD = x_BTD if config.residual_lambdas else None
        middle_BTD = bigram_BTD = None
        if config.bigram_embeddings:
            bigram_BTD = self._embed_bigrams(input_ids, position_ids, past_key_values).to(x_BTD.dtype)
        for i, block in enumerate(self.h):
            lambdas = (self.resid_lambdas[i], self.x0_lambdas[i]) if config.residual_lambdas else None
            mask = masks["full_attention" if config.windows[i] is None else "sliding_attention"]
            if bigram_BTD is not None:
                x_BTD = x_BTD + self.bigram_lambdas[i].to(x_BTD.dtype) * bigram_BTD
            x_BTD = block(
                x_BTD, embedding_BTD, lambdas, input_ids, rotary, mask, past_key_values=past_key_values, **kwargs
            )
            if config.backout and i == config.n_layer // 2:
                middle_BTD = x_BTD
        # 5. Less a share of the middle layer's output, and the last norm.
        if middle_BTD is not None:
            x_BTD = x_BTD - self.backout_lambda.to(x_BTD.dtype) * middle_BTD
        return BaseModelOutputWithPast(self.ln_f(x_BTD), past_key_values if use_cache else None)

    def _embed_bigrams(self, input_ids, position_ids, past_key_values):
        """The embedding of each token with the one before, both hashed to a row of the table, (B, T, D); the last row
        is that of a token with nothing before it. The hash and its numbers are modded-nanogpt's (PR 201)."""
        before_BT1 = self._before(input_ids[..., None].float(), self.config.bigram_state_layer, past_key_values)
        last = self.bigram_embedding.num_embeddings - 1
        hashed_BT = (36313 * input_ids ^ 27191 * before_BT1[..., 0].long()) % last
        return self.bigram_embedding(hashed_BT.where(position_ids > 0, last))

    def _before(self, x_BTD, layer: int, past_key_values):
        """Return what stood one position earlier, zeros at first; a cache keeps the last one as the layer's state."""
        before_BTD = F.pad(x_BTD[:, :-1], (0, 0, 1, 0))
        if past_key_values is not None:
            if not past_key_values.layers:  # a bare DynamicCache(): give it the layers of this config
                past_key_values.layers = DynamicCache(config=self.config).layers
                past_key_values.layer_class_to_replicate = None
            continued = past_key_values.has_previous_state(layer)
            seen_BDT = past_key_values.update_conv_state(x_BTD.transpose(1, 2), layer, conv_kernel_size=1)
            if continued:
                before_BTD = seen_BDT[..., -x_BTD.shape[1] - 1 : -1].transpose(1, 2)
        return before_BTD

    def _smear(self, x_BTD, position_ids, past_key_values):
        """Adds a gated share of the embedding before; a document's first token (position 0) has none."""
        before_BTD = self._before(x_BTD, 0, past_key_values)
        gate_BT1 = self.smear_lambda.to(x_BTD.dtype) * torch.sigmoid(self.smear_gate(x_BTD[..., :SMEAR_CHANNELS]))
        if position_ids is not None:
            gate_BT1 = gate_BT1 * (position_ids > 0)[..., None]
        return x_BTD + gate_BT1.to(x_BTD.dtype) * before_BTD


class TandemForCausalLM(TandemPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}  # noqa: RUF012

    def __init__(self, config: TandemConfig):
        super().__init__(config)
        self.transformer = TandemModel(config)
        self.lm_head = with_role(nn.Linear(config.n_embd, config.padded_vocab_size, bias=False), "head")
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        shift_labels=None,
        use_cache=None,
        num_items_in_batch=None,
        logits_to_keep: int | torch.Tensor = 0,
        per_token_loss: bool = False,
        **kwargs,
    ) -> TandemOutput:
        """Logits (B, T, V), and the loss when labels are given; while training the loss and its nats alone (logits
        None).

        labels (B, T): as input_ids, shifted here. shift_labels (B, T): already shifted, taken as they are. -100 is
        ignored. loss: sum of nats / num_items_in_batch, or the mean over the targets without it; with per_token_loss
        (B, T) nats without gradients. position_ids that restart at 0 isolate packed documents.
        """
        past_key_values = kwargs.pop("cache", past_key_values)  # its name since transformers 5.24
        if labels is not None and shift_labels is None:
            shift_labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        if use_cache is None and shift_labels is not None:
            use_cache = False
        outputs = self.transformer(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_BTD = outputs.last_hidden_state
        loss = logits = nats_BT = None
        if shift_labels is not None:
            given = {"num_items_in_batch": num_items_in_batch, "per_token_loss": per_token_loss}
            loss, nats_BT = head_loss(self.lm_head, hidden_BTD, shift_labels, **given, **self._head_options)
        if loss is None or not (self.training or per_token_loss):
            logits = head_logits(self.lm_head, positions_to_keep(hidden_BTD, logits_to_keep), **self._head_options)
        return TandemOutput(
            loss,
            logits,
            getattr(outputs, CACHE),
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            nats=nats_BT if self.training else None,
        )

    @property
    def _head_options(self) -> dict:
        return {"vocab_size": self.config.vocab_size, "softcap": self.config.final_logit_softcapping}

    @torch.no_grad()
    def per_token_nll(self, input_ids, shift_labels, position_ids=None):
        """Nats of each label, (B, T) float32, 0 where the label is -100."""
        return self(input_ids, position_ids=position_ids, shift_labels=shift_labels, per_token_loss=True).loss

    @staticmethod
    def create_masks_for_generate(
        config, inputs_embeds, attention_mask, past_key_values=None, position_ids=None, **kwargs
    ) -> dict:
        """Masks of a static cache; transformers' own gives a smearing first layer a mask without its window."""
        past_key_values = kwargs.get("cache", past_key_values)  # its name since transformers 5.24
        return attention_masks(config, inputs_embeds, attention_mask, position_ids, past_key_values)


class _Classifier:
    """The constructor of both: the generic classes' own makes the base by AutoModel, which does not know this file."""

    base_model_prefix = "transformer"

    def __init__(self, config: TandemConfig):
        TandemPreTrainedModel.__init__(self, config)  # type: ignore[arg-type]
        self.num_labels = config.num_labels or 2  # transformers' default
        self.transformer = TandemModel(config)
        dropout = getattr(config, "classifier_dropout", None)
        self.dropout = nn.Dropout(config.resid_pdrop if dropout is None else dropout)
        each_token = isinstance(self, GenericForTokenClassification)
        self.score = with_role(nn.Linear(config.n_embd, self.num_labels, bias=each_token), "head")
        self.post_init()  # type: ignore[attr-defined]


class TandemForSequenceClassification(_Classifier, GenericForSequenceClassification, TandemPreTrainedModel):
    """A score of each label for a row, from its last token: a classifier, or with one label a reward model."""


class TandemForTokenClassification(_Classifier, GenericForTokenClassification, TandemPreTrainedModel):
    """A score of each label for every token."""
