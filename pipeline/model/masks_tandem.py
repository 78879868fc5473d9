"""Attention masks of full and sliding layers, and none at all where causality is the whole mask.

Shapes: B batch, T token, N blocks of BLOCK tokens.
"""

import copy

import torch
from torch.nn.attention.flex_attention import BlockMask
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    causal_mask_function,
    create_causal_mask,
    create_sliding_window_causal_mask,
    packed_sequence_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.utils.generic import is_flash_attention_requested

BLOCK = 128  # tokens a side of what FlexAttention computes or skips, its own default


def attention_masks(config, inputs_embeds, attention_mask=None, position_ids=None, past_key_values=None) -> dict:
    """The mask of each kind of layer, {"full_attention": ..., "sliding_attention": ...}, as the attention function takes it.

    position_ids without attention_mask and cache are rows of packed documents: a position that does not continue the
    one before begins a document, and documents do not see each other.
    """
    if isinstance(attention_mask, dict):
        return attention_mask  # made before by generate, for a static cache
    grows = attention_mask is not None or past_key_values is not None
    config = _with_kernel_for(config, inputs_embeds, grows=grows)
    kinds = {("full_attention" if window is None else "sliding_attention"): window for window in config.windows}
    if grows:
        given = {"config": config, "inputs_embeds": inputs_embeds, "attention_mask": attention_mask}
        return {
            kind: (create_causal_mask if window is None else create_sliding_window_causal_mask)(
                **given, past_key_values=past_key_values
            )
            for kind, window in kinds.items()
        }
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
    """Which blocks FlexAttention computes under the mask and which without it, in the order of BlockMask's arguments.

    Told from the first and last token of each block, since documents are numbered upwards along a row: no mask of T x T is
    made, as create_block_mask would.
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
    """The blocks of a window alone: the same in every row and at every step, so a compiled graph holds them as constants."""
    return _blocks(window, length, device)


def _listed(blocks_B1NN):
    """How many blocks each row of blocks has, (B, 1, N), and their numbers before all others, (B, 1, N, N); int32."""
    blocks_B1NN = blocks_B1NN.int().contiguous()
    order = blocks_B1NN.argsort(dim=-1, descending=True, stable=True)
    return blocks_B1NN.sum(-1, dtype=torch.int32), order.to(torch.int32, memory_format=torch.contiguous_format)


def _with_kernel_for(config, inputs_embeds, *, grows: bool):
    """The config that masks are made by: with sdpa where the kernel that it names does not serve.

    FlexAttention would be compiled anew for each length of a row that grows (generation); flash kernels take no float32.
    """
    flex = config._attn_implementation == "flex_attention"
    if not (grows if flex else in_float32(inputs_embeds) and is_flash_attention_requested(config)):
        return config
    config = copy.copy(config)
    config._attn_implementation = "sdpa"
    return config


def in_float32(states) -> bool:
    """Whether a projection of these states is in float32."""
    return states.dtype == torch.float32 and not torch.is_autocast_enabled(states.device.type)


def flash_documents(config, inputs_embeds, position_ids) -> dict:
    """Where the documents of a batch begin, as the flash kernels of transformers are told it; for other attention nothing.

    Without it they take position_ids to their word in a batch of one row only, and in a larger one documents see each
    other. The number of documents is read from the device: the one host sync of such a forward.
    """
    if not is_flash_attention_requested(config):
        return {}
    batch_size, length = inputs_embeds.shape[:2]
    documents_BT = _documents(position_ids, batch_size)
    begins_BT = documents_BT.diff(dim=-1, prepend=documents_BT[:, :1] - 1) != 0
    begins = torch.nn.functional.pad(begins_BT.flatten().nonzero()[:, 0], (0, 1), value=batch_size * length).int()
    return {"cu_seq_lens_q": begins, "cu_seq_lens_k": begins, "max_length_q": length, "max_length_k": length}


def positions(attention_mask, past_length, length: int, device) -> torch.Tensor:
    """Position of each token, (B or 1, T): its number among the row's unmasked tokens, so that left padding shifts nothing."""
    if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
        return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
    return (torch.arange(length, device=device) + past_length)[None]
