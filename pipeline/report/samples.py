"""Texts that the model wrote: before its fine-tuning where there was one, while training, and by command."""

from typing import Any

from pipeline.artifacts.parents import base_run
from pipeline.report.run_data import RunData, read_run
from pipeline.report.tables import filled_table, number, table

SHOWN_CHARS = 2000  # of a text; samples.jsonl has the whole


def samples_text(data: RunData) -> str:
    """Each prompt with its first and its last text of the training; then the newest texts by command of each model."""
    return "\n".join(part for part in (_while_training(data), *_by_command(data.evals)) if part)


def _while_training(data: RunData) -> str:
    if not data.samples:
        return ""
    first, last = data.samples[0]["step"], data.samples[-1]["step"]
    texts: dict[str, dict[int, str]] = {}
    for row in data.samples:
        texts.setdefault(row["prompt"], {})[row["step"]] = row["text"]
    steps = [first] if first == last else [first, last]
    parent = parent_of(data)
    before = {} if parent is None else _last_texts(parent)
    head = f"{parent.name}, before this run" if parent else "before"
    rows = [
        [prompt, _shown(before.get(prompt)), *(_shown(by_step.get(step)) for step in steps)]
        for prompt, by_step in texts.items()
    ]
    return filled_table(["prompt", head, *(f"step {step}" for step in steps)], rows)


def parent_of(data: RunData) -> RunData | None:
    """The run whose model this one began with, where it still lies and its model has the recorded hash."""
    base = base_run(data.run.path, data.manifest)
    return None if base is None else read_run(str(base.path))


def _last_texts(data: RunData) -> dict[str, str]:
    """The newest text of each prompt, while training or by command."""
    by_command = [row for entry in data.evals for row in entry.get("samples") or []]
    return {row["prompt"]: row["text"] for row in [*data.samples, *by_command] if "prompt" in row and "text" in row}


def _by_command(entries: list[dict[str, Any]]) -> list[str]:
    newest = {entry.get("subject"): entry for entry in entries if entry.get("samples")}
    parts = []
    for subject, entry in newest.items():
        step = "" if entry.get("step") is None else f", step {number(entry['step'])}"
        rows = [[row.get("prompt"), _how(row), _shown(row.get("text"))] for row in entry["samples"]]
        parts.append(f"By command, {subject}{step}:\n\n" + table(["prompt", "chosen", "text"], rows))
    return parts


def _shown(text: str | None) -> str | None:
    if text is None or len(text) <= SHOWN_CHARS:
        return text
    return f"{text[:SHOWN_CHARS]} [... {len(text) - SHOWN_CHARS:,} characters more]"


def _how(row: dict[str, Any]) -> str | None:
    temperature = row.get("temperature")
    if temperature is None:
        return None
    chosen = "the likeliest" if temperature == 0 else f"sampled, temperature {temperature:g}"
    return chosen + (f", top_k {row['top_k']}" if row.get("top_k") else "") + (", as a chat" if row.get("chat") else "")
