"""The files of a run directory as a report may use them: what no run writes (text for a step, a list for a name) is left out.

A run directory may be a stranger's, and a report of half of it is worth more than none.
"""

from pathlib import Path
from typing import Any

from pipeline.artifacts.atomic import read_json
from pipeline.artifacts.columns import MOST_INTEGER
from pipeline.artifacts.manifest import documented_part, manifest_problems
from pipeline.artifacts.rows import counts_beside, read_rows
from pipeline.artifacts.run_directory import RunDirectory
from pipeline.recipe.located_yaml import load_mapping

# Keys of a recipe that a report computes with.
NUMBERS = ("run.gpu_hour_cost", "monitor.gpu_hz", "train.max_grad_norm", "train.max_steps", "train.seed", "train.save_steps", "train.eval_steps",
           "train.logging_steps", "train.warmup_steps", "train.learning_rate", "data.row_tokens", "data.batch_tokens", "optimizer.schedule.warmup_steps")  # fmt: skip
TEXTS = ("run.name", "run.note", "run.stage", "model.start_from", "hub.id", "train.save_strategy", "optimizer.type", "model.type")  # fmt: skip
OBJECTS = ("optimizer.schedule", "optimizer.groups", "evals.chat", "evals.core")


def read_failure(run: RunDirectory) -> dict[str, Any] | None:
    """failure.json; None where there is none, or it was torn by a crash."""
    found = read_json_or_none(run.failure)
    if not found:
        return None
    status, facts = found.get("status"), found.get("facts")
    return {
        "status": status if is_whole_number(status) else None,
        "class": str(found.get("class")),
        "message": str(found.get("message")),
        "facts": facts if isinstance(facts, dict) else None,
        **{name: value for name, value in found.items() if name not in ("status", "class", "message", "facts")},
    }


def read_manifest(run: RunDirectory) -> tuple[dict[str, Any], list[str]]:
    """What run_manifest.json holds as documented, and what is left out; ({}, []) where it was torn by a crash."""
    manifest = read_json_or_none(run.manifest) or {}
    problems = manifest_problems(manifest)
    if problems:
        manifest = documented_part(manifest)
    inputs = manifest.get("inputs") or {}
    for use in ("sources", "validation"):
        if use in inputs:
            inputs[use] = [_source(source) for source in inputs[use]]
    return manifest, problems


def _source(source: dict[str, Any]) -> dict[str, Any]:
    """A source's facts, which sources/ describes and the manifest's own check does not look into."""
    files = source.get("files")
    texts = {
        name: source[name] for name in ("name", "id", "fingerprint", "format") if isinstance(source.get(name), str)
    }
    rest = {
        name: value for name, value in source.items() if name not in ("files", "name", "id", "fingerprint", "format")
    }
    return {**texts, **rest, "files": [f for f in files if isinstance(f, dict)] if isinstance(files, list) else []}


def read_recipe(run: RunDirectory) -> dict[str, Any]:
    """recipe.yaml by sections; none of it where it is no YAML, or YAML without bounds."""
    try:
        return _documented(load_mapping(run.recipe))
    except (FileNotFoundError, ValueError):  # its damage is one
        return {}


def _documented(recipe: dict[str, Any]) -> dict[str, Any]:
    """The sections, without values of another type where a report needs a certain one."""
    sections: dict[str, Any] = {name: value for name, value in recipe.items() if isinstance(value, dict)}
    for names, fits in ((OBJECTS, is_object), (NUMBERS, is_number), (TEXTS, is_text)):
        for dotted in names:
            *parents, last = dotted.split(".")
            node: Any = sections
            for parent in parents:
                node = node.get(parent) if isinstance(node, dict) else None
            if isinstance(node, dict) and node.get(last) is not None and not fits(node[last]):
                del node[last]
    return sections


def read_samples(run: RunDirectory, attempts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Texts that the model wrote while training, of the attempts that count."""
    return [
        row
        for row in read_rows(run.samples)
        if is_whole_number(row.get("step"))
        and is_whole_number(row.get("attempt", 0))
        and is_text(row.get("prompt"))
        and is_text(row.get("text"))
        and all(counts_beside(row, a) for a in attempts if a.get("attempt", 0) > row.get("attempt", 0))
    ]


def read_evals(run: RunDirectory, attempts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries of evals.json, with those of their results that are numbers by name.

    An entry of a model that a later attempt went back behind says nothing about the run's models.
    """
    found = (read_json_or_none(run.evals) or {}).get("entries")
    entries = [_entry(entry) for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []
    return [
        entry
        for entry in entries
        if entry.get("step") is None
        or all(counts_beside(entry, a) for a in attempts if a.get("time", 0) > entry.get("time", float("inf")))
    ]


def _entry(entry: dict[str, Any]) -> dict[str, Any]:
    kept = {
        name: value
        for name, value in entry.items()
        if {"step": is_whole_number, "time": is_number, "versions": is_object}.get(name, lambda value: True)(value)
    }
    for name in ("subject", "command", "device"):
        if not is_text(kept.get(name, "")):
            kept[name] = None
    results, samples = entry.get("results"), entry.get("samples")
    kept["results"] = [r for r in results if _is_result(r)] if isinstance(results, list) else []
    kept["samples"] = [s for s in samples if _is_text_by_command(s)] if isinstance(samples, list) else []
    return kept


def _is_result(row: Any) -> bool:
    if not isinstance(row, dict) or not is_text(row.get("name")) or not is_number(row.get("value")):
        return False
    numbers = ("items", "bytes", "low", "high", "stderr", "centered", "tokens", "seconds")
    if not isinstance(row.get("protocol_parts", {}), dict):
        return False
    texts = ("protocol", "dtype")
    return all(row.get(n) is None or is_number(row[n]) for n in numbers) and all(
        is_text(row.get(t) or "") for t in texts
    )


def _is_text_by_command(row: Any) -> bool:
    return isinstance(row, dict) and is_text(row.get("prompt")) and is_text(row.get("text"))


def read_json_or_none(path: Path) -> dict[str, Any] | None:
    """The object in the file; None when it is missing or was torn by a crash."""
    try:
        return read_json(path)
    except (FileNotFoundError, ValueError):
        return None


def is_number(value: Any) -> bool:
    return isinstance(value, float) or is_whole_number(value)


def is_whole_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MOST_INTEGER


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_object(value: Any) -> bool:
    return isinstance(value, dict)
