"""Defaults that follow from other keys: batch, depth, schedule."""

import math
import os
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from glob import glob
from pathlib import Path
from typing import Any, Literal

from pipeline.process.storage import read_json
from pipeline.process.user_code import RECIPE_TRUST, CodeFolder
from pipeline.recipe.identity import default_name
from pipeline.recipe.layers import COMMAND_LINE
from pipeline.recipe.located_yaml import Problems
from pipeline.recipe.schema import COLUMN_ROLES, FORMATS, OwnTask, ReadOnlyDict, Recipe, Schedule, Source
from pipeline.recipe.sizes import PORTABLE_PATTERNS, TANDEM_OPTIONS, CountedSizes, Sizes, SizesUnknownError, sizes_of
from pipeline.recipe.start_from import fill_from_start, says_itself, start_folder
from pipeline.recipe.supported_arguments import defaults

# The global batch, whether its documents see each other, and the horizon in optimizer steps.

KEY, AUTO = "train.per_device_train_batch_size", "auto"
HORIZON_KEYS = ("tokens", "tokens_per_param", "flops")


def rows_per_step(recipe: Recipe) -> int:
    """Return rows of one optimizer step over all processes. data.batch_tokens must be known."""
    assert recipe.data.batch_tokens, "data.batch_tokens is known once the number of processes is"
    return recipe.data.batch_tokens // recipe.data.row_tokens


