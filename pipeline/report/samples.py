"""Texts that the model wrote: before its fine-tuning where there was one, while training, and by command."""

from typing import Any

from pipeline.report.markdown import filled_table, joined, number, table
from pipeline.report.run_data import RunData

SHOWN_CHARS = 2000  # of a text; samples.jsonl has the whole


def samples_text(data: RunData) -> str:
    """Return each prompt with its first and its last text of the training; then the newest texts by command of each
    model."""
    return joined(_while_training(data), *_by_command(data.evals))


def _while_training(data: RunData) -> str:
    if not data.samples:
        return ""
    # The first texts and the last: what training changed.
    steps = list(dict.fromkeys([data.samples[0]["step"], data.samples[-1]["step"]]))
    head, before = "before", dict[str, str]()
    if parent := data.parent:
        head, before = f"{parent.name}, before this run", last_texts(parent)
    rows = []
    for prompt, by_step in texts_of(data.samples).items():
        rows.append([prompt, *map(_shown, [before.get(prompt), *map(by_step.get, steps)])])
    return filled_table(["prompt", head, *(f"step {step}" for step in steps)], rows)


def texts_of(samples: list[dict[str, Any]]) -> dict[str, dict[int, str]]:
    """Return the text of each prompt by step, in the order of the rows."""
    texts: dict[str, dict[int, str]] = {}
    for row in samples:
        texts.setdefault(row["prompt"], {})[row["step"]] = row["text"]
    return texts


def last_texts(data: RunData) -> dict[str, str]:
    """Return the newest text of each prompt, while training or by command."""
    rows = [*data.samples]
    for entry in data.evals:
        rows += entry.get("samples") or []
    return {row["prompt"]: row["text"] for row in rows if "prompt" in row and "text" in row}


def _by_command(entries: list[dict[str, Any]]) -> list[str]:
    newest = {entry.get("subject"): entry for entry in entries if entry.get("samples")}
    parts = []
    for subject, entry in newest.items():
        whose = str(subject)
        if entry.get("step") is not None:
            whose = f"{subject}, step {number(entry['step'])}"
        rows = [[row.get("prompt"), _how(row), _shown(row.get("text"))] for row in entry["samples"]]
        parts.append(f"By command, {whose}:\n\n" + table(["prompt", "chosen", "text"], rows))
    return parts


def _shown(text: str | None) -> str | None:
    if text is None or len(text) <= SHOWN_CHARS:
        return text
    return f"{text[:SHOWN_CHARS]} [... {len(text) - SHOWN_CHARS:,} characters more]"


def _how(row: dict[str, Any]) -> str | None:
    temperature = row.get("temperature")
    if temperature is None:
        return None
    chosen = ["the likeliest" if temperature == 0 else f"sampled, temperature {temperature:g}"]
    if row.get("top_k"):
        chosen.append(f"top_k {row['top_k']}")
    if row.get("chat"):
        chosen.append("as a chat")
    return ", ".join(chosen)
