"""Fill what a recipe leaves open, in the order of the dial: stage, sizes, horizon, batch, rates, decay, name."""

import math
import os
from dataclasses import fields, is_dataclass, replace
from glob import glob
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from pipeline.process.storage import read_json
from pipeline.process.user_code import RECIPE_TRUST, CodeFolder
from pipeline.recipe.dial import (
    MATRIX_GROUP,
    TOKENS_PER_PARAM,
    fill_batch,
    fill_rates,
    fill_sizes,
    horizon_steps,
)
from pipeline.recipe.identity import default_name
from pipeline.recipe.layers import COMMAND_LINE
from pipeline.recipe.located_yaml import Say
from pipeline.recipe.schema import COLUMN_ROLES, FORMATS, Optimizer, OwnTask, ReadOnlyDict, Recipe, Source, defaults
from pipeline.recipe.sizes import PORTABLE_PATTERNS, TANDEM_OPTIONS, SizesUnknownError
from pipeline.recipe.start_from import fill_from_start, layer_of, says_itself, start_folder

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


def fill(recipe: Recipe, say: Say) -> None:
    """Set every open value that follows from others and note each in recipe.filled; say notes what cannot
    follow."""

    def set_if_open(name: str, value: Any, cause: str | None = "model.depth") -> None:
        section, _, last = name.rpartition(".")
        target = attrgetter(section)(recipe)
        if getattr(target, last) is None:
            setattr(target, last, value)
            if cause:
                recipe.filled[name] = cause

    # 1. What the recipe says, without what another preset brought along, over the defaults.
    _leave_out_what_portable_has_not(recipe)
    trainer = recipe.optimizer.type == "trainer"
    recipe.train = {**defaults(trainer_optimizer=trainer), **recipe.train}
    # 2. Paths, and where code may lie: before a folder of model.start_from is looked at.
    _fill_places(recipe)
    if recipe.run.trust_code and recipe.places["run.trust_code"] != COMMAND_LINE:
        say(
            "run.trust_code",
            f"is for you to give, not for a recipe, which may come from elsewhere. Write {RECIPE_TRUST}.",
        )
    recipe.code = code_folder_of(recipe)
    # 3. Sizes: those of the weights, else of the dial. Rows and vocabulary come first, as the sizes need them.
    fill_from_start(recipe, set_if_open, say)
    _fill_row_tokens(recipe)
    _fill_vocabulary(recipe, say)
    fill_sizes(recipe.model, set_if_open)
    if recipe.model.n_positions is None and (recipe.model.n_layer or not recipe.model.start_from):
        recipe.model.n_positions = recipe.data.row_tokens
    if recipe.model.n_head and recipe.model.n_kv_head is None:
        recipe.model.n_kv_head = recipe.model.n_head
    # 4. Horizon, batch and rates, which follow from the sizes, and the steps, which follow from horizon and batch.
    try:
        _fill_dial(recipe, set_if_open, say)
        _fill_steps(recipe, say)
    except SizesUnknownError as error:
        say(
            "model.type",
            f"{error}, and horizon or rates follow from them. Change the sizes or model.options.",
        )
    # 5. The name last: its digits are of all that must match.
    _shorten_warmup(recipe)
    if recipe.run.name is None:
        recipe.run.name = _default_name(recipe)


def _default_name(recipe: Recipe) -> str:
    """Return the default name: another one for another meaning of `latest:`, the same while that run finishes."""
    model = recipe.model
    if model.start_from and model.start_from.startswith("latest:"):
        folder = start_folder(recipe)
        if folder is not None:
            recipe = replace(recipe, model=replace(model, start_from=str(folder)))
    return default_name(recipe)


def _leave_out_what_portable_has_not(recipe: Recipe) -> None:
    """Drop Tandem's options and a split pattern that llama.cpp has not, of an earlier layer (quickstart's, for one),
    where a later one says `model.preset: portable`."""
    model, tokenizer, pattern = recipe.model, recipe.tokenizer, "tokenizer.split_pattern"
    if model.preset != "portable":
        return
    for name in [name for name in model.options if name in TANDEM_OPTIONS]:
        option = f"model.options.{name}"
        if layer_of(recipe, option) < layer_of(recipe, "model.preset"):
            del model.options[name]
            recipe.notes.append(
                f"{recipe.where(option)}: is of another preset, and left out under model.preset portable."
            )
    known = tokenizer.split_pattern in PORTABLE_PATTERNS
    if not known and layer_of(recipe, pattern) < layer_of(recipe, "model.preset"):
        tokenizer.split_pattern = PORTABLE_PATTERNS[0]
        recipe.notes.append(
            f"{recipe.where(pattern)}: is none that llama.cpp knows, and {PORTABLE_PATTERNS[0]} under model.preset "
            "portable."
        )


def _fill_row_tokens(recipe: Recipe) -> None:
    """Shorten the default to what the model can hold."""
    model, data = recipe.model, recipe.data
    if "data.row_tokens" not in recipe.places and model.n_positions and 8 <= model.n_positions < data.row_tokens:
        data.row_tokens = model.n_positions
        recipe.filled["data.row_tokens"] = recipe.filled.get("model.n_positions", "model.n_positions")


