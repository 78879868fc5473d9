"""Conversations in, rows of isolated conversations out: whole turns only, never a row without a trained target."""

from collections.abc import Callable
from typing import Any

import numpy as np

from pipeline.data.packing import Origin, PackedRows, best_fit, fill_rows, ragged, unragged

Rendered = tuple[list[int], list[bool]]
Render = Callable[[list[dict]], Rendered]


def fit_conversation(messages: list[dict], rendered: Rendered, render: Render, *, capacity: int, overflow: str):
    """(ids, trained, outcome) of a conversation that fits `capacity` ids and trains at least one; ids is None when dropped.

    rendered: the whole conversation. outcome: whole | cut (ends at its last assistant turn that fits) | too_long | no_target.
    """
    ids, trained = rendered
    if not any(trained):
        return None, None, "no_target"
    if len(ids) <= capacity:
        return ids, trained, "whole"
    if overflow == "drop":
        return None, None, "too_long"
    ends = [i + 1 for i, message in enumerate(messages) if message["role"] == "assistant"]
    low, high, best = 0, len(ends), None
    while low < high:  # lengths grow with the turns: the largest end that fits
        middle = (low + high) // 2
        ids, trained = render(messages[: ends[middle]])
        if len(ids) <= capacity:
            best, low = (ids, trained), middle + 1
        else:
            high = middle
    if best is None or not any(best[1]):
        return None, None, "too_long"
    return *best, "cut"


READ_COUNTS = {
    "text": ("documents", "text_tokens", "text_bytes", "empty_rows"),
    "chat": ("conversations", "text_tokens", "empty_rows", "cut", "too_long", "no_target", "cut_tokens", "too_long_tokens"),
}  # fmt: skip
LENGTH_STEP = 64  # Tokens: finer advice on the length of a row is of no use, and the counts stay few.


def new_counts(kind: str) -> dict[str, Any]:
    """Return what is counted while a source is read, all 0. `longer` of conversations: by row length, those that need it."""
    return {**dict.fromkeys(READ_COUNTS[kind], 0), **({"longer": {}} if kind == "chat" else {})}


def count_conversation(counts: dict[str, Any], *, length: int, kept: int, outcome: str) -> None:
    """Add a conversation of `length` ids of which `kept` are trained, with the outcome of fit_conversation."""
    counts["conversations"] += 1
    counts["text_tokens"] += kept
    if outcome == "whole":
        return
    counts[outcome] += 1
    # Counts that an earlier version began have no lengths: those of a part would be taken for those of the whole.
    if outcome != "no_target" and "longer" in counts:
        counts[f"{outcome}_tokens"] += length - kept
        row = str(-(-(length - 1) // LENGTH_STEP) * LENGTH_STEP)
        counts["longer"][row] = counts["longer"].get(row, 0) + 1


class ConversationPacker:
    """Best fit with padding inside a block of conversations; interface as packing.Packer, fed rendered conversations."""

    def __init__(self, *, row_tokens: int, pad: int, dtype, documents: int):
        self.row_tokens, self.pad, self.dtype, self.documents = row_tokens, pad, np.dtype(dtype), documents
        self.block: list[tuple[np.ndarray, np.ndarray, Origin]] = []
        self.counts: dict[str, int] = {}

    def add(self, ids: list[int], trained: list[bool], origin: Origin) -> list[PackedRows]:
        self.block.append((np.array(ids, dtype=self.dtype), np.array(trained, dtype=bool), origin))
        return self.finish() if len(self.block) >= self.documents else []

    def finish(self) -> list[PackedRows]:
        if not self.block:
            return []
        pieces = [ids for ids, _, _ in self.block]
        masks = [trained for _, trained, _ in self.block]
        origins = [origin for _, _, origin in self.block]
        self.block = []
        width = self.row_tokens + 1
        bins = best_fit([len(p) for p in pieces], width)
        rows, used = fill_rows(pieces, bins, width=width, pad=self.pad, dtype=self.dtype)
        trained, _ = fill_rows(masks, bins, width=width, pad=0, dtype=bool)
        starts = np.zeros(rows.shape, dtype=bool)
        for row, numbers in zip(starts, bins, strict=True):
            at = 0
            for number in numbers:
                row[at] = True
                at += len(pieces[number])
            if at < width:
                row[at] = True  # the padding is a segment of its own
        first = np.array([origins[numbers[0]] for numbers in bins], dtype=np.int32)
        return [PackedRows(rows, first, used, trained, starts)]

    def state(self) -> dict[str, np.ndarray]:
        flat, lengths = ragged([ids for ids, _, _ in self.block], self.dtype)
        masks, _ = ragged([trained for _, trained, _ in self.block], np.uint8)
        origins = np.array([origin for _, _, origin in self.block], np.int32).reshape(-1, 3)
        return {"ids": flat, "lengths": lengths, "trained": masks, "origins": origins}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        ids = unragged(state["ids"], state["lengths"])
        masks = [mask.astype(bool) for mask in unragged(state["trained"], state["lengths"])]
        origins = [tuple(o) for o in state["origins"].tolist()]
        self.block = list(zip(ids, masks, origins, strict=True))
