"""Resolve model.start_from to the folder that it names, and take the sizes that come with its weights."""

import re
from pathlib import Path
from typing import Any

from pipeline.process.commands import command
from pipeline.process.errors import InputMissingError, RecipeError
from pipeline.process.storage import read_json
from pipeline.recipe.layers import COMMAND_LINE
from pipeline.recipe.located_yaml import Say
from pipeline.recipe.schema import REPOSITORY, Model, Recipe, with_values
from pipeline.recipe.sizes import LLAMA_NAMES, options_of

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
    if not _starts_from_run(recipe) and start.startswith("latest:"):
        name = start.removeprefix("latest:")
        raise InputMissingError(
            f"{recipe.where('model.start_from')}: {recipe.run.directory}/ has no finished run of a recipe or stage "
            f"{name!r}. Train it first (stage 1 is `{command('pretrain')} RECIPE`; runs of a sweep do not count), or "
            "name a run, a folder with a model or a Hub id."
        )
    if _starts_from_run(recipe):
        folder = recipe.earlier.weights_folder(start, recipe.run.directory, recipe.run.name)
        if folder is None:
            raise InputMissingError(
                f"{recipe.where('model.start_from')}: run {start} has neither model/ nor a whole checkpoint yet. Let "
                "it train first."
            )
        recipe = with_values(recipe, {"model.start_from": str(folder)})
    elif not Path(start).is_dir() and not re.fullmatch(REPOSITORY[1], start):
        raise InputMissingError(
            f"{recipe.where('model.start_from')}: there is no run or folder {start}. Correct the path, or give a "
            "run's name or a Hub id like owner/name."
        )
    # The tokenizer comes from the same place, and so do messages about it.
    if recipe.tokenizer.path is None:
        places = {"tokenizer.path": recipe.places.get("model.start_from", ""), **recipe.places}
        recipe = with_values(recipe, {"tokenizer.path": recipe.model.start_from, "places": places})
    return recipe


def _starts_from_run(recipe: Recipe) -> bool:
    earlier, run = recipe.earlier, recipe.run
    return earlier is not None and earlier.is_run(recipe.model.start_from, run.directory, run.name)


def start_folder(recipe: Recipe) -> Path | None:
    """Return a folder with the config and tokenizer of model.start_from, if there is one here; no weights are looked
    at."""
    start = recipe.model.start_from
    if start is None:
        return None
    if _starts_from_run(recipe):
        return recipe.earlier.config_folder(start, recipe.run.directory, recipe.run.name)
    return Path(start) if (Path(start) / "config.json").is_file() else None


def fill_from_start(recipe: Recipe, fill: Any, say: Say) -> None:
    """Take the sizes from the config of model.start_from, in place of those that an extended recipe gives.

    say notes what the recipe itself says otherwise: it could not be followed. What is not here (a Hub id, a run that
    is still to come) is compared when the model is loaded (check_sizes).
    """
    folder, model = start_folder(recipe), recipe.model
    if folder is None:
        _forget_inherited(recipe)
        return
    config = model.start_config = read_json(folder / "config.json")
    sizes = config.get("text_config") or config  # of a model that also reads pictures or sound
    # Sizes: by GPT-2's names or Llama's.
    for name, theirs in LLAMA_NAMES.items():
        value = sizes.get(name, sizes.get(theirs))
        if value is None and _is_own(recipe, f"model.{name}"):  # as GPT-2's config leaves them open
            value = {"n_kv_head": model.n_head, "n_inner": 4 * (model.n_embd or 0)}.get(name, getattr(model, name))
        if value != getattr(model, name) and not says_itself(recipe, f"model.{name}", value, say):
            setattr(model, name, None)
            if value is not None:
                fill(f"model.{name}", value, "model.start_from")
    # Options that the recipe's own file gives, or that its preset does, must be those of the weights.
    for name, value in options_of(model, vocab_size=config.get("vocab_size")).items():
        if name in NO_ARCHITECTURE:
            continue
        key = f"model.options.{name}" if name in model.options else "model.preset"
        if config.get(name, value) != value:
            says_itself(recipe, key, config[name], say, what=f"{name}: {value}")
    _forget_inherited_options(recipe)
    if model.depth is not None and not says_itself(recipe, "model.depth", model.n_layer, say):
        model.depth = model.n_layer


def check_sizes(model: Model, config: Any, *, where: str) -> None:
    """Raise RecipeError when the loaded model has other sizes than `model:`. where: begins the message."""
    loaded = config.get_text_config()
    wrong = []
    for name in ("n_layer", "n_embd", "n_head", "n_kv_head"):
        value = getattr(model, name)
        theirs = getattr(loaded, LLAMA_NAMES[name], value)
        if value is not None and value != theirs:
            wrong.append(f"model.{name} is {value}, theirs {theirs}")
    for name, value in options_of(model, vocab_size=getattr(loaded, "vocab_size", None)).items():
        theirs = getattr(loaded, name, value)
        if name not in NO_ARCHITECTURE and value != theirs:
            wrong.append(f"{name} is {value}, theirs {theirs}")
    if wrong:
        raise RecipeError(
            f"{where}: the weights are of another model than the recipe's ({'; '.join(wrong)}). Leave these keys, "
            "model.preset and model.depth out: all of it comes with the weights."
        )


def _forget_inherited(recipe: Recipe) -> None:
    """Drop what an extended recipe says of the architecture, when the weights are on the Hub."""
    start, model = recipe.model.start_from, recipe.model
    if start is None or start.startswith("latest:") or _starts_from_run(recipe):
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
    return layer_of(recipe, name) > 0


def says_itself(recipe: Recipe, name: str, value: Any, say: Say, what: str | None = None) -> bool:
    """Return whether the recipe's own file or the command line gives the key; then its other value is a mistake."""
    if not _is_own(recipe, name):
        return False
    section, _, last = name.partition(".")
    shown = what or getattr(getattr(recipe, section), last)
    if shown != value:
        say(
            name,
            f"is {shown}, and what this run starts from has {value}. Leave the key out: it comes with the weights or "
            "the tokenizer.",
        )
    return True


def layer_of(recipe: Recipe, name: str) -> int:
    """Return a higher number for a later layer: the command line, the recipe's own file, one that it extends."""
    place = recipe.places.get(name, "")
    if place.startswith(COMMAND_LINE):
        return 2
    return int(place.rpartition(":")[0] == recipe.path)


def drops_attention(model: Model) -> bool:
    """Return whether a model of Tandem's has dropout inside its attention."""
    config = model.start_config or options_of(model)
    dropout = config.get("attn_pdrop", 0.1)
    if config.get("model_type") == "nanochat":
        dropout = config.get("attention_dropout", 0.0)
    return model.becomes_tandem and dropout > 0