def _shorten_warmup(recipe: Recipe) -> None:
    """Shorten a warm-up that is longer than a horizon of a later layer, as train.max_steps=20 on the command line."""
    steps, named = recipe.train.get("max_steps"), recipe.horizons
    if not steps or not named:
        return
    name, warmup = warmup_of(recipe.optimizer, recipe.train, steps)
    if warmup <= steps or layer_of(recipe, named[0]) <= layer_of(recipe, name):
        return
    if recipe.optimizer.type == "trainer":
        recipe.train["warmup_steps"] = steps // 5
    else:
        recipe.optimizer.schedule.warmup_steps = steps // 5
    recipe.notes.append(
        f"{recipe.where(name)}: {warmup} -> {steps // 5}, a fifth of the run: {named[0]} makes it {steps:,} steps."
    )


def warmup_of(optimizer: Optimizer, train: dict[str, Any], steps: int) -> tuple[str, int]:
    """Return the key that sets the warm-up, and its steps in a run of so many."""
    if optimizer.type != "trainer":
        return "optimizer.schedule.warmup_steps", optimizer.schedule.warmup_steps
    value = train["warmup_steps"]
    if value < 1:  # a share of the run
        value = math.ceil(value * steps)
    return "train.warmup_steps", int(value)


def _fill_vocabulary(recipe: Recipe, say: Say) -> None:
    tokenizer = recipe.tokenizer
    ready = tokenizer.path or start_folder(recipe) or recipe.model.start_from
    if not ready:
        if tokenizer.vocab_size is None:
            tokenizer.vocab_size = DEFAULT_VOCAB_SIZE
        return
    size = _ready_vocab(str(ready))
    if size is None:  # on the Hub, or of a run that is still to come
        return
    if tokenizer.vocab_size != size and not says_itself(recipe, "tokenizer.vocab_size", size, say):
        tokenizer.vocab_size = size


def _fill_dial(recipe: Recipe, set_if_open: Any, say: Say) -> None:
    model, dial = recipe.model, recipe.model.depth is not None
    if recipe.tokenizer.vocab_size is None and (dial or recipe.run.tokens_per_param or recipe.run.flops):
        say(
            "tokenizer.vocab_size",
            f"how many ids {recipe.tokenizer.path or model.start_from} has is not known here, and sizes and horizon "
            "follow from it. Give it.",
        )
        return
    if dial and not (model.n_embd and model.n_head):
        say(
            "model.n_embd",
            f"is {model.n_embd}, not a multiple of model.head_dim ({model.head_dim}), so model.depth cannot set the "
            "heads. Give model.n_head, or change one of the two.",
        )
        return
    if dial and model.n_embd and model.n_head and model.n_embd % model.n_head:
        return  # said by check_filled
    if dial and recipe.stage == "pretrain" and not recipe.horizons:
        set_if_open("run.tokens_per_param", TOKENS_PER_PARAM)
    if dial and recipe.data.batch_tokens is None and "gradient_accumulation_steps" not in recipe.train:
        fill_batch(recipe, set_if_open)
    if recipe.optimizer.type not in MATRIX_GROUP:
        return
    if dial and recipe.data.batch_tokens is None and recipe.optimizer.rate_scale is None:
        say(
            "train.gradient_accumulation_steps",
            "leaves the batch to the number of processes, and model.depth sets the rates by the batch. Give "
            "data.batch_tokens instead, or optimizer.rate_scale.",
        )
        return
    fill_rates(recipe, set_if_open)


def _fill_steps(recipe: Recipe, say: Say) -> None:
    batch, named = recipe.data.batch_tokens, recipe.horizons
    if batch and named and named[0].startswith("run.") and named[0] != "run.minutes":
        by_size = recipe.run.tokens is None
        if by_size and not recipe.model.n_layer:
            say(
                named[0],
                "follows from the model's sizes, which this recipe does not give. Give run.tokens or train.max_steps.",
            )
        elif not by_size or recipe.tokenizer.vocab_size:
            try:
                steps = horizon_steps(recipe)
            except SizesUnknownError:
                raise
            except ValueError as error:
                say(named[0], f"{error}. Give run.tokens or train.max_steps.")
                return
            if steps:
                recipe.train["max_steps"] = steps
                recipe.filled["train.max_steps"] = named[0]
            else:
                say(
                    named[0],
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
        num_ids = len(vocab)  # of a list, whose places are the ids
        if isinstance(vocab, dict):
            num_ids = max(vocab.values()) + 1
        added = [entry["id"] + 1 for entry in content.get("added_tokens", [])]
        return max([num_ids, *added]) or None
    except (ValueError, KeyError, TypeError):
        return None  # the tokenizer room says what is wrong with the file


def _fill_places(recipe: Recipe) -> None:
    """Make paths relative to the recipe paths from the working folder, so that the saved recipe finds them too."""
    folder = os.path.relpath(os.path.dirname(recipe.path or "") or ".")
    if recipe.run.code_folder is None:
        recipe.run.code_folder = folder

    def place(path: str | None) -> str | None:
        if not path or os.path.isabs(path):
            return path
        near = os.path.normpath(os.path.join(folder, path))
        return near if glob(near, recursive=True) else path

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

    In the recipe's folder, or where an override of run.code_folder says. Not in the folder of a run: what is there
    came with the run, which may be somebody else's.
    """
    folder = Path(recipe.run.code_folder or ".")
    of_recipe = Path(recipe.path or ".").parent
    if recipe.run.trust_code and recipe.places.get("run.trust_code") == COMMAND_LINE:
        return CodeFolder(str(folder), trusted=True)
    if recipe.places.get("run.code_folder") == COMMAND_LINE:
        return CodeFolder(str(folder))
    if (of_recipe / "run_manifest.json").exists():
        return CodeFolder(None, closed=f"{recipe.path} is the recipe of a run, which may have come from elsewhere")
    if not folder.resolve().is_relative_to(of_recipe.resolve()):
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
