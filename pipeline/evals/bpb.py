"""Bits per byte: how well a model predicts text, whatever its tokenizer.

A loss per token rewards a tokenizer with short tokens; nats over the bytes of the text do not. Two values are
comparable when the same bytes were scored with the same context: that is what a protocol id names.
EvaluationInterrupted ends any evaluation.

Letters: B rows, T positions, V vocabulary.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from pipeline.metrics import BPB_OF_STAGE, VAL_BPB_DOCUMENTS, VAL_LOSS, Numbers
from pipeline.monitor.heartbeat import beat
from pipeline.process.progress import progress

IGNORED = -100
# Logits of another model that are held at once, in elements of (rows, T, V): 1 GiB in fp32.
LOGITS_AT_ONCE = 2**28
# Targets whose logits are turned to fp32 together, so that bf16 logits are never copied whole.
TARGETS_AT_ONCE = 2048


# What batches or items go through, which may end the evaluation early by EvaluationInterrupted.
Watched = Callable[[Iterable], Iterable]


class EvaluationInterrupted(Exception):
    """A signal came in the middle of an evaluation or of sampling, which is given up."""


@contextmanager
def evaluating(model) -> Iterator[None]:
    """Keep the model in evaluation mode and without gradients, and leave it in the mode that it was in."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


@dataclass(frozen=True, kw_only=True)
class BpbResult:
    """Sums of what was scored, over all ranks.

    bpb: nats / (ln 2 x bytes). loss: mean nats of all targets that are not ignored, special ones included.
    nats, bytes: the two sums of bpb, special targets in neither. tokens: targets of the loss. of_sources: the bpb of
    each source of the rows, None for one of which no byte was scored; None where nobody asked.
    """

    bpb: float
    loss: float
    nats: float
    bytes: int
    tokens: int
    of_sources: tuple[float | None, ...] | None = None


def bits_per_byte(
    model,
    batches: Iterable[Mapping[str, torch.Tensor]],
    byte_lengths_V,
    *,
    device,
    autocast_dtype: torch.dtype | None = None,
    nll: Callable[..., torch.Tensor] | None = None,
    sources: int = 0,
) -> BpbResult:
    """Return the model's cross-entropy in bits per byte of text, over all ranks.

    batches: training batches, `input_ids` and `shift_labels` (B, T), `position_ids` when documents are isolated. A
    batch may carry `target_bytes` (B, T), the bytes of text under each target and -1 under a special one: for
    tokenizers whose ids have no fixed bytes; then byte_lengths_V may be None. sources: how many the rows come from,
    when the batches carry `source` (B,), the number of each row's one. byte_lengths_V: (V,) raw bytes per id, 0 for
    specials. nll: what is called in the place of `per_token_nll`. Every rank must call this, with its own share of the
    batches; sums are fp64 and int64. Raises ValueError when no byte was scored on any rank.
    """
    device = torch.device(device)
    # MPS has no fp64.
    sums_device = torch.device("cpu") if device.type == "mps" else device
    lengths_V = None if byte_lengths_V is None else torch.as_tensor(byte_lengths_V, device=device).long()
    # S sources, one when they are not separated.
    nats_S2 = torch.zeros(max(sources, 1), 2, dtype=torch.float64, device=sums_device)  # of text, of every target
    counts_S2 = torch.zeros(max(sources, 1), 2, dtype=torch.int64, device=sums_device)  # bytes, targets
    number_S1 = torch.arange(max(sources, 1), device=sums_device)[:, None]
    with evaluating(model):
        for batch in batches:
            beat()
            batch = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
            # 1. Nats of each target, which targets count, and the bytes of text under them.
            nll_BT = (nll or per_token_nll)(model, batch, autocast_dtype=autocast_dtype)
            is_target_BT = batch["shift_labels"] != IGNORED
            bytes_BT, is_text_BT = target_bytes(batch, lengths_V)
            # 2. Their sums by row, of text and of every target.
            # where, not a product: 0 x inf at a target that does not count would be nan.
            nll_BT = nll_BT.to(sums_device).double()
            is_text_BT, is_target_BT = is_text_BT.to(sums_device), is_target_BT.to(sums_device)
            nats_2B = torch.stack([torch.where(mask, nll_BT, 0.0).sum(-1) for mask in (is_text_BT, is_target_BT)])
            counts_2B = torch.stack([bytes_BT.to(sums_device).sum(-1), is_target_BT.sum(-1)])
            # 3. Added to the sums of the source of each row.
            source_B = batch["source"].to(sums_device) if sources else number_S1.new_zeros(len(nll_BT))
            is_of_S1B = (number_S1 == source_B)[:, None]
            nats_S2 += torch.where(is_of_S1B, nats_2B, 0.0).sum(-1)
            counts_S2 += torch.where(is_of_S1B, counts_2B, 0).sum(-1)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(nats_S2)
        torch.distributed.all_reduce(counts_S2)

    # bits per byte = nats / ln 2 / bytes. Checked after the sum over ranks, so that all of them stop.
    nats, all_nats = nats_S2.sum(0).tolist()
    num_bytes, tokens = counts_S2.sum(0).tolist()
    if num_bytes == 0:
        raise ValueError("no byte of text was scored: every target is ignored or special")
    of_sources: list[float | None] = []
    for of_one, count in zip(nats_S2[:sources, 0].tolist(), counts_S2[:sources, 0].tolist(), strict=True):
        of_sources.append(of_one / (math.log(2) * count) if count else None)
    return BpbResult(
        bpb=nats / (math.log(2) * num_bytes),
        loss=all_nats / tokens,
        nats=nats,
        bytes=num_bytes,
        tokens=tokens,
        of_sources=tuple(of_sources) if sources else None,
    )


