"""Bits per byte of the published model."""

import math

from pipeline.hub.card.published import Published
from pipeline.report.run_data import Score
from pipeline.report.scores import protocols_text
from pipeline.report.tables import filled_table

TEXTS = {
    "val/bpb": "packed into rows",
    "val/bpb_documents": "whole documents",
    "sft/assistant_bpb": "what the assistant says",
}


def bpb_of_model(card: Published) -> list[Score]:
    """The newest figure of each metric and protocol, one of the published files before others. One without a protocol says
    nothing to a stranger."""
    own = [s for s in card.data.scores() if card.is_scored(subject=s.of, step=s.step) and s.protocol is not None]
    own.sort(key=lambda score: score.of == "model/")
    return list({(score.name, score.protocol): score for score in own if math.isfinite(score.value)}.values())


def bpb_text(card: Published) -> str:
    rows = [[s.name, TEXTS.get(s.name), f"{s.value:.6f}", s.protocol] for s in bpb_of_model(card)]
    if not rows:
        return ""
    said = "Lower is better. A protocol names what was scored and how: compare figures of equal protocol only.\n\n"
    shown = filled_table(["metric", "of held-out text", "value", "protocol"], rows)
    return "\n".join(part for part in (said + shown, protocols_text(bpb_of_model(card))) if part)
