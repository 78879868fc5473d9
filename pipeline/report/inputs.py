"""What a run was fed: each source's share of the rows, and the tokenizer."""

from typing import Any

from pipeline.report.run_data import RunData
from pipeline.report.tables import filled_table, number, percent, table


def data_shares_text(data: RunData) -> str:
    """Where the text came from, and what of it became rows."""
    inputs, shares = data.manifest.get("inputs") or {}, data.manifest.get("shares") or {}
    rows = []
    for use, key in (("training", "sources"), ("validation", "validation")):
        for source in inputs.get(key) or []:
            share = (shares.get(source.get("name")) or {}) if use == "training" else {}
            rows.append(
                [
                    source.get("name"),
                    use,
                    number(len(source.get("files", []))),
                    percent(share.get("share")),
                    number(share.get("rows")),
                    number(share.get("tokens")),
                    number(share.get("epochs")),
                    _lost(share),
                ]
            )
    consumed = [
        [name.split("/", 2)[2], number(data.last(name))]
        for name in data.columns.names()
        if name.startswith("data/source/")
    ]
    head = ["source", "use", "files", "share of rows", "rows", "tokens", "epochs", "padded or lost"]
    parts = [filled_table(head, rows), table(["consumed so far", "number"], consumed) if consumed else ""]
    if inputs.get("batch_tokens"):
        parts.insert(1, f"A step takes {number(inputs['batch_tokens'])} row positions.\n")
    return "\n".join(part for part in parts if part)


def _lost(share: dict[str, Any]) -> str | None:
    return ", ".join(f"{name} {percent(part)}" for name, part in (share.get("lost") or {}).items()) or None


def tokenizer_text(data: RunData) -> str:
    found = (data.manifest.get("inputs") or {}).get("tokenizer") or {}
    asked = data.recipe.get("tokenizer") or {}
    rows = [
        ["ids", number(found.get("size"))],
        ["identity", str(found["identity"])[:16] if found.get("identity") else None],
        *([name, asked.get(name)] for name in ("path", "revision", "split_pattern")),
        ["characters trained on", None if asked.get("path") else number(asked.get("train_chars"))],
    ]
    known = [row for row in rows if row[1] is not None]
    return table(["tokenizer", "value"], known) if known else ""
