"""What differs between runs: settings, data, code, hardware, in groups; and how many of the major variables do.

A fact of the manifest (what was really read, the horizon in steps, the type computed in) outranks the settings that it follows
from: the same files under another path are the same data. In an imported log what is not told counts as equal.
"""

from collections.abc import Sequence
from fnmatch import fnmatch
from typing import Any

from pipeline.report.imports.imported_run import is_imported
from pipeline.report.run_data import RunData
from pipeline.report.tables import cell, table

# The major variables, and which keys of recipe and facts belong to each; the first group that fits has a key.
MAJOR = {
    "seed": ("train.seed",),
    "batch and horizon": ("data.batch_tokens", "data.row_tokens", "train.gradient_accumulation_steps", "train.max_steps", "train.num_train_epochs", "run.tokens", "run.tokens_per_param", "run.flops", "fact: steps", "fact: tokens of a step"),
    "precision and kernels": ("train.bf16", "train.fp16", "train.fp8*", "train.tf32", "train.torch_compile*", "train.full_determinism", "train.gradient_checkpointing*", "model.attn_implementation", "model.embedding_dtype", "fact: dtype", "fact: compiled", "fact: attention"),
    "hardware": ("fact: device", "fact: processes"),
    "tokenizer": ("tokenizer.*", "fact: tokenizer"),
    "data": ("data.sources", "data.validation", "data.packing*", "data.isolate_documents", "data.max_row_overflow", "fact: training files", "fact: validation files"),
    "model shape": ("model.*", "fact: started from"),
    "optimizer and rates": ("optimizer.*", "train.learning_rate", "train.weight_decay", "train.adam_*", "train.lr_scheduler*", "train.warmup_*", "train.optim*", "train.max_grad_norm", "train.neftune_noise_alpha"),
}  # fmt: skip
CODE = "code"
OTHER = "other settings"
# fact: the settings that it decides, where every run tells it.
DECIDES = {
    "fact: training files": ("data.sources",),
    "fact: validation files": ("data.validation",),
    "fact: tokenizer": ("tokenizer.*",),
    "fact: steps": ("train.max_steps", "train.num_train_epochs", "run.tokens", "run.tokens_per_param", "run.flops"),
    "fact: tokens of a step": ("data.batch_tokens", "train.gradient_accumulation_steps"),
    "fact: dtype": ("train.bf16", "train.fp16"),
    "fact: compiled": ("train.torch_compile",),
    "fact: attention": ("model.attn_implementation",),
    "fact: started from": ("model.start_from",),
}
LONGEST = 90  # characters of a value in a table
NAMES_OF_RUNS = ("run.name", "run.note", "run.tags", "run.directory", "run.code_folder")


def differences_text(runs: Sequence[RunData]) -> str:
    """What the figures show where one major variable differs or none, and a table for each group in which something does."""
    told = [{**settings_of(data), **facts_of(data), **code_of(data)} for data in runs]
    parts = [*_verdict(runs), *_unknown(runs)]
    names = dict.fromkeys(name for values in told for name in values)
    groups: dict[str, list[list[Any]]] = {}
    for name in names:
        values = [values.get(name) for values in told]
        known = [v for v, data in zip(values, runs, strict=True) if v is not None or not is_imported(data)]
        if len({repr(value) for value in known}) > 1:
            groups.setdefault(group_of(name), []).append([name.removeprefix("fact: "), *map(_short, values)])
    for group in (*MAJOR, CODE, OTHER):
        if group in groups:
            parts.append(f"### Differs: {group}\n\n" + table(["", *(data.name for data in runs)], groups[group]))
    return "\n".join(parts)


def differing_majors(one: RunData, other: RunData) -> list[str]:
    """The major variables in which two runs differ, as far as both tell them."""
    facts = facts_of(one), facts_of(other)
    settings = settings_of(one), settings_of(other)
    both = [name for name in facts[0] if name in facts[1]]
    decided = [pattern for name in both for pattern in DECIDES.get(name, ())]
    found = {group_of(name) for name in both if facts[0][name] != facts[1][name]}
    for name in settings[0].keys() | settings[1].keys():
        if any(fnmatch(name, pattern) for pattern in decided):
            continue
        told = [name in values or not is_imported(data) for values, data in zip(settings, (one, other), strict=True)]
        if all(told) and settings[0].get(name) != settings[1].get(name):
            found.add(group_of(name))
    if {"seed", "tokenizer"} <= found and "data" not in found and _same_tokenizer_settings(*settings):
        found.remove("tokenizer")  # it was trained on the same text in the order of another seed
    return [group for group in MAJOR if group in found]


def repeats(runs: Sequence[RunData]) -> list[list[RunData]]:
    """Return the runs in groups that differ in nothing but train.seed, each seed once; order of first appearance."""
    groups: list[list[RunData]] = []
    for data in runs:
        for group in groups:
            if _repeats(group[0], data):
                if all(_seed_of(data) != _seed_of(other) for other in group):
                    group.append(data)
                break
        else:
            groups.append([data])
    return groups


def settings_of(data: RunData) -> dict[str, Any]:
    """The recipe's keys, flat; without the run's names."""
    return {name: value for name, value in leaves(data.recipe) if name not in NAMES_OF_RUNS}


