"""Texts that the model wrote: while training, and by command."""

from typing import Any

from pipeline.report.run_data import RunData
from pipeline.report.tables import number, table


def samples_text(data: RunData) -> str:
    """Each prompt with its first and its last text of the training; then the newest texts by command of each model."""
    return "\n".join(part for part in (_while_training(data.samples), *_by_command(data.evals)) if part)


def _while_training(samples: list[dict[str, Any]]) -> str:
    if not samples:
        return ""
    first, last = samples[0]["step"], samples[-1]["step"]
    texts: dict[str, dict[int, str]] = {}
    for row in samples:
        texts.setdefault(row["prompt"], {})[row["step"]] = row["text"]
    steps = [first] if first == last else [first, last]
    rows = [[prompt, *(by_step.get(step) for step in steps)] for prompt, by_step in texts.items()]
    return table(["prompt", *(f"step {step}" for step in steps)], rows)


def _by_command(entries: list[dict[str, Any]]) -> list[str]:
    newest = {entry.get("subject"): entry for entry in entries if entry.get("samples")}
    parts = []
    for subject, entry in newest.items():
        step = "" if entry.get("step") is None else f", step {number(entry['step'])}"
        rows = [[row.get("prompt"), _how(row), row.get("text")] for row in entry["samples"]]
        parts.append(f"By command, {subject}{step}:\n\n" + table(["prompt", "chosen", "text"], rows))
    return parts


def _how(row: dict[str, Any]) -> str | None:
    temperature = row.get("temperature")
    if temperature is None:
        return None
    chosen = "the likeliest" if temperature == 0 else f"sampled, temperature {temperature:g}"
    return chosen + (f", top_k {row['top_k']}" if row.get("top_k") else "") + (", as a chat" if row.get("chat") else "")
