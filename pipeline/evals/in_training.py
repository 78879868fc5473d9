"""The validation numbers of a run by name, the same on every rank and for any batch size."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from pipeline.evals.bpb import bits_per_byte, by_source


def score_validation(
    model: Any,
    validation: Any,
    *,
    byte_lengths_V: np.ndarray | None,
    stage: str,
    rows: int,
    rank: int,
    world_size: int,
    device: torch.device,
    autocast_dtype: torch.dtype | None,
    watched: Callable[[Iterable], Iterable] = iter,
    nll: Callable[..., torch.Tensor] | None = None,
) -> dict[str, float]:
    """Pretraining: val/bpb, val/loss and val/bpb_documents. SFT: sft/assistant_bpb and val/loss, on what assistants say.
    Of a mixture also the bits per byte of each source, as <name>/<source>.

    validation: ValidationRows; rows: rows of one forward pass. byte_lengths_V may be None where ids have no fixed bytes:
    text rows then carry their targets' bytes, and of conversations only the loss is known, as of text of which the tokenizer
    keeps too little. watched: what batches go through.
    nll: as bits_per_byte takes it; every batch has the same shape.
    """

    sources = validation.sources

    def score(batches, lengths_V=byte_lengths_V):
        return bits_per_byte(
            model,
            watched(batches),
            lengths_V,
            device=device,
            autocast_dtype=autocast_dtype,
            nll=nll,
            sources=len(sources),
        )

    batches = validation.batches(rows=rows, rank=rank, world_size=world_size)
    if not validation.keeps_text or (stage == "sft" and byte_lengths_V is None):
        return {"val/loss": score(batches, np.ones(model.config.vocab_size, np.int32)).loss}
    packed, name = score(batches), "sft/assistant_bpb" if stage == "sft" else "val/bpb"
    numbers = {name: packed.bpb, "val/loss": packed.loss} | by_source(name, packed, sources)
    if stage != "sft" and validation.has_documents:
        whole = score(validation.document_batches(rows=rows, rank=rank, world_size=world_size))
        numbers |= {"val/bpb_documents": whole.bpb} | by_source("val/bpb_documents", whole, sources)
    return numbers
