"""Values that follow from others: what model.start_from means, a run's identity, and defaults by batch, depth and
schedule."""

import hashlib
import json
import math
import os
import re
import unicodedata
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from glob import glob
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipeline.process.commands import command
from pipeline.process.errors import DataError, InputMissingError, RecipeError
from pipeline.process.storage import read_json
from pipeline.process.user_code import RECIPE_TRUST, CodeFolder
from pipeline.recipe.layers import COMMAND_LINE
from pipeline.recipe.located_yaml import Problems
from pipeline.recipe.model_sizes import sizes_of
from pipeline.recipe.schema import (
    ARGUMENTS,
    COLUMN_ROLES,
    FORMATS,
    OwnTask,
    ReadOnlyDict,
    Recipe,
    Schedule,
    Source,
    defaults,
    with_values,
)
from pipeline.recipe.sizes import LLAMA_NAMES, PORTABLE_PATTERNS, TANDEM_OPTIONS, Sizes, SizesUnknownError, options_of
from pipeline.recipe.values import REPOSITORY
from pipeline.run_dir.checkpoints import by_step
from pipeline.run_dir.run_directory import RunDirectory, find_run

if TYPE_CHECKING:
    from pipeline.recipe.counted_sizes import CountedSizes

# model.start_from: the folder that it means, and the sizes that come with its weights.

# Largest that is read of a config.json; models have at most some hundred layers.
SIZES = dict.fromkeys(("n_layer", "num_layers", "num_hidden_layers"), 10_000) | {"num_labels": 10**6}
WIDTHS = ("n_embd", "n_head", "n_positions", "hidden_size", "num_attention_heads", "max_position_embeddings")
SIZES |= dict.fromkeys((*WIDTHS, "vocab_size"), 2**40)
# Options of a training that say nothing of the weights: a finished model has no padding rows, whatever it was trained
# with.
NO_ARCHITECTURE = {"vocab_multiple"}


def resolve_start(recipe: Recipe) -> Recipe:
    """Return the recipe with model.start_from as the folder it means now, and the tokenizer from there unless one is
    named.

    A run gives its model/ folder, or its newest whole checkpoint when it has not finished; `latest:<name>` the last
    finished run of that recipe or stage. A run that has begun keeps the folder it began from. Raises
    InputMissingError; a Hub id is left as it is.
    """
    start = recipe.model.start_from
    if start is None:
        return recipe
    run = _run(recipe, start)
    if run is None and start.startswith("latest:"):
        name = start.removeprefix("latest:")
        raise InputMissingError(
            f"{recipe.where('model.start_from')}: {recipe.run.directory}/ has no finished run of a recipe or stage "
            f"{name!r}. Train it first (stage 1 is `{command('pretrain')} RECIPE`; runs of a sweep do not count), or "
            "name a run, a folder with a model or a Hub id."
        )
    if run is not None:
        folder = _kept(recipe, run) or (run.model if run.model.is_dir() else run.whole_checkpoint())
        if folder is None:
            raise InputMissingError(
                f"{recipe.where('model.start_from')}: run {start} has neither model/ nor a whole checkpoint yet. Let "
                "it train first."
            )
        recipe = with_values(recipe, {"model.start_from": str(folder)})
    elif not Path(start).is_dir() and not REPOSITORY.fullmatch(start):
        raise InputMissingError(
            f"{recipe.where('model.start_from')}: there is no run or folder {start}. Correct the path, or give a "
            "run's name or a Hub id like owner/name."
        )
    if recipe.tokenizer.path is None:
        places = {"tokenizer.path": recipe.places.get("model.start_from", ""), **recipe.places}
        recipe = with_values(recipe, {"tokenizer.path": recipe.model.start_from, "places": places})
    return recipe


def start_folder(recipe: Recipe) -> Path | None:
    """Return a folder with the config and tokenizer of model.start_from, if there is one here; no weights are looked
    at."""
    start = recipe.model.start_from
    if start is None:
        return None
    run = _run(recipe, start)
    folders = [Path(start)] if run is None else [run.model, *reversed(by_step(run.checkpoints))]
    return next((folder for folder in folders if (folder / "config.json").is_file()), None)


def refuse_odd_sizes(config: dict[str, Any], where: str) -> None:
    """Raise DataError for a config.json whose sizes no model has: building one of 10**9 layers takes all memory before
    it fails."""
    text = config.get("text_config")
    parts = [config, text] if isinstance(text, dict) else [config]
    for part, name in product(parts, SIZES):
        size = part.get(name)
        if size is not None and (type(size) is not int or not 0 < size <= SIZES[name]):
            raise DataError(
                f"{where}: {name} of its config.json is {str(size)[:40]!r}, and no model has that. Take another "
                "model, or correct the file."
            )


