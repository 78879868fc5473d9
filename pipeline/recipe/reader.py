"""`RECIPE.yaml section.key=value ...` as one typed, resolved recipe, or every mistake of it at once."""

from dataclasses import fields
from typing import Any

from pipeline.artifacts.errors import RecipeError
from pipeline.recipe.checks import check_filled, check_given, check_stage
from pipeline.recipe.layers import read_layers
from pipeline.recipe.located_yaml import Item
from pipeline.recipe.names import unknown_key
from pipeline.recipe.presets import NOT_OPTIONS, TANDEM_OPTIONS
from pipeline.recipe.problems import Problems
from pipeline.recipe.resolve import Stage, fill, infer_stage
from pipeline.recipe.schema import SECTIONS, Recipe
from pipeline.recipe.training_arguments import read_train
from pipeline.recipe.values import MISSING, Converter


def read_recipe(argv: list[str], *, stage: Stage | None = None) -> Recipe:
    """The recipe argv[0] with the overrides argv[1:]. stage: that of the command, None when it serves both.

    Raises RecipeError with one line per mistake, InputMissingError when the recipe or one it extends is not there.
    """
    if not argv or argv[0].startswith("-") or ("=" in argv[0] and not argv[0].endswith((".yaml", ".yml"))):
        given = f" before {argv[0].split('=')[0]}" if argv else ""
        raise RecipeError(
            f"command line: no recipe is named{given}. Write the path of a .yaml file first, then section.key=value."
        )
    problems = Problems()
    tree = read_layers(argv[0], argv[1:], problems)
    recipe = _typed(tree, problems)
    recipe.path = argv[0]
    problems.raise_if_any()

    recipe.stage = recipe.run.stage or infer_stage(recipe) or stage or "pretrain"
    check_stage(recipe, stage, problems)
    problems.raise_if_any()
    recipe.run.stage = recipe.stage
    check_given(recipe, problems)
    problems.raise_if_any()
    fill(recipe, problems)
    check_filled(recipe, problems)
    problems.raise_if_any()
    return recipe


def _typed(tree: Item, problems: Problems) -> Recipe:
    convert = Converter(problems)
    recipe = Recipe()
    sections = {f.name: f for f in fields(Recipe) if f.name in SECTIONS}
    for name, item in tree.value.items():
        if name not in sections:
            problems.add(f"{item.where}: {name}", unknown_key(name))
        elif name == "train":
            recipe.train = read_train(item, convert)
        else:
            convert.places[name] = item.where
            setattr(recipe, name, convert.section(sections[name].type, item, name))  # type: ignore[arg-type]
    options = tree.value.get("model", Item({}, "")).value or {}
    if recipe.model.type == "tandem" and isinstance(options, dict) and "options" in options:
        recipe.model.options = _options(options["options"], convert)
    recipe.places = convert.places
    return recipe


def _options(item: Item, convert: Converter) -> dict[str, Any]:
    """model.options of a Tandem model, typed."""
    values = {}
    for name, child in (item.value if isinstance(item.value, dict) else {}).items():
        path = f"model.options.{name}"
        if name in NOT_OPTIONS:
            convert.problems.add(
                f"{child.where}: {path}", f"is no option. It is set by {NOT_OPTIONS[name]}. Set it there."
            )
        elif name not in TANDEM_OPTIONS:
            convert.problems.add(f"{child.where}: {path}", unknown_key(path))
        else:
            convert.places[path] = child.where
            value = convert.value(TANDEM_OPTIONS[name], child, path, {})
            if value is not MISSING:
                values[name] = value
    return values