def facts_of(data: RunData) -> dict[str, Any]:
    """What the manifest tells beside the recipe, of what is a major variable."""
    inputs, shape = data.manifest.get("inputs") or {}, data.manifest.get("shape") or {}
    found = {f"fact: {name}": shape.get(name) for name in ("device", "processes", "dtype", "compiled", "attention")}
    found["fact: steps"] = data.max_steps()
    found["fact: tokens of a step"] = inputs.get("batch_tokens")
    found["fact: tokenizer"] = (inputs.get("tokenizer") or {}).get("identity")
    found["fact: started from"] = (inputs.get("start_from") or {}).get("model.safetensors")
    recipe = data.recipe.get("data") or {}
    for name, key in (("sources", "training"), ("validation", "validation")):
        if inputs.get(name):
            found[f"fact: {key} files"] = [
                _source(source, spec)
                for source, spec in zip(inputs[name], _specs(recipe.get(name), len(inputs[name])), strict=True)
            ]
    return {name: value for name, value in found.items() if value is not None}


def code_of(data: RunData) -> dict[str, Any]:
    """Commit and versions."""
    found = {f"git.{name}": value for name, value in (data.manifest.get("git") or {}).items()}
    return found | {f"version.{name}": value for name, value in (data.manifest.get("versions") or {}).items()}


def group_of(name: str) -> str:
    for group, patterns in MAJOR.items():
        if any(fnmatch(name, pattern) for pattern in patterns):
            return group
    return CODE if name.startswith(("git.", "version.")) else OTHER


def leaves(value: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Dotted names and values of nested dicts."""
    found: list[tuple[str, Any]] = []
    for name, entry in value.items():
        found += leaves(entry, f"{prefix}{name}.") if isinstance(entry, dict) else [(prefix + name, entry)]
    return found


def warning(runs: Sequence[RunData]) -> str:
    """For the top of the page: that more than one major variable differs; "" where at most one does."""
    several = {name: majors for name, majors in _majors(runs).items() if len(majors) > 1}
    if not several:
        return ""
    told = "; ".join(f"{cell(name)}: {', '.join(majors)}" for name, majors in several.items())
    return (
        f"**Warning: more than one major variable differs from {cell(runs[0].name)}** ({told}). What the figures show cannot be "
        "laid to any one of them. Change one at a time, and say in run.note which question the run is to answer.\n"
    )


def _majors(runs: Sequence[RunData]) -> dict[str, list[str]]:
    """The major variables in which each run differs from the first, by its name; the seed only where it is the only one.

    Repeats with other seeds measure the noise against which another variable's effect is judged.
    """
    by_run = {data.name: differing_majors(runs[0], data) for data in runs[1:]}
    return {name: [major for major in majors if major != "seed"] or majors for name, majors in by_run.items()}


def _repeats(one: RunData, other: RunData) -> bool:
    if is_imported(one) or is_imported(other) or _seed_of(one) is None or _seed_of(other) is None:
        return False  # a log does not tell its seed
    same_code = code_of(one).get("git.commit") == code_of(other).get("git.commit")
    return same_code and one.stage == other.stage and not set(differing_majors(one, other)) - {"seed"}


def _seed_of(data: RunData) -> Any:
    return (data.recipe.get("train") or {}).get("seed")


def _verdict(runs: Sequence[RunData]) -> list[str]:
    by_run = _majors(runs)
    if any(len(majors) > 1 for majors in by_run.values()):
        return []
    if not any(by_run.values()):
        return [
            "No major variable differs: data, tokenizer, model shape, batch and horizon, optimizer and rates, precision and kernels, hardware and seed are the same, as far as they are told.\n"
        ]
    shown = {name: majors[0] for name, majors in by_run.items() if majors}
    shown = {name: major for name, major in shown.items() if major != "seed"} or shown
    told = "; ".join(f"{cell(name)}: {major}" for name, major in shown.items())
    line = f"One major variable differs from {cell(runs[0].name)} ({told})"
    if not any(set(majors) - {"seed"} for majors in by_run.values()):
        return [f"{line}: how far the figures lie apart is what another seed does.\n"]
    if all(len(group) > 1 for group in repeats(runs)):
        return [f"{line}: what the figures show beyond the noise of the seed is its effect.\n"]
    return [
        f"{line}. Not every recipe has repeats with other seeds here: one run of each cannot tell the variable's effect from the seed's.\n"
    ]


def _unknown(runs: Sequence[RunData]) -> list[str]:
    names = [cell(data.name) for data in runs if is_imported(data)]
    return (
        [f"Imported: {', '.join(names)}. What their logs do not tell stands as - and counts as equal.\n"]
        if names
        else []
    )


def _source(source: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    """Files without their order, which the seed decides, and how much of them is taken."""
    files = sorted(str(file.get("sha256") or file.get("label")) for file in source.get("files") or [])
    taken = {name: spec[name] for name in ("weight", "epochs", "at_end") if spec.get(name) is not None}
    if any(len(file) == 64 for file in files) or not source.get("fingerprint"):
        return {"files": [file[:16] for file in files], "format": source.get("format"), **taken}
    return {"fingerprint": source["fingerprint"][:16], **taken}


def _specs(specs: Any, count: int) -> list[dict[str, Any]]:
    return specs if isinstance(specs, list) and len(specs) == count else [{}] * count


def _same_tokenizer_settings(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one.get(n) == other.get(n) for n in one.keys() | other.keys() if n.startswith("tokenizer."))


def _short(value: Any) -> Any:
    if value is None:
        return None
    text = str(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
