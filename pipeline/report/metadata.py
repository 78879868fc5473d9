"""What a run is, before any curve: name, hardware, hyperparameters, data by identity, notes; and where else it is told."""

import json
import re
import shlex
from typing import Any

import yaml

from pipeline.report.run_data import RunData
from pipeline.report.tables import code, date, number, table

HARDWARE = ("shape", "host", "world_size", "hardware", "devices")
# Manifest entries that have a place of their own in the report, or that only a machine reads.
TOLD_ELSEWHERE = {"must_match", "results", "versions", "inputs", "shares", "forked_from", "name", "stage", "note"}
TOLD_ELSEWHERE |= {
    "wandb_id",
    "wandb_url",
    "plan",
    "model",
    "peak_memory_bytes",
    "imported",
    "created",
    "ended",
    "finished",
    *HARDWARE,
}
DATA_HEAD = ("data", "use", "id", "revision", "fingerprint")
# Keys of the recipe that make a run what it is; all of them stand in the section on the recipe.
HYPERPARAMETERS = re.compile(
    r"model\.(?!.*attn_implementation)|data\.(row_tokens|batch_tokens|packing)$"
    r"|optimizer\.(type|rate_scale|schedule\.|groups\.\w+\.(learning_rate|weight_decay)$)"
    r"|train\.(learning_rate|weight_decay|lr_scheduler|warmup|max_|seed$|per_device_train_batch_size$|bf16$|fp16$|fp8$)"
)


def metadata_text(data: RunData) -> str:
    """Three tables: the run and its hardware, its hyperparameters, its data."""
    manifest = data.manifest
    rows: list[list[Any]] = [["run", data.name], ["stage", data.stage], ["note", manifest.get("note")]]
    rows += [[name, date(manifest[name])] for name in ("created", "ended") if manifest.get(name)]
    rows += [[name, value] for key in HARDWARE for name, value in flat({key: manifest.get(key)})]
    rows += [[name, value] for name, value in flat(manifest) if name.split(".")[0] not in TOLD_ELSEWHERE]
    rows.append(["run directory", data.run.path])
    if parent := manifest.get("forked_from"):
        rows.append(["forked from", f"{parent.get('run')} at step {parent.get('step')}"])
        rows += [["changed against it", line] for line in parent.get("differences", [])]
    if start := (data.recipe.get("model") or {}).get("start_from"):
        rows.append(["weights started from", start])
    chosen = [[name, value] for name, value in flat(data.recipe) if HYPERPARAMETERS.match(name)]
    texts = data_rows(data)
    parts = [
        table(["what", "value"], [row for row in rows if row[1] is not None]),
        table(["hyperparameter", "value"], chosen) if chosen else "",
        table(DATA_HEAD, texts) if texts else "",
    ]
    return "\n".join(part for part in parts if part)


def data_rows(data: RunData) -> list[list[Any]]:
    """Each source of text by identity, under DATA_HEAD."""
    inputs = data.manifest.get("inputs") or {}
    return [
        [
            source.get("name"),
            use,
            source.get("id"),
            source.get("revision"),
            str(source.get("fingerprint") or "")[:16] or None,
        ]
        for use, key in (("training", "sources"), ("validation", "validation"))
        for source in inputs.get(key) or []
    ]


def flat(value: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Every entry that says something, as (dotted name, value)."""
    found: list[tuple[str, Any]] = []
    for name, entry in value.items():
        if isinstance(entry, dict):
            found += flat(entry, f"{prefix}{name}.")
        elif entry not in (None, [], ""):
            text = " ".join(map(str, entry)) if isinstance(entry, list) else entry
            found.append((prefix + name, date(text) if name in ("ended", "time") else text))
    return found


def links_text(data: RunData) -> str:
    """Where else the run can be looked at: the Hub, W&B, TensorBoard."""
    rows: list[list[Any]] = []
    if repository := (data.recipe.get("hub") or {}).get("id"):
        rows.append(["Hub", repository])
    rows += [
        ["W&B " + key, data.manifest[f"wandb_{key}"]] for key in ("id", "url") if data.manifest.get(f"wandb_{key}")
    ]
    if data.run.tensorboard.is_dir():
        rows.append(["TensorBoard", f"tensorboard --logdir {shlex.quote(str(data.run.tensorboard))}"])
    return table(["where", "what"], rows) if rows else ""


def failure_text(data: RunData) -> str:
    return code(json.dumps(data.failure, indent=2, ensure_ascii=False)) if data.failure else ""


def recipe_text(data: RunData) -> str:
    return code(yaml.safe_dump(data.recipe, sort_keys=False, allow_unicode=True), "yaml") if data.recipe else ""


def versions_text(data: RunData) -> str:
    versions = data.manifest.get("versions") or {}
    return table(["package", "version"], list(versions.items())) if versions else ""


def results_text(data: RunData) -> str:
    """The final numbers, but for the benchmarks, which have a section of their own."""
    from pipeline.report.benchmark_rows import suite_of

    results = flat(data.manifest.get("results") or {})
    if data.benchmarks():
        results = [(name, value) for name, value in results if suite_of(name) is None]
    return table(["what", "value"], [[name, number(value)] for name, value in results]) if results else ""