def becomes_tandem(recipe: Recipe) -> bool:
    """Return whether the model is one of Tandem's, as far as its type tells before it is loaded (model/build.py)."""
    model = recipe.model
    if model.start_from is None:
        return model.type == "tandem"
    return model.start_config is not None and model.start_config.get("model_type") in ("tandem", "gpt2", "nanochat")


def begun_run(recipe: Recipe) -> dict[str, Any]:
    """Return what the recipe's run was begun with, by dotted key; empty while it has not made a step."""
    if recipe.run.name is None:
        return {}
    run = RunDirectory(Path(recipe.run.directory) / recipe.run.name)
    begun = run.read_manifest().get("must_match", {})
    return begun if begun and run.has_trained() else {}


def fill_from_start(recipe: Recipe, fill: Any, found: Problems) -> None:
    """Take the sizes from the config of model.start_from, in place of those that an extended recipe gives.

    found gets what the recipe itself says otherwise: it could not be followed. What is not here (a Hub id, a run that
    is still to come) is compared when the model is loaded (check_sizes).
    """
    folder, model = start_folder(recipe), recipe.model
    if folder is None:
        _forget_inherited(recipe)
        return
    config = model.start_config = read_json(folder / "config.json")
    refuse_odd_sizes(config, f"{recipe.path}: model.start_from: {folder}")
    sizes = config.get("text_config") or config  # of a model that also reads pictures or sound
    for name, theirs in LLAMA_NAMES.items():
        value = sizes.get(name, sizes.get(theirs))
        if value is None and _is_own(recipe, f"model.{name}"):  # as GPT-2's config leaves them open
            value = {"n_kv_head": model.n_head, "n_inner": 4 * (model.n_embd or 0)}.get(name, getattr(model, name))
        if value != getattr(model, name) and not says_itself(recipe, f"model.{name}", value, found):
            setattr(model, name, None)
            if value is not None:
                fill(f"model.{name}", value, "model.start_from")
    for name, value in options_of(recipe, vocab_size=config.get("vocab_size")).items():
        if name in NO_ARCHITECTURE:
            continue
        key = f"model.options.{name}" if name in model.options else "model.preset"
        if config.get(name, value) != value:
            says_itself(recipe, key, config[name], found, what=f"{name}: {value}")
    _forget_inherited_options(recipe)
    if model.depth is not None and not says_itself(recipe, "model.depth", model.n_layer, found):
        model.depth = model.n_layer


def check_sizes(recipe: Recipe, config: Any) -> None:
    """Raises RecipeError when the loaded model is not of the sizes that the recipe stands on."""
    have = config.get_text_config()
    given = {name: getattr(recipe.model, name) for name in ("n_layer", "n_embd", "n_head", "n_kv_head")}
    wrong = [
        f"model.{name} is {value}, theirs {theirs}"
        for name, value in given.items()
        if value not in (None, theirs := getattr(have, LLAMA_NAMES[name], value))
    ]
    options = options_of(recipe, vocab_size=have.vocab_size) if recipe.model.preset != "gpt2" else recipe.model.options
    wrong += [
        f"{name} is {value}, theirs {theirs}"
        for name, value in options.items()
        if name not in NO_ARCHITECTURE and value != (theirs := getattr(have, name, value))
    ]
    if wrong:
        raise RecipeError(
            f"{recipe.where('model.start_from')}: the weights are of another model than the recipe's "
            f"({'; '.join(wrong)}). Leave these keys, model.preset and model.depth out: all of it comes with the "
            "weights."
        )


def _forget_inherited(recipe: Recipe) -> None:
    """Drop what an extended recipe says of the architecture, when the weights are on the Hub."""
    start, model = recipe.model.start_from, recipe.model
    if start is None or start.startswith("latest:") or _run(recipe, start) is not None:
        return
    for name in LLAMA_NAMES:
        if not _is_own(recipe, f"model.{name}"):
            setattr(model, name, None)
    _forget_inherited_options(recipe)


def _forget_inherited_options(recipe: Recipe) -> None:
    model = recipe.model
    if not _is_own(recipe, "model.preset"):
        model.preset = "gpt2"
    model.options = {k: v for k, v in model.options.items() if _is_own(recipe, f"model.options.{k}")}


def _is_own(recipe: Recipe, name: str) -> bool:
    return _layer(recipe, name) > 0


def says_itself(recipe: Recipe, name: str, value: Any, found: Problems, what: str | None = None) -> bool:
    """Return whether the recipe's own file or the command line gives the key; then its other value is a mistake."""
    if not _is_own(recipe, name):
        return False
    section, _, last = name.partition(".")
    shown = what or getattr(getattr(recipe, section), last)
    if shown != value:
        found.add(
            recipe.where(name),
            f"is {shown}, and what this run starts from has {value}. Leave the key out: it comes with the weights or "
            "the tokenizer.",
        )
    return True