def by_source(name: str, score: BpbResult, names: Sequence[str]) -> Numbers:
    """Return the bpb of each source of a mixture as metrics `<name>/<source>`; nothing where there is one source."""
    numbers = {}
    for source, bpb in zip(names, score.of_sources or (), strict=True):
        if bpb is not None:
            numbers[f"{name}/{source}"] = bpb
    return numbers


def target_bytes(
    batch: Mapping[str, torch.Tensor], lengths_V: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bytes of text of each target (B, T), 0 where it does not count, and which targets count as text (B,
    T)."""
    labels_BT = batch["shift_labels"]
    is_target_BT = labels_BT != IGNORED
    if "target_bytes" in batch:
        # A target of 0 bytes can be text here (the second byte of a character spelt in bytes): its nats count.
        is_text_BT = is_target_BT & (batch["target_bytes"] >= 0)
        return torch.where(is_text_BT, batch["target_bytes"].long(), 0), is_text_BT
    if lengths_V is None:
        raise ValueError("byte_lengths_V is None and the batch has no target_bytes")
    bytes_BT = torch.where(is_target_BT, lengths_V[labels_BT.clamp(min=0)], 0)
    return bytes_BT, bytes_BT > 0


def per_token_nll(
    model, batch: Mapping[str, torch.Tensor], *, autocast_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return the nats of each target (B, T) in fp32, 0 at ignored ones, of a model of ours or of any causal LM of
    transformers."""
    ids_BT, labels_BT, positions_BT = batch["input_ids"], batch["shift_labels"], batch.get("position_ids")
    autocast = _autocast(ids_BT, autocast_dtype)
    if hasattr(model, "per_token_nll"):
        with autocast:
            return model.per_token_nll(ids_BT, labels_BT, position_ids=positions_BT)
    rows = max(1, LOGITS_AT_ONCE // (ids_BT.shape[1] * model.config.get_text_config().vocab_size))
    nll = []
    for first in range(0, len(ids_BT), rows):
        part = slice(first, first + rows)
        positions = {} if positions_BT is None else {"position_ids": positions_BT[part]}
        with autocast:
            logits_BTV = model(input_ids=ids_BT[part], use_cache=False, **positions).logits
        flat_labels = labels_BT[part].flatten()
        chunks = zip(logits_BTV.flatten(0, 1).split(TARGETS_AT_ONCE), flat_labels.split(TARGETS_AT_ONCE), strict=True)
        flat = [F.cross_entropy(x.float(), y, ignore_index=IGNORED, reduction="none") for x, y in chunks]
        nll.append(torch.cat(flat).view_as(labels_BT[part]))  # 0 at an ignored one
    return torch.cat(nll)


def compiled_nll(model, **options) -> Callable[..., torch.Tensor]:
    """Return `per_token_nll` of this model under torch.compile: one static graph for whole rows, one for isolated
    documents.

    Batches must be of one shape. Another model than ours is scored as ever, by the logits of as many rows as memory
    holds. options: of torch.compile.
    """
    if not hasattr(model, "per_token_nll"):
        return per_token_nll

    # Two functions, since the compiler keeps what it has compiled by function, and one for both would be compiled
    # again.
    def of_rows(ids_BT, labels_BT):
        return model.per_token_nll(ids_BT, labels_BT)

    def of_documents(ids_BT, labels_BT, positions_BT):
        return model.per_token_nll(ids_BT, labels_BT, position_ids=positions_BT)

    rows = torch.compile(of_rows, dynamic=False, **options)
    documents = torch.compile(of_documents, dynamic=False, **options)

    def nll(_model, batch, *, autocast_dtype=None):
        ids_BT, labels_BT = batch["input_ids"], batch["shift_labels"]
        with _autocast(ids_BT, autocast_dtype):
            if "position_ids" in batch:
                return documents(ids_BT, labels_BT, batch["position_ids"])
            return rows(ids_BT, labels_BT)

    return nll


def _autocast(ids_BT, dtype: torch.dtype | None):
    return torch.autocast(ids_BT.device.type, dtype=dtype) if dtype else nullcontext()


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
    watched: Watched = iter,
    nll: Callable[..., torch.Tensor] | None = None,
) -> Numbers:
    """Return val/bpb, val/loss and val/bpb_documents of a pretraining; sft/assistant_bpb and val/loss, on assistants'
    turns, of SFT. Of a mixture also the bits per byte of each source, as <name>/<source>.

    validation: ValidationRows; rows: rows of one forward pass. byte_lengths_V may be None where ids have no fixed
    bytes: text rows then carry their targets' bytes, and of conversations only the loss is known, as of text of which
    the tokenizer keeps too little. watched: what batches go through. nll: as bits_per_byte takes it; every batch has
    the same shape.
    """

    sources = validation.sources

    def score(batches, lengths_V=byte_lengths_V, role="validation"):
        count = -(-validation.num_rows(role) // (rows * world_size))
        return bits_per_byte(
            model,
            watched(progress(batches, name="evaluation", unit="batches", total=count)),
            lengths_V,
            device=device,
            autocast_dtype=autocast_dtype,
            nll=nll,
            sources=len(sources),
        )

    batches = validation.batches(rows=rows, rank=rank, world_size=world_size)
    if not validation.keeps_text or (stage == "sft" and byte_lengths_V is None):
        return {VAL_LOSS: score(batches, np.ones(model.config.get_text_config().vocab_size, np.int32)).loss}
    packed, name = score(batches), BPB_OF_STAGE[stage]
    numbers = {name: packed.bpb, VAL_LOSS: packed.loss} | by_source(name, packed, sources)
    if stage != "sft" and validation.has_documents:
        whole = score(validation.document_batches(rows=rows, rank=rank, world_size=world_size), role="documents")
        numbers |= {VAL_BPB_DOCUMENTS: whole.bpb} | by_source(VAL_BPB_DOCUMENTS, whole, sources)
    return numbers
