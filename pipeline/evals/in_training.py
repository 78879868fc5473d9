"""The validation numbers of a run by name, the same on every rank and for any batch size."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from pipeline.evals.bpb import bits_per_byte


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

    validation: ValidationRows; rows: rows of one forward pass. byte_lengths_V may be None where ids have no fixed bytes:
    text rows then carry their targets' bytes, and of conversations only the loss is known. watched: what batches go through.
    nll: as bits_per_byte takes it; every batch has the same shape.
    """

    def score(batches, lengths_V=byte_lengths_V):
        return bits_per_byte(model, watched(batches), lengths_V, device=device, autocast_dtype=autocast_dtype, nll=nll)

    batches = validation.batches(rows=rows, rank=rank, world_size=world_size)
    if stage == "sft" and byte_lengths_V is None:
        return {"val/loss": score(batches, np.ones(model.config.vocab_size, np.int32)).loss}
    packed = score(batches)
    if stage == "sft":
        return {"sft/assistant_bpb": packed.bpb, "val/loss": packed.loss}
    numbers = {"val/bpb": packed.bpb, "val/loss": packed.loss}
    if validation.documents_protocol_id is not None:
        numbers["val/bpb_documents"] = score(
            validation.document_batches(rows=rows, rank=rank, world_size=world_size)
        ).bpb
    return numbers