@dataclass(frozen=True)
class StepRows:
    """Rows of each optimizer step, zero-based, over all processes: `full`, and in the first warmup_steps fewer. They begin halved
    `halvings` times, and are doubled after every warmup_steps / halvings steps. Arithmetic alone: a resume needs only the step.

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
    """Return whether the documents of a packed row do not see each other: positions restart, and attention ends there."""
    return recipe.stage == "sft" or recipe.data.isolate_documents


def is_auto(recipe: Recipe) -> bool:
    """Return whether the micro-batch is to be found (preflight/memory.py)."""
    return recipe.train.get("per_device_train_batch_size") == AUTO


def micro_batch(recipe: Recipe) -> int:
    """Return rows of one forward pass of one process: as given, or what `auto` came to."""
    rows = recipe.micro_batch if is_auto(recipe) else recipe.train["per_device_train_batch_size"]
    assert rows is not None, "auto is a number once the plan is made"
    return rows


def micro_steps(recipe: Recipe, world_size: int) -> int:
    """Micro-steps of an optimizer step: the rows of a step dealt to world_size processes, the last micro-step filled up."""
    return math.ceil(rows_per_step(recipe) / (world_size * micro_batch(recipe)))


def with_batch_tokens(recipe: Recipe, world_size: int) -> int:
    """Return the global batch in tokens: as given, or computed from train.gradient_accumulation_steps and the processes."""
    if recipe.data.batch_tokens:
        return recipe.data.batch_tokens
    return world_size * micro_batch(recipe) * recipe.train["gradient_accumulation_steps"] * recipe.data.row_tokens


def horizon_steps(recipe: Recipe, batch_tokens: int) -> int | None:
    """Optimizer steps of the run; None when it is given in epochs and only the data know.

    Raises ValueError when they follow from sizes that cannot be known (recipe/sizes.py).
    """
    if "max_steps" in recipe.train:
        return recipe.train["max_steps"]
    run = recipe.run
    steps_of = step_rows(recipe, batch_tokens).steps
    if run.tokens is not None:
        return steps_of(run.tokens // recipe.data.row_tokens)
    if run.tokens_per_param is not None:
        sizes = sizes_of(recipe)
        if sizes.scaling is None:
            raise ValueError(f"the parameters that a token passes are not known: {sizes.unknown}")
        return steps_of(int(run.tokens_per_param * sizes.scaling) // recipe.data.row_tokens)
    if run.flops is not None:
        sizes = sizes_of(recipe)
        flops = sizes.flops_per_token("nanochat")
        if flops is None:
            raise ValueError(f"the FLOPs of a token are not known: {sizes.unknown}")
        return steps_of(int(run.flops / flops) // recipe.data.row_tokens)
    return None


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
    # eps of the three below is not nanochat's 1e-10: at the first step every block adds zero and the norms undo any scale, so
    # the true gradient of the lambdas is zero, and 1e-10 turns its rounding noise into a full step (docs/log.md, eps).
    "scalars": {"learning_rate": 0.005, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.05},
    "x0_lambdas": {"learning_rate": 0.5, "betas": [0.96, 0.95], "eps": 1e-6, "weight_decay": 0.0},
    "gates": {"learning_rate": 0.2, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.0},
}
# The optimizers over optimizer.groups, by optimizer.type, with the settings of the matrices; training/optimizer.py builds them.
MATRIX_GROUP: dict[str, dict[str, Any]] = {
    # A value of small models (docs/log.md: 0.27 BPB better than one rate for all at width 256); nothing larger has been measured.
    "adamw": {"learning_rate": 3e-3, "betas": [0.9, 0.95], "eps": 1e-10, "weight_decay": 0.1},
    "muon_adamw": {"learning_rate": 0.02, "momentum": 0.97, "weight_decay": MATRIX_DECAY},
}
MUON_FLOORS = ("update_floor", "row_floor")  # settings of Muon's matrices that are off where they are not given

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
    ratio = _scaling(recipe) / _reference_scaling(recipe)
    batch = 2 ** round(math.log2(REFERENCE_BATCH_TOKENS * ratio**BATCH_EXPONENT))
    fill("data.batch_tokens", max(1, round(batch / recipe.data.row_tokens)) * recipe.data.row_tokens)


def fill_rates(recipe: Recipe, fill: Fill) -> None:
    """The rates' common factor and every group's settings.

    Under the dial rates follow sqrt(batch / 2^19), the gates' only up to 2^19, those of embeddings and head also
    (width / 768)^-0.5, and the decay of the matrices 0.28 x sqrt(batch / 2^19) x (D at depth 12 / D). Without it the
    reference values are taken as they are.
    """
    dial = recipe.model.depth is not None and recipe.tokenizer.vocab_size is not None
    batch_scale = (
        math.sqrt(recipe.data.batch_tokens / REFERENCE_BATCH_TOKENS) if dial and recipe.data.batch_tokens else 1.0
    )
    fill("optimizer.rate_scale", batch_scale, "model.depth" if dial else None)
    for group, settings in {**ADAM_GROUPS, "matrices": MATRIX_GROUP[recipe.optimizer.type]}.items():
        for name, value in settings.items():
            scale = 1.0
            if dial and name == "learning_rate" and group in WIDTH_SCALED:
                scale = math.sqrt(REFERENCE_WIDTH / sizes_of(recipe).n_embd)
            if dial and name == "learning_rate" and group == "gates":
                # nanochat keeps 0.2 at every batch. Below those it was tuned at, where all other rates are smaller, 0.2 drives
                # backout past 1 before the blocks add anything: the last state changes its sign (docs/log.md, gates).
                scale = min(1.0, 1 / batch_scale)
            if dial and name == "weight_decay" and group == "matrices" and recipe.optimizer.type == "muon_adamw":
                scale = batch_scale * _reference_scaling(recipe) / _scaling(recipe)
            fill(
                f"optimizer.groups.{group}.{name}",
                value if scale == 1 else value * scale,
                "model.depth" if scale != 1 else None,
            )


def group_settings(optimizer_type: str, group: str) -> set[str]:
    """Return names of the settings that a group has under an optimizer type."""
    table = MATRIX_GROUP[optimizer_type] if group == "matrices" else ADAM_GROUPS[group]
    floors = MUON_FLOORS if (optimizer_type, group) == ("muon_adamw", "matrices") else ()
    return {*table, *floors, "decay_fraction"}


def _scaling(recipe: Recipe) -> int:
    return _known_scaling(sizes_of(recipe))


def _reference_scaling(recipe: Recipe) -> int:
    return _known_scaling(sizes_at_depth(recipe, REFERENCE_DEPTH))


def _known_scaling(sizes: Sizes | CountedSizes) -> int:
    if sizes.scaling is None:
        raise SizesUnknownError(f"the parameters that a token passes are not known ({sizes.unknown})")
    return sizes.scaling


def sizes_at_depth(recipe: Recipe, depth: int) -> Sizes | CountedSizes:
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
    """Sets every open value that follows from others and notes each in recipe.filled; problems gets what cannot follow."""

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
        problems.add(recipe.where("model.type"), f"{error}, and horizon or rates follow from them. Change the sizes or model.options.")  # fmt: skip
    except ImportError as error:
        problems.add(recipe.where("model.type"), f"the sizes of a {recipe.model.type} are counted on its modules, and {error.name} is not installed. Give run.tokens or train.max_steps.")  # fmt: skip
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
    """Drop Tandem's options and a split pattern that llama.cpp has not, of an earlier layer (quickstart's, for one), where a later
    one says `model.preset: portable`."""
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
            f"{recipe.where(pattern)}: is none that llama.cpp knows, and {PORTABLE_PATTERNS[0]} under model.preset portable."
        )


def _fill_row_tokens(recipe: Recipe) -> None:
    """The default is what the model can hold."""
    model, data = recipe.model, recipe.data
    if "data.row_tokens" not in recipe.places and model.n_positions and 8 <= model.n_positions < data.row_tokens:
        data.row_tokens = model.n_positions
        recipe.filled["data.row_tokens"] = recipe.filled.get("model.n_positions", "model.n_positions")


def _shorten_warmup(recipe: Recipe) -> None:
    """A horizon that a later layer names, as train.max_steps=20 does on the command line, shortens a warm-up that is longer."""
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
    recipe.notes.append(f"{recipe.where(name)}: {warmup} -> {steps // 5}, a fifth of the run: {named[0]} makes it {steps:,} steps.")  # fmt: skip


def _layer(recipe: Recipe, name: str) -> int:
    """Return a higher number for a later layer: the command line, the recipe's own file, one that it extends."""
    place = recipe.places.get(name, "")
    return 2 if place.startswith("command line") else 1 if place.rpartition(":")[0] == recipe.path else 0


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
            f"how many ids {recipe.tokenizer.path or model.start_from} has is not known here, and sizes and horizon follow from it. Give it.",
        )
        return
    if dial and not (model.n_embd and model.n_head):
        problems.add(
            recipe.where("model.n_embd"),
            f"is {model.n_embd}, not a multiple of model.head_dim ({model.head_dim}), so model.depth cannot set the heads. Give model.n_head, or change one of the two.",
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
            "leaves the batch to the number of processes, and model.depth sets the rates by the batch. Give data.batch_tokens instead, or optimizer.rate_scale.",
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
            steps = _horizon_steps(recipe, batch, problems)
            if steps is None:
                return
            if steps:
                recipe.train["max_steps"] = steps
                recipe.filled["train.max_steps"] = named[0]
            else:
                problems.add(
                    recipe.where(named[0]),
                    f"is less than one step of {batch:,} tokens (data.batch_tokens). Train longer, or make the batch smaller.",
                )
    schedule = recipe.optimizer.schedule
    grouped = recipe.optimizer.type != "trainer"
    if grouped and "max_steps" in recipe.train and "optimizer.schedule.warmup_steps" not in recipe.places:
        schedule.warmup_steps = min(schedule.warmup_steps, recipe.train["max_steps"] // 5)


def _horizon_steps(recipe: Recipe, batch: int, problems: Problems) -> int | None:
    try:
        return horizon_steps(recipe, batch)
    except SizesUnknownError:
        raise
    except ValueError as error:
        problems.add(recipe.where(horizons(recipe)[0]), f"{error}. Give run.tokens or train.max_steps.")
        return None


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
    """Paths that lie beside the recipe become paths from the working folder, so that the saved recipe finds them too."""
    folder = os.path.relpath(os.path.dirname(recipe.path or "") or ".")
    if recipe.run.code_folder is None:
        recipe.run.code_folder = folder

    def place(path: str | None) -> str | None:
        beside = os.path.normpath(os.path.join(folder, path)) if path else None
        return beside if path and beside and not os.path.isabs(path) and glob(beside, recursive=True) else path

    def place_all(source: Source | OwnTask) -> None:
        if source.id is None and source.files is not None:
            source.files = (
                place(source.files) if isinstance(source.files, str) else [place(f) or f for f in source.files]
            )
        elif source.id is not None:
            found = place(source.id) or source.id
            if os.path.isdir(found):  # "./" tells it from an id of the Hub, whatever the working folder is later.
                source.id = found if found.startswith((".", "/")) else f"./{found}"

    for source in [*recipe.data.sources, *(recipe.data.validation or [])]:
        place_all(source)
    for task in recipe.evals.chat.own:
        place_all(task)
    recipe.evals.core.bundle = place(recipe.evals.core.bundle)
    recipe.evals.chat.data = place(recipe.evals.chat.data)
    recipe.tokenizer.path = place(recipe.tokenizer.path)
    recipe.tokenizer.chat_template = place(recipe.tokenizer.chat_template)
    if recipe.model.start_from and not recipe.model.start_from.startswith("latest:"):
        recipe.model.start_from = place(recipe.model.start_from)


def code_folder_of(recipe: Recipe) -> CodeFolder:
    """Return where the code of a recipe that the user named on the command line may lie.

    Beside the recipe, or where an override of run.code_folder says. Not beside the recipe.yaml of a run: what lies there came with the
    run, which may be somebody else's.
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
