"""The validation numbers of a run by name, the same on every rank and for any batch size."""

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
) -> dict[str, float]:
    """Pretraining: val/bpb, val/loss and val/bpb_documents. SFT: sft/assistant_bpb and val/loss, on what assistants say.

    validation: ValidationRows; rows: rows of one forward pass. Without byte_lengths_V only the loss is known.
    """
    lengths_V = np.ones(model.config.vocab_size, np.int32) if byte_lengths_V is None else byte_lengths_V

    def score(batches):
        return bits_per_byte(model, batches, lengths_V, device=device, autocast_dtype=autocast_dtype)

    packed = score(validation.batches(rows=rows, rank=rank, world_size=world_size))
    if byte_lengths_V is None:
        return {"val/loss": packed.loss}
    if stage == "sft":
        return {"sft/assistant_bpb": packed.bpb, "val/loss": packed.loss}
    numbers = {"val/bpb": packed.bpb, "val/loss": packed.loss}
    if validation.documents_protocol_id is not None:
        numbers["val/bpb_documents"] = score(
            validation.document_batches(rows=rows, rank=rank, world_size=world_size)
        ).bpb
    return numbers