def _run(recipe: Recipe, start: str) -> RunDirectory | None:
    begun = begun_run(recipe).get("model.start_from") if start.startswith("latest:") else None
    if begun is not None and Path(begun).is_dir():
        run = RunDirectory(Path(begun).parent)
        manifest = run.read_manifest()
        if start.removeprefix("latest:") in (manifest.get("recipe_name"), manifest.get("stage")):
            return run
    return find_run(start, recipe.run.directory)


def _kept(recipe: Recipe, run: RunDirectory) -> Path | None:
    """Return the folder of that run which the recipe's run began from."""
    begun = begun_run(recipe).get("model.start_from")
    if begun is None or not Path(begun).is_dir() or not Path(begun).resolve().is_relative_to(run.path.resolve()):
        return None
    return Path(begun)


# Identity of a run: the keys that must match when it is continued, and its default name.

# Computed at the first start when the recipe gives what they follow from; a recipe that leaves them open keeps them.
KEPT_WHEN_OPEN = (
    "data.batch_tokens", "train.max_steps", "model.n_layer", "model.n_embd", "model.n_head", "model.n_kv_head",
    "model.n_positions", "tokenizer.vocab_size",
)  # fmt: skip

# Keys that were added later: at their default they are left out, and runs begun before keep their names and go on.
LATER: dict[str, Any] = {
    "model.embedding_dtype": "float32",
    "optimizer.decay_scale": None,
    "optimizer.schedule.batch_warmup_steps": 0,
    "optimizer.schedule.batch_halvings": 2,
}
LATER_OF_A_SOURCE = ("columns", "passes")


def must_match(recipe: Recipe) -> dict[str, Any]:
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

    walk(recipe, "")
    for name, argument in ARGUMENTS.items():
        if argument.must_match and name in recipe.train:
            found[f"train.{name}"] = recipe.train[name]
    if recipe.optimizer.type == "trainer":  # groups and schedule are not used then
        found = {k: v for k, v in found.items() if not k.startswith("optimizer.") or k == "optimizer.type"}
    return {name: value for name, value in found.items() if name not in LATER or value != LATER[name]}


def differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """`key: saved -> now` for every key that differs; a value kept from the first start is no difference."""
    lines = []
    for name in sorted(saved.keys() | now.keys()):
        before, after = saved.get(name), now.get(name)
        if name in KEPT_WHEN_OPEN and (before is None or after is None):
            continue
        if before != after:
            lines.append(f"{name}: {json.dumps(before)} -> {json.dumps(after)}")
    return lines


def default_name(recipe: Recipe) -> str:
    """`<recipe>-<6 hex digits of the keys that must match>`; a fork's are others than its parent's.

    Of the file's name only what run.name may hold, since the run's recipe.yaml gives it there.
    """
    fork = {"run.fork_from": recipe.run.fork_from} if recipe.run.fork_from else {}
    text = json.dumps(must_match(recipe) | fork, sort_keys=True)
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


# Defaults that follow from other keys: batch, depth, schedule.

# The global batch, whether its documents see each other, and the horizon in optimizer steps.

KEY, AUTO = "train.per_device_train_batch_size", "auto"
HORIZON_KEYS = ("tokens", "tokens_per_param", "flops")


def rows_per_step(recipe: Recipe) -> int:
    """Return rows of one optimizer step over all processes. data.batch_tokens must be known."""
    assert recipe.data.batch_tokens, "data.batch_tokens is known once the number of processes is"
    return recipe.data.batch_tokens // recipe.data.row_tokens


