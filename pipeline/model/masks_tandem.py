"""Attention masks of full and sliding layers, and none at all where causality is the whole mask."""

import torch
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    causal_mask_function,
    create_causal_mask,
    create_sliding_window_causal_mask,
    packed_sequence_mask_function,
    sliding_window_causal_mask_function,
)


def attention_masks(config, inputs_embeds, attention_mask=None, position_ids=None, past_key_values=None) -> dict:
    """The mask of each kind of layer, {"full_attention": ..., "sliding_attention": ...}, as the attention function takes it.

    position_ids without attention_mask and cache are rows of packed documents: a position that does not continue the
    one before begins a document, and documents do not see each other.
    """
    if isinstance(attention_mask, dict):
        return attention_mask  # made before by generate, for a static cache
    kinds = {("full_attention" if window is None else "sliding_attention"): window for window in config.windows}
    if attention_mask is not None or past_key_values is not None:
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
    if implementation == "sdpa" and window is None and documents_BT is None:
        return None
    mask_function = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    if documents_BT is not None:
        mask_function = and_masks(mask_function, packed_sequence_mask_function(documents_BT))
    return ALL_MASK_ATTENTION_FUNCTIONS[implementation](
        batch_size=batch_size,
        q_length=length,
        kv_length=length,
        q_offset=0,
        kv_offset=0,
        mask_function=mask_function,
        attention_mask=None,
        allow_is_causal_skip=False,
        dtype=inputs_embeds.dtype,
        config=config,
        use_vmap=False,
        device=inputs_embeds.device,
    )


def positions(attention_mask, past_length, length: int, device) -> torch.Tensor:
    """Position of each token, (B or 1, T): its number among the row's unmasked tokens, so that left padding shifts nothing."""
    if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
        return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
    return (torch.arange(length, device=device) + past_length)[None]
