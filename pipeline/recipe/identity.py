"""The identity of a run: the keys that must match when it is continued, and its default name."""

import hashlib
import json
import re
import unicodedata
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from pipeline.recipe.keys import REMOVED
from pipeline.recipe.schema import ARGUMENTS, Recipe

# Computed at the first start when the recipe gives what they follow from; a recipe that leaves them open keeps them.
KEPT_WHEN_OPEN = (
    "data.batch_tokens", "train.max_steps", "model.n_layer", "model.n_embd", "model.n_head", "model.n_kv_head",
    "model.n_positions", "tokenizer.vocab_size",
)  # fmt: skip


# Keys that were added later: at their default they are left out, and runs begun before keep their names and go on.
LATER: dict[str, Any] = {
    "model.adapter": None,
    "model.embedding_dtype": "float32",
    "optimizer.decay_scale": None,
    "optimizer.schedule.batch_warmup_steps": 0,
    "optimizer.schedule.batch_halvings": 2,
    "samples.held_out": 0,
    "run.minutes": None,
}
LATER_OF_A_SOURCE = ("columns", "passes")


def resume_keys(recipe: Recipe) -> dict[str, Any]:
    """Return the keys that must match, flat and dotted, with their values as JSON knows them."""
    found: dict[str, Any] = {}

    def walk(value: Any, prefix: str) -> None:
        for f in fields(value):
            child = getattr(value, f.name)
            if f.metadata.get("internal") or f.name == "train":
                continue
            if is_dataclass(child):
                walk(child, f"{prefix}{f.name}.")
            elif f.metadata.get("must_match"):
                found[f"{prefix}{f.name}"] = _json(child)

    # Keys of the schema, then those of `train:`, which have their own table.
    walk(recipe, "")
    for name, argument in ARGUMENTS.items():
        if argument.must_match and name in recipe.train:
            found[f"train.{name}"] = recipe.train[name]
    if recipe.optimizer.type == "trainer":  # groups and schedule are not used then
        found = {k: v for k, v in found.items() if not k.startswith("optimizer.") or k == "optimizer.type"}
    return {name: value for name, value in found.items() if name not in LATER or value != LATER[name]}


def differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return `key: saved -> now` for every key that differs; a value kept from the first start is no difference,
    nor is the default of a key that is gone or was added later."""
    lines = []
    for name in sorted(saved.keys() | now.keys()):
        before, after = (keys.get(name, LATER.get(name)) for keys in (saved, now))
        if name in KEPT_WHEN_OPEN and (before is None or after is None):
            continue
        if before != after and before != REMOVED.get(name, (after,))[0]:
            lines.append(f"{name}: {json.dumps(before)} -> {json.dumps(after)}")
    return lines


def default_name(recipe: Recipe) -> str:
    """Return `<recipe>-<6 hex digits of the keys that must match>`; a fork's are others than its parent's.

    Of the file's name only what run.name may hold, since the run's recipe.yaml gives it there.
    """
    keys = resume_keys(recipe)
    if recipe.run.fork_from:
        keys["run.fork_from"] = recipe.run.fork_from
    text = json.dumps(keys, sort_keys=True)
    # An accented letter becomes the letter; what is no ASCII then is dropped.
    stem = unicodedata.normalize("NFKD", Path(recipe.path or "recipe").stem).encode("ascii", "ignore").decode()
    stem = re.sub(r"^[^A-Za-z0-9_]+|[^A-Za-z0-9_.\-]+$", "", stem)
    stem = re.sub(r"[^A-Za-z0-9_.\-]+", "-", stem) or "recipe"
    stem = stem[:190]  # a folder's name ends at 255
    return f"{stem}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def _json(value: Any) -> Any:
    if is_dataclass(value):
        # A source's name is for tables only.
        given = {f.name: getattr(value, f.name) for f in fields(value) if f.name != "name"}
        return {name: _json(v) for name, v in given.items() if v not in (None, 1) or name not in LATER_OF_A_SOURCE}
    if isinstance(value, list):
        return [_json(v) for v in value]
    return value