@dataclass(frozen=True)
class StepRows:
    """Rows of each optimizer step, zero-based, over all processes: `full`, and in the first warmup_steps fewer. They
    begin halved `halvings` times, and are doubled after every warmup_steps / halvings steps. Arithmetic alone: a
    resume needs only the step.

    Source: batch size warmup, arXiv 2505.23971 (OLMo); modded-nanogpt PR 163.
    """

    full: int
    warmup_steps: int = 0
    halvings: int = 0

    def at(self, step: int) -> int:
        return self.full >> halvings_at(step, warmup_steps=self.warmup_steps, halvings=self.halvings)

    def before(self, step: int) -> int:
        """Return rows of the first `step` steps."""
        rows = max(0, step - self.warmup_steps) * self.full
        for part in range(self.halvings):
            first, end = (min(step, -(-n * self.warmup_steps // self.halvings)) for n in (part, part + 1))
            rows += (end - first) * (self.full >> (self.halvings - part))
        return rows

    def steps(self, rows: int) -> int:
        """Return how many whole steps so many rows make."""
        beyond = rows - self.before(self.warmup_steps)
        if beyond >= 0:
            return self.warmup_steps + beyond // self.full
        return bisect_right(range(self.warmup_steps + 1), rows, key=self.before) - 1


def halvings_at(step: int, *, warmup_steps: int, halvings: int) -> int:
    """Return how many times the batch of a step is halved."""
    return halvings - step * halvings // warmup_steps if step < warmup_steps else 0


def step_rows(recipe: Recipe, batch_tokens: int | None = None) -> StepRows:
    """Return the rows of the run's steps. batch_tokens: where data.batch_tokens is not known yet."""
    schedule = recipe.optimizer.schedule if recipe.optimizer.type != "trainer" else Schedule()
    full = rows_per_step(recipe) if batch_tokens is None else batch_tokens // recipe.data.row_tokens
    warmup = schedule.batch_warmup_steps
    return StepRows(full, warmup, schedule.batch_halvings if warmup else 0)


def tokens_at(recipe: Recipe, step: int) -> int:
    """Return row positions of the first `step` steps. data.batch_tokens must be known."""
    return step_rows(recipe).before(step) * recipe.data.row_tokens


def isolates_documents(recipe: Recipe) -> bool:
    """Return whether the documents of a packed row do not see each other: positions restart, and attention ends there.

    Rows of one text each have nothing to keep apart.
    """
    return (recipe.stage == "sft" or recipe.data.isolate_documents) and not recipe.data.one_text_rows


def is_auto(recipe: Recipe) -> bool:
    """Return whether the micro-batch is to be found (preflight/memory.py)."""
    return recipe.train.get("per_device_train_batch_size") == AUTO


def micro_batch(recipe: Recipe) -> int:
    """Return rows of one forward pass of one process: as given, or what `auto` came to."""
    rows = recipe.micro_batch if is_auto(recipe) else recipe.train["per_device_train_batch_size"]
    assert rows is not None, "auto is a number once the plan is made"
    return rows


def micro_steps(recipe: Recipe, world_size: int) -> int:
    """Micro-steps of an optimizer step: the rows of a step dealt to world_size processes, the last micro-step filled
    up."""
    return math.ceil(rows_per_step(recipe) / (world_size * micro_batch(recipe)))


def with_batch_tokens(recipe: Recipe, world_size: int) -> int:
    """Return the global batch in tokens: as given, or computed from train.gradient_accumulation_steps and the
    processes."""
    if recipe.data.batch_tokens:
        return recipe.data.batch_tokens
    return world_size * micro_batch(recipe) * recipe.train["gradient_accumulation_steps"] * recipe.data.row_tokens


def horizon_steps(recipe: Recipe, batch_tokens: int) -> int | None:
    """Optimizer steps of the run; None when it is given in epochs and only the data know.

    Raises ValueError when they follow from sizes that cannot be known (recipe/sizes.py).
    """
    if "max_steps" in recipe.train:
        return recipe.train["max_steps"]
    run, tokens = recipe.run, recipe.run.tokens
    if run.tokens_per_param is not None:
        sizes = sizes_of(recipe)
        if sizes.scaling is None:
            raise ValueError(f"the parameters that a token passes are not known: {sizes.unknown}")
        tokens = int(run.tokens_per_param * sizes.scaling)
    elif run.flops is not None:
        sizes = sizes_of(recipe)
        flops = sizes.flops_per_token("nanochat")
        if flops is None:
            raise ValueError(f"the FLOPs of a token are not known: {sizes.unknown}")
        tokens = int(run.flops / flops)
    return None if tokens is None else step_rows(recipe, batch_tokens).steps(tokens // recipe.data.row_tokens)


# The depth dial and the settings of the parameter groups.

REFERENCE_BATCH_TOKENS = 2**19
REFERENCE_DEPTH = 12
REFERENCE_WIDTH = 768
BATCH_EXPONENT = 0.383
TOKENS_PER_PARAM = 10.5
MATRIX_DECAY = 0.28
WIDTH_SCALED = ("embeddings", "value_embeddings", "head")

# Peak rates, betas and decay per group at width 768 and a batch of 2^19 tokens.
ADAM_GROUPS: dict[str, dict[str, Any]] = {
    "embeddings": {"learning_rate": 0.3, "betas": [0.8, 0.995], "eps": 1e-10, "weight_decay": 0.001},
    "value_embeddings": {"learning_rate": 0.15, "betas": [0.8, 0.995], "eps": 1e-10, "weight_decay": 0.01},
    "head": {"learning_rate": 0.008, "betas": [0.8, 0.96], "eps": 1e-10, "weight_decay": 0.01},
    # eps of the three below is not nanochat's 1e-10: at the first step every block adds zero and the norms undo any
    # scale, so the true gradient of the lambdas is zero, and 1e-10 turns its rounding noise into a full step
    # (docs/log.md, eps).
    "scalars": {"learning_rate": 0.005, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.05},
    "x0_lambdas": {"learning_rate": 0.5, "betas": [0.96, 0.95], "eps": 1e-6, "weight_decay": 0.0},
    "gates": {"learning_rate": 0.2, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.0},
}
# The optimizers over optimizer.groups, by optimizer.type, with the settings of the matrices; training/optimizer.py
# builds them.
MATRIX_GROUP: dict[str, dict[str, Any]] = {
    # A value of small models (docs/log.md: 0.27 BPB better than one rate for all at width 256); nothing larger has
    # been measured.
    "adamw": {"learning_rate": 3e-3, "betas": [0.9, 0.95], "eps": 1e-10, "weight_decay": 0.1},
    "muon_adamw": {"learning_rate": 0.02, "momentum": 0.97, "weight_decay": MATRIX_DECAY},
}

# fill(key, value) sets an open key by the dial; with cause=None by a plain default, which is not worth a line.
Fill = Callable[..., None]


def fill_sizes(recipe: Recipe, fill: Fill) -> None:
    """n_layer, n_embd and n_head from model.depth."""
    model = recipe.model
    if model.depth is None:
        return
    fill("model.n_layer", model.depth)
    width = model.n_embd or width_of(recipe, model.depth)
    fill("model.n_embd", width)
    if width % model.head_dim == 0:
        fill("model.n_head", width // model.head_dim)


def width_of(recipe: Recipe, depth: int) -> int:
    """Width at a depth: aspect_ratio per layer, rounded up to whole heads."""
    return math.ceil(depth * recipe.model.aspect_ratio / recipe.model.head_dim) * recipe.model.head_dim


def fill_batch(recipe: Recipe, fill: Fill) -> None:
    """data.batch_tokens: 2^19 x (N / N at depth 12)^0.383 to the nearest power of two, then to whole rows.

    nanochat's rule has training tokens D in place of parameters N; both depths have the same tokens per parameter.
    """
    ratio = _scaling(sizes_of(recipe)) / _scaling(sizes_at_depth(recipe, REFERENCE_DEPTH))
    batch = 2 ** round(math.log2(REFERENCE_BATCH_TOKENS * ratio**BATCH_EXPONENT))
    fill("data.batch_tokens", max(1, round(batch / recipe.data.row_tokens)) * recipe.data.row_tokens)


def fill_rates(recipe: Recipe, fill: Fill) -> None:
    """The rates' common factor and every group's settings.

    Under the dial rates follow sqrt(batch / 2^19), the gates' only up to 2^19, those of embeddings and head also
    (width / 768)^-0.5, and the decay of the matrices 0.28 x sqrt(batch / 2^19) x (D at depth 12 / D). Without it the
    reference values are taken as they are.
    """
    dial = recipe.model.depth is not None and recipe.tokenizer.vocab_size is not None
    batch = recipe.data.batch_tokens if dial else None
    batch_scale = math.sqrt(batch / REFERENCE_BATCH_TOKENS) if batch else 1.0
    fill("optimizer.rate_scale", batch_scale, "model.depth" if dial else None)
    for group, settings in {**ADAM_GROUPS, "matrices": MATRIX_GROUP[recipe.optimizer.type]}.items():
        for name, value in settings.items():
            scale = 1.0
            if dial and name == "learning_rate" and group in WIDTH_SCALED:
                scale = math.sqrt(REFERENCE_WIDTH / sizes_of(recipe).n_embd)
            if dial and name == "learning_rate" and group == "gates":
                # nanochat keeps 0.2 at every batch. Below those it was tuned at, where all other rates are smaller,
                # 0.2 drives backout past 1 before the blocks add anything: the last state changes its sign
                # (docs/log.md, gates).
                scale = min(1.0, 1 / batch_scale)
            if dial and name == "weight_decay" and group == "matrices" and recipe.optimizer.type == "muon_adamw":
                reference = _scaling(sizes_at_depth(recipe, REFERENCE_DEPTH))
                scale = batch_scale * reference / _scaling(sizes_of(recipe))
            value, cause = (value, None) if scale == 1 else (value * scale, "model.depth")
            fill(f"optimizer.groups.{group}.{name}", value, cause)


def group_settings(optimizer_type: str, group: str) -> set[str]:
    """Return names of the settings that a group has under an optimizer type."""
    return set(MATRIX_GROUP[optimizer_type] if group == "matrices" else ADAM_GROUPS[group])


def _scaling(sizes: "Sizes | CountedSizes") -> int:
    if sizes.scaling is None:
        raise SizesUnknownError(f"the parameters that a token passes are not known ({sizes.unknown})")
    return sizes.scaling


def sizes_at_depth(recipe: Recipe, depth: int) -> "Sizes | CountedSizes":
    width = width_of(recipe, depth)
    heads = width // recipe.model.head_dim
    model = replace(recipe.model, n_layer=depth, n_embd=width, n_head=heads, n_kv_head=None, n_inner=None)
    return sizes_of(replace(recipe, model=model))


# Fills what a recipe leaves open, in the order of the dial: stage, sizes, horizon, batch, rates, decay, name.

Stage = Literal["pretrain", "sft"]
DEFAULT_VOCAB_SIZE = 32768
TEXT_ID = "tandem:quickstart_text"
CHAT_IDS = ("tandem:quickstart_chat", "tandem:spelling")


def infer_stage(recipe: Recipe) -> Stage | None:
    """Return the stage that the sources speak of; None when they name neither columns nor formats."""
    for source in recipe.data.sources:
        kinds = {COLUMN_ROLES.get(role) for role in source.columns or ()} | {FORMATS.get(source.format or "")}
        if "chat" in kinds or source.messages_column or source.id in CHAT_IDS:
            return "sft"
        if "text" in kinds or source.text_column or source.id == TEXT_ID:
            return "pretrain"
    return None


def fill(recipe: Recipe, problems: Problems) -> None:
    """Sets every open value that follows from others and notes each in recipe.filled; problems gets what cannot
    follow."""

    def set_if_open(name: str, value: Any, cause: str | None = "model.depth") -> None:
        *path, last = name.split(".")
        target: Any = recipe
        for part in path:
            target = getattr(target, part)
        if getattr(target, last) is None:
            setattr(target, last, value)
            if cause:
                recipe.filled[name] = cause

    _leave_out_what_portable_has_not(recipe)
    trainer = recipe.optimizer.type == "trainer"
    recipe.train = {**defaults(trainer_optimizer=trainer), **recipe.train}
    _fill_places(recipe)
    if recipe.run.trust_code and recipe.places["run.trust_code"] != COMMAND_LINE:
        problems.add(
            recipe.where("run.trust_code"),
            f"is for you to give, not for a recipe, which may come from elsewhere. Write {RECIPE_TRUST}.",
        )
    recipe.code = code_folder_of(recipe)
    fill_from_start(recipe, set_if_open, problems)
    _fill_row_tokens(recipe)
    _fill_vocabulary(recipe, problems)
    fill_sizes(recipe, set_if_open)
    if recipe.model.n_positions is None and (recipe.model.n_layer or not recipe.model.start_from):
        recipe.model.n_positions = recipe.data.row_tokens
    if recipe.model.n_head and recipe.model.n_kv_head is None:
        recipe.model.n_kv_head = recipe.model.n_head
    try:
        _fill_dial(recipe, set_if_open, problems)
        _fill_steps(recipe, problems)
    except SizesUnknownError as error:
        problems.add(
            recipe.where("model.type"),
            f"{error}, and horizon or rates follow from them. Change the sizes or model.options.",
        )
    except ImportError as error:
        problems.add(
            recipe.where("model.type"),
            f"the sizes of a {recipe.model.type} are counted on its modules, and {error.name} is not installed. Give "
            "run.tokens or train.max_steps.",
        )
    _shorten_warmup(recipe)
    if recipe.run.name is None:
        recipe.run.name = _default_name(recipe)


def _default_name(recipe: Recipe) -> str:
    """Another one for another meaning of `latest:`; the same for a run that was unfinished and has finished since."""
    start = recipe.model.start_from
    folder = start_folder(recipe) if start and start.startswith("latest:") else None
    named = replace(recipe, model=replace(recipe.model, start_from=str(folder))) if folder else recipe
    return default_name(named)


def _leave_out_what_portable_has_not(recipe: Recipe) -> None:
    """Drop Tandem's options and a split pattern that llama.cpp has not, of an earlier layer (quickstart's, for one),
    where a later one says `model.preset: portable`."""
    model, tokenizer, pattern = recipe.model, recipe.tokenizer, "tokenizer.split_pattern"
    if model.preset != "portable":
        return
    for name in TANDEM_OPTIONS.keys() & model.options.keys():
        option = f"model.options.{name}"
        if _layer(recipe, option) < _layer(recipe, "model.preset"):
            del model.options[name]
            recipe.notes.append(
                f"{recipe.where(option)}: is of another preset, and left out under model.preset portable."
            )
    known = tokenizer.split_pattern in PORTABLE_PATTERNS
    if not known and _layer(recipe, pattern) < _layer(recipe, "model.preset"):
        tokenizer.split_pattern = PORTABLE_PATTERNS[0]
        recipe.notes.append(
            f"{recipe.where(pattern)}: is none that llama.cpp knows, and {PORTABLE_PATTERNS[0]} under model.preset "
            "portable."
        )


def _fill_row_tokens(recipe: Recipe) -> None:
    """The default is what the model can hold."""
    model, data = recipe.model, recipe.data
    if "data.row_tokens" not in recipe.places and model.n_positions and 8 <= model.n_positions < data.row_tokens:
        data.row_tokens = model.n_positions
        recipe.filled["data.row_tokens"] = recipe.filled.get("model.n_positions", "model.n_positions")


def _shorten_warmup(recipe: Recipe) -> None:
    """A horizon that a later layer names, as train.max_steps=20 does on the command line, shortens a warm-up that is
    longer."""
    steps, named = recipe.train.get("max_steps"), horizons(recipe)
    if not steps or not named:
        return
    name, warmup = warmup_of(recipe, steps)
    if warmup <= steps or _layer(recipe, named[0]) <= _layer(recipe, name):
        return
    if recipe.optimizer.type == "trainer":
        recipe.train["warmup_steps"] = steps // 5
    else:
        recipe.optimizer.schedule.warmup_steps = steps // 5
    recipe.notes.append(
        f"{recipe.where(name)}: {warmup} -> {steps // 5}, a fifth of the run: {named[0]} makes it {steps:,} steps."
    )


def _layer(recipe: Recipe, name: str) -> int:
    """Return a higher number for a later layer: the command line, the recipe's own file, one that it extends."""
    place = recipe.places.get(name, "")
    return 2 if place.startswith(COMMAND_LINE) else 1 if place.rpartition(":")[0] == recipe.path else 0


def warmup_of(recipe: Recipe, steps: int) -> tuple[str, int]:
    """Return the key that sets the warm-up, and its steps."""
    if recipe.optimizer.type != "trainer":
        return "optimizer.schedule.warmup_steps", recipe.optimizer.schedule.warmup_steps
    value = recipe.train["warmup_steps"]
    return "train.warmup_steps", math.ceil(value * steps) if value < 1 else int(value)


def _fill_vocabulary(recipe: Recipe, problems: Problems) -> None:
    tokenizer = recipe.tokenizer
    ready = tokenizer.path or start_folder(recipe) or recipe.model.start_from
    size = _ready_vocab(str(ready)) if ready else None
    if size is None:
        if not ready and tokenizer.vocab_size is None:
            tokenizer.vocab_size = DEFAULT_VOCAB_SIZE
    elif tokenizer.vocab_size != size and not says_itself(recipe, "tokenizer.vocab_size", size, problems):
        tokenizer.vocab_size = size


def horizons(recipe: Recipe) -> list[str]:
    """Return names of the horizons that are given."""
    named = [f"run.{name}" for name in HORIZON_KEYS if getattr(recipe.run, name) is not None]
    return named + [f"train.{name}" for name in ("max_steps", "num_train_epochs") if name in recipe.train]


def _fill_dial(recipe: Recipe, set_if_open: Any, problems: Problems) -> None:
    model, dial = recipe.model, recipe.model.depth is not None
    if recipe.tokenizer.vocab_size is None and (dial or recipe.run.tokens_per_param or recipe.run.flops):
        problems.add(
            recipe.where("tokenizer.vocab_size"),
            f"how many ids {recipe.tokenizer.path or model.start_from} has is not known here, and sizes and horizon "
            "follow from it. Give it.",
        )
        return
    if dial and not (model.n_embd and model.n_head):
        problems.add(
            recipe.where("model.n_embd"),
            f"is {model.n_embd}, not a multiple of model.head_dim ({model.head_dim}), so model.depth cannot set the "
            "heads. Give model.n_head, or change one of the two.",
        )
        return
    if dial and model.n_embd and model.n_head and model.n_embd % model.n_head:
        return  # said by check_filled
    if dial and recipe.stage == "pretrain" and not horizons(recipe):
        set_if_open("run.tokens_per_param", TOKENS_PER_PARAM)
    if dial and recipe.data.batch_tokens is None and "gradient_accumulation_steps" not in recipe.train:
        fill_batch(recipe, set_if_open)
    if recipe.optimizer.type not in MATRIX_GROUP:
        return
    if dial and recipe.data.batch_tokens is None and recipe.optimizer.rate_scale is None:
        problems.add(
            recipe.where("train.gradient_accumulation_steps"),
            "leaves the batch to the number of processes, and model.depth sets the rates by the batch. Give "
            "data.batch_tokens instead, or optimizer.rate_scale.",
        )
        return
    fill_rates(recipe, set_if_open)


def _fill_steps(recipe: Recipe, problems: Problems) -> None:
    batch, named = recipe.data.batch_tokens, horizons(recipe)
    if batch and named and named[0].startswith("run."):
        by_size = recipe.run.tokens is None
        if by_size and not recipe.model.n_layer:
            problems.add(
                recipe.where(named[0]),
                "follows from the model's sizes, which this recipe does not give. Give run.tokens or train.max_steps.",
            )
        elif not by_size or recipe.tokenizer.vocab_size:
            try:
                steps = horizon_steps(recipe, batch)
            except SizesUnknownError:
                raise
            except ValueError as error:
                problems.add(recipe.where(named[0]), f"{error}. Give run.tokens or train.max_steps.")
                return
            if steps:
                recipe.train["max_steps"] = steps
                recipe.filled["train.max_steps"] = named[0]
            else:
                problems.add(
                    recipe.where(named[0]),
                    f"is less than one step of {batch:,} tokens (data.batch_tokens). Train longer, or make the batch "
                    "smaller.",
                )
    schedule = recipe.optimizer.schedule
    grouped = recipe.optimizer.type != "trainer"
    if grouped and "max_steps" in recipe.train and "optimizer.schedule.warmup_steps" not in recipe.places:
        schedule.warmup_steps = min(schedule.warmup_steps, recipe.train["max_steps"] // 5)


def _ready_vocab(folder: str) -> int | None:
    """Return how many ids a tokenizer has whose folder is here."""
    file = Path(folder) / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        content = read_json(file)
        vocab = content["model"]["vocab"]
        ids = [entry["id"] for entry in content.get("added_tokens", [])]
        ids += vocab.values() if isinstance(vocab, dict) else range(len(vocab))
        return max(ids) + 1
    except (ValueError, KeyError, TypeError):
        return None  # the tokenizer room says what is wrong with the file


def _fill_places(recipe: Recipe) -> None:
    """Paths that lie beside the recipe become paths from the working folder, so that the saved recipe finds them
    too."""
    folder = os.path.relpath(os.path.dirname(recipe.path or "") or ".")
    if recipe.run.code_folder is None:
        recipe.run.code_folder = folder

    def place(path: str | None) -> str | None:
        beside = os.path.normpath(os.path.join(folder, path)) if path else None
        return beside if path and beside and not os.path.isabs(path) and glob(beside, recursive=True) else path

    entries: list[Source | OwnTask] = [*recipe.data.sources, *(recipe.data.validation or []), *recipe.evals.chat.own]
    for source in entries:
        if source.id is None and source.files is not None:
            files = source.files
            source.files = place(files) if isinstance(files, str) else [place(f) or f for f in files]
        elif source.id is not None:
            found = place(source.id) or source.id
            if os.path.isdir(found):  # "./" tells it from an id of the Hub, whatever the working folder is later.
                source.id = found if found.startswith((".", "/")) else f"./{found}"
    recipe.evals.core.bundle = place(recipe.evals.core.bundle)
    recipe.evals.chat.data = place(recipe.evals.chat.data)
    recipe.tokenizer.path = place(recipe.tokenizer.path)
    recipe.tokenizer.chat_template = place(recipe.tokenizer.chat_template)
    if recipe.model.start_from and not recipe.model.start_from.startswith("latest:"):
        recipe.model.start_from = place(recipe.model.start_from)


def code_folder_of(recipe: Recipe) -> CodeFolder:
    """Return where the code of a recipe that the user named on the command line may lie.

    Beside the recipe, or where an override of run.code_folder says. Not beside the recipe.yaml of a run: what lies
    there came with the run, which may be somebody else's.
    """
    folder, beside = Path(recipe.run.code_folder or "."), Path(recipe.path or ".").parent
    if recipe.run.trust_code and recipe.places.get("run.trust_code") == COMMAND_LINE:
        return CodeFolder(str(folder), trusted=True)
    if recipe.places.get("run.code_folder") == COMMAND_LINE:
        return CodeFolder(str(folder))
    if (beside / "run_manifest.json").exists():
        return CodeFolder(None, closed=f"{recipe.path} is the recipe of a run, which may have come from elsewhere")
    if not folder.resolve().is_relative_to(beside.resolve()):
        why = f"run.code_folder ({folder}) lies outside the recipe's folder. Give it on the command line"
        return CodeFolder(None, closed=why)
    return CodeFolder(str(folder))


def plain(value: Any) -> Any:
    """Return dataclasses as dictionaries of the keys of a recipe, internal fields left out."""
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value) if not f.metadata.get("internal")}
    if isinstance(value, list):
        return [plain(v) for v in value]
    return dict(value) if isinstance(value, ReadOnlyDict) else value


def run_folder(recipe: Recipe) -> Path:
    return (Path(recipe.run.directory) / str(recipe.run.name)).absolute()


def drops_attention(recipe: Recipe) -> bool:
    """Return whether a model of Tandem's has dropout inside its attention."""
    config = recipe.model.start_config or options_of(recipe)
    name, default = ("attention_dropout", 0.0) if config.get("model_type") == "nanochat" else ("attn_pdrop", 0.1)
    return becomes_tandem(recipe) and config.get(name, default) > 0
