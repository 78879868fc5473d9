"""Some texts that the published model wrote, as text that nothing in them can break out of."""

import textwrap
from typing import Any

from pipeline.hub.card.published import Published
from pipeline.report.tables import cell, code, number, visible

SHOWN = 5  # samples
SHOWN_CHARS = 600  # of a text
COLUMNS = 100


def samples_text(card: Published) -> str:
    """The first of the fixed prompts with what was written last; "" for a run that sampled nothing."""
    step, rows = _newest(card)
    if not rows:
        return ""
    rule = _rule(rows[0])
    rows = [row for row in rows if _rule(row) == rule]
    at = "" if step == card.step else f", written at step {number(step)}"
    said = f"The run's fixed prompts in their order, not selected{at}; long lines are wrapped. {rule}\n"
    asked = "Asked" if card.is_chat else "Prompt"
    return "\n".join([said, *(_sample(asked, row) for row in rows[:SHOWN])])


def _newest(card: Published) -> tuple[int | None, list[dict[str, Any]]]:
    """The step and the rows, each with how it was chosen: of the training, else of an evaluation of this very model."""
    by_step: dict[int, dict[str, dict[str, Any]]] = {}
    for row in card.data.samples:
        if "prompt" in row and "text" in row:
            by_step.setdefault(row.get("step", 0), {})[row["prompt"]] = row
    if by_step:
        settings = card.recipe("samples")
        chosen = {"temperature": settings.get("temperature", 0.0), "top_k": settings.get("top_k")}
        return max(by_step), [row | chosen for row in by_step[max(by_step)].values()]
    own = [e for e in card.data.evals if card.is_scored(subject=e.get("subject"), step=e.get("step"))]
    found = [entry["samples"] for entry in own if entry.get("samples")]
    return card.step, found[-1] if found else []


def _rule(row: dict[str, Any]) -> str:
    if not row.get("temperature"):
        return "Each token is the likeliest one."
    top_k = f" from the {row['top_k']} likeliest ones" if row.get("top_k") else ""
    return f"Each token is drawn{top_k} at temperature {row['temperature']:g}."


def _sample(asked: str, row: dict[str, Any]) -> str:
    # Two dollar signs would begin a formula on the Hub.
    prompt = cell(row["prompt"]).replace("$", "&#36;")
    text = row["text"].replace("\r\n", "\n")
    if len(text) > SHOWN_CHARS:
        text = f"{text[:SHOWN_CHARS]} [... {len(text) - SHOWN_CHARS:,} characters more]"
    if not text.strip():
        return f"{asked}: {prompt}\n\nIt ended at once.\n"
    lines = (_wrapped(line) for line in visible(text).split("\n"))
    return f"{asked}: {prompt}\n\n" + code("\n".join(lines), "text")


def _wrapped(line: str) -> str:
    """Every character stays; a block of code does not wrap by itself."""
    return "\n".join(textwrap.wrap(line, COLUMNS, drop_whitespace=False, replace_whitespace=False, expand_tabs=False))
