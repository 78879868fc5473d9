"""What the recipe names and only Python can look up: callbacks, tasks, an optimizer, the options of the model. Imports torch.

The user's modules are run for it and may raise anything, which is told as a problem: a bare traceback of rank 0 would leave
the other ranks waiting for its word.
"""

import inspect

from pipeline.artifacts.errors import RecipeError, TandemError
from pipeline.artifacts.user_code import import_attribute
from pipeline.recipe import Recipe
from pipeline.recipe.presets import model_fields


def named_code_problems(recipe: Recipe) -> list[TandemError]:
    """Each name that cannot be used. A model that starts from weights has their options."""
    return [*_callbacks(recipe), *_tasks(recipe), *_factories(recipe), *_split_pattern(recipe), *_model(recipe)]


def _callbacks(recipe: Recipe) -> list[TandemError]:
    found: list[TandemError] = []
    where = recipe.where("run.callbacks")
    for name in recipe.run.callbacks:
        try:
            inspect.signature(import_attribute(name, recipe.code, where=where)).bind()
        except RecipeError as error:
            found.append(error)
        except (TypeError, ValueError) as error:
            found.append(
                RecipeError(
                    f"{where}: {name} cannot be used ({error}). Name a TrainerCallback class that is made without arguments."
                )
            )
    return found


def _tasks(recipe: Recipe) -> list[TandemError]:
    from pipeline.evals.tasks import load_tasks

    try:
        load_tasks(recipe.evals.tasks, folder=recipe.code, where=recipe.where("evals.tasks"))
    except RecipeError as error:
        return [error]
    return []


def _factories(recipe: Recipe) -> list[TandemError]:
    """The optimizer and the model, where they are the user's own. A model that starts from weights is theirs."""
    named = {
        "optimizer.type": recipe.optimizer.type,
        "model.type": "" if recipe.model.start_from else recipe.model.type,
    }
    found: list[TandemError] = []
    for key, name in named.items():
        if ":" not in name:
            continue
        try:
            if not callable(import_attribute(name, recipe.code, where=recipe.where(key))):
                found.append(RecipeError(f"{recipe.where(key)}: {name} cannot be called. Name a function or a class."))
        except RecipeError as error:
            found.append(error)
    return found


def _split_pattern(recipe: Recipe) -> list[TandemError]:
    if recipe.tokenizer.path or recipe.tokenizer.split_pattern in ("nanochat", "gpt2"):
        return []
    from tokenizers import Regex

    try:
        Regex(recipe.tokenizer.split_pattern)
    except Exception as error:  # tokenizers raises bare Exceptions
        return [
            RecipeError(f"{recipe.where('tokenizer.split_pattern')}: is no regular expression ({error}). Correct it.")
        ]
    return []


def _model(recipe: Recipe) -> list[TandemError]:
    """The model is built once without its weights: its config refuses then what it would refuse after the data are prepared."""
    if recipe.model.start_from or ":" in recipe.model.type:
        return []
    import torch

    from pipeline.model.build import ModelOptionsError, build_model

    fields = model_fields(
        recipe, vocab_size=recipe.tokenizer.vocab_size or 512, bos_token_id=0, eos_token_id=0, pad_token_id=0
    )
    try:
        with torch.device("meta"):
            build_model(recipe.model.type, fields, seed=0)
    except ModelOptionsError as error:
        key = str(error).partition(":")[0]
        return [RecipeError(f"{recipe.places.get(key) or recipe.path}: {error}")]
    except Exception as error:  # a value that its config took and its layers do not
        return [
            RecipeError(
                f"{recipe.where('model.options')}: {recipe.model.type} cannot be built with them ({type(error).__name__}: {error}). Correct the value."
            )
        ]
    return []
