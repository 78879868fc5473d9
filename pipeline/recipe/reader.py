"""A recipe read from its file and overrides into one typed, resolved value, or every mistake of it at once; and written
again."""

from operator import attrgetter
from typing import Any

import yaml

from pipeline.recipe.checks import check_filled, check_given, check_stage
from pipeline.recipe.layers import find_recipe, read_layers, recipe_of, without_removed
from pipeline.recipe.located_yaml import FLOAT, INTEGER, WORDS, Item, Problems, Say, show
from pipeline.recipe.resolve import Stage, fill, infer_stage, plain
from pipeline.recipe.schema import ARGUMENTS, DERIVED, Model, Recipe, freeze
from pipeline.recipe.sizes import LLAMA_NAMES, PORTABLE_PATTERNS, PORTABLE_TYPE
from pipeline.recipe.values import options_kind, places_of, recipe_kind, section_of, typed_values


def read_recipe(argv: list[str], *, stage: Stage | None = None, earlier: Any = None) -> Recipe:
    """Return the recipe argv[0], by path or bare name, with the overrides argv[1:], frozen. stage: that of the
    command, None when it serves both. earlier: run_dir.earlier_runs.EarlierRuns, where model.start_from may be a run.

    Raises RecipeError with one line per mistake, InputMissingError when the recipe or one it extends is not there.
    """
    # 1. The text, in layers, as one tree of values with their places.
    path = find_recipe(recipe_of(argv))
    problems = Problems()
    tree = without_removed(read_layers(path, argv[1:], problems), problems)
    # 2. Types, choices and bounds of each key. Whatever is wrong with them ends the reading: checks rely on them.
    recipe = _typed(tree, problems)
    recipe.path, recipe.arguments, recipe.earlier = path, list(argv), earlier
    problems.raise_if_any()

    # 3. Keys against each other; then what is open is filled, and what was filled checked.
    recipe.stage = recipe.run.stage or infer_stage(recipe) or stage or "pretrain"
    say = problems.of(recipe.where)
    check_stage(recipe, stage, say)
    problems.raise_if_any()
    recipe.run.stage = recipe.stage
    check_given(recipe, say)
    problems.raise_if_any()
    fill(recipe, say)
    check_filled(recipe, say)
    problems.raise_if_any()
    return freeze(recipe)


def _typed(tree: Item, problems: Problems) -> Recipe:
    # Top-level keys that begin with x- are a place for anchors.
    tree = Item({name: item for name, item in tree.value.items() if not name.startswith("x-")}, tree.where)
    values = typed_values(recipe_kind(), tree, "", problems)
    problems.raise_if_any()
    recipe: Recipe = section_of(Recipe, values)
    recipe.places = places_of(tree)
    train = {name: value for name, value in recipe.train.items() if value is not None or name not in DERIVED}
    if isinstance(train.get("accelerator_config"), dict):
        train["accelerator_config"] = {**ARGUMENTS["accelerator_config"].default, **train["accelerator_config"]}
    recipe.train = train
    if recipe.model.preset == "portable":
        if "model.type" not in recipe.places:
            recipe.model.type = PORTABLE_TYPE
        if "tokenizer.split_pattern" not in recipe.places:
            recipe.tokenizer.split_pattern = PORTABLE_PATTERNS[0]
    if recipe.model.type != "tandem":
        _sizes_among_options(recipe.model, problems.of(recipe.where))
    elif recipe.model.options:
        options = tree.value["model"].value["options"]
        typed = typed_values(options_kind(), options, "model.options", problems) or {}
        recipe.model.options = {name: typed[name] for name in recipe.model.options if name in typed}
    return recipe


def _sizes_among_options(model: Model, say: Say) -> None:
    """Move a size that model.options gives by the config's own name to `model:`, where plan and training read it."""
    for ours, theirs in LLAMA_NAMES.items():
        for name in {ours, theirs} & model.options.keys():
            value, own = model.options[name], getattr(model, ours)
            if own is None and type(value) is int and value >= 1:
                setattr(model, ours, value)
            elif own is not None and own != value:
                say(
                    "model.options",
                    f"{name} is {show(value)}, and model.{ours} is {own}. Keep one of the two.",
                )


class _Dumper(yaml.SafeDumper):
    """Block style with indented lists; numbers and texts so that our reader reads back what was written."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(float, lambda dumper, value: dumper.represent_scalar("tag:yaml.org,2002:float", _float(value)))
_Dumper.add_representer(
    str, lambda dumper, value: dumper.represent_scalar("tag:yaml.org,2002:str", value, style=_style(value))
)


def dump_recipe(recipe: Recipe) -> str:
    """Return YAML of every key that has a value. Derived steps are a comment: they follow again from the horizon."""
    values = {section: _given(section, keys) for section, keys in plain(recipe).items()}
    del values["run"]["trust_code"]  # of this start: the user's word, not the recipe's
    if "train.max_steps" in recipe.filled:
        del values["train"]["max_steps"]
    if recipe.run.minutes is not None:  # the manifest keeps the steps that were measured
        values["train"].pop("max_steps", None)
    if recipe.data.batch_tokens:  # computed at the first start and kept: any number of processes may go on
        values["train"].pop("gradient_accumulation_steps", None)
    if recipe.model.start_from and recipe.model.preset == "gpt2":  # the architecture is that of the weights
        del values["model"]["preset"]
    if recipe.optimizer.type == "trainer":
        values["optimizer"] = {"type": "trainer"}
    head = [f"# {line}" for line in describe_filled(recipe)]
    body = yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
    return "\n".join([*head, body])


def describe_filled(recipe: Recipe) -> list[str]:
    """Return `model.n_layer = 24 (set by model.depth)` for every value that another one set."""
    lines = []
    for name, cause in recipe.filled.items():
        section, _, rest = name.partition(".")
        value = recipe.train[rest] if section == "train" else attrgetter(name)(recipe)
        if isinstance(value, int):
            value = f"{value:,}"
        elif isinstance(value, float):
            value = f"{value:.6g}"
        lines.append(f"{name} = {value} (set by {cause})")
    return lines


def _given(section: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the section without keys that are open. A null that undoes a default is kept."""
    kept: dict[str, Any] = {}
    for name, value in values.items():
        verbatim = section == "train" or name == "options"
        if isinstance(value, dict) and not verbatim:
            value = _given(section, value)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            value = [_given(section, one) for one in value]
        is_open = value is None or (value == {} and section != "train")
        undoes = section == "train" and value is None and ARGUMENTS[name].default is not None
        if undoes or not is_open:
            kept[name] = value
    return kept


def _float(value: float) -> str:
    """Return the number with a point, so that YAML 1.1 readers take it as one too."""
    digits, e, exponent = repr(value).partition("e")
    if "." not in digits:
        digits += ".0"
    return f"{digits}{e}{exponent}"


def _style(text: str) -> str | None:
    """Return quotes where the text would read as a number, a word of YAML 1.2, or not at all."""
    is_number = INTEGER.fullmatch(text) or FLOAT.fullmatch(text)
    return '"' if is_number or text in WORDS or text.startswith(".") else None
