"""A recipe read from its file and overrides, and written again with every default."""

from dataclasses import fields
from typing import Any

import yaml

from pipeline.recipe.checks import check_filled, check_given, check_stage
from pipeline.recipe.layers import find_recipe, read_layers, recipe_of
from pipeline.recipe.located_yaml import FLOAT, INTEGER, WORDS, Item, Problems, show
from pipeline.recipe.resolve import Stage, fill, infer_stage, plain
from pipeline.recipe.schema import SECTIONS, Recipe, freeze
from pipeline.recipe.sizes import LLAMA_NAMES, NOT_OPTIONS, PORTABLE_PATTERNS, PORTABLE_TYPE, TANDEM_OPTIONS
from pipeline.recipe.supported_arguments import ARGUMENTS, DERIVED, REFUSED_OPTIMIZERS, Argument
from pipeline.recipe.values import MISSING, Converter, unknown_key, why_not_accepted

# `RECIPE.yaml section.key=value ...` as one typed, resolved recipe, or every mistake of it at once.


def read_recipe(argv: list[str], *, stage: Stage | None = None) -> Recipe:
    """Return the recipe argv[0], by path or bare name, with the overrides argv[1:], frozen. stage: that of the command, None when it serves both.

    Raises RecipeError with one line per mistake, InputMissingError when the recipe or one it extends is not there.
    """
    path = find_recipe(recipe_of(argv))
    problems = Problems()
    tree = read_layers(path, argv[1:], problems)
    recipe = _typed(tree, problems)
    recipe.path, recipe.arguments = path, list(argv)
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
    return freeze(recipe)


def _typed(tree: Item, problems: Problems) -> Recipe:
    convert = Converter(problems)
    recipe = Recipe()
    sections = {f.name: f for f in fields(Recipe) if f.name in SECTIONS}
    for name, item in tree.value.items():
        if name.startswith("x-"):
            continue  # a place for anchors
        if name not in sections:
            problems.add(f"{item.where}: {name}", unknown_key(name))
        elif name == "train":
            recipe.train = read_train(item, convert)
        else:
            convert.places[name] = item.where
            setattr(recipe, name, convert.section(sections[name].type, item, name))  # type: ignore[arg-type]
    if recipe.model.preset == "portable":
        recipe.model.type = recipe.model.type if "model.type" in convert.places else PORTABLE_TYPE
        if "tokenizer.split_pattern" not in convert.places:
            recipe.tokenizer.split_pattern = PORTABLE_PATTERNS[0]
    options = tree.value.get("model", Item({}, "")).value or {}
    if recipe.model.type == "tandem" and isinstance(options, dict) and "options" in options:
        recipe.model.options = _options(options["options"], convert)
    recipe.places = convert.places
    if recipe.model.preset == "portable" and isinstance(options, dict) and "options" in options:
        given = options["options"].value
        recipe.places |= {f"model.options.{name}": child.where for name, child in given.items()}
    if recipe.model.type != "tandem":
        _sizes_among_options(recipe, problems)
    return recipe


def read_train(item: Item, convert: Converter) -> dict[str, Any]:
    """Return the typed values of `train:` as given; every mistake is noted in the converter's problems."""
    if item.value is None:
        return {}
    if not isinstance(item.value, dict):
        convert.problems.add(f"{item.where}: train", "must be keys with values. Write them below it, indented.")
        return {}
    values = {}
    for name, child in item.value.items():
        path, place = f"train.{name}", f"{child.where}: train.{name}"
        argument = ARGUMENTS.get(name)
        if argument is None:
            convert.problems.add(place, unknown_key(path))
            continue
        if not argument.accepted:
            convert.problems.add(place, why_not_accepted(name))
            continue
        convert.places[path] = child.where
        if child.value is None and name in DERIVED:
            continue
        if name == "optim" and isinstance(child.value, str) and child.value in REFUSED_OPTIMIZERS:
            why, instead = REFUSED_OPTIMIZERS[child.value]
            convert.problems.add(place, f"{child.value} is refused: {why}. Write {instead}.")
            continue
        value = convert.value(argument.type, child, path, argument.limits)
        if value is MISSING or not _keys_are_known(argument, child, path, convert):
            continue
        if argument.only and value != argument.default:
            convert.problems.add(
                place, f"is {show(value)} and must stay {show(argument.default)}: {argument.only}. Remove it."
            )
            continue
        values[name] = value
    if isinstance(values.get("accelerator_config"), dict):
        values["accelerator_config"] = {**ARGUMENTS["accelerator_config"].default, **values["accelerator_config"]}
    return values


def _keys_are_known(argument: Argument, item: Item, path: str, convert: Converter) -> bool:
    """Return whether the keys of a dictionary are those that its reader takes, with values of their types; else their mistakes are noted."""
    if argument.keys is None or not isinstance(item.value, dict):
        return True
    before = len(convert.problems.lines)
    for key, child in item.value.items():
        if key in argument.keys:
            convert.value(argument.keys[key], child, f"{path}.{key}", {"minimum": 1})
        else:
            convert.problems.add(f"{child.where}: {path}.{key}", f"unknown key. It has: {', '.join(argument.keys)}.")
    return len(convert.problems.lines) == before


def _sizes_among_options(recipe: Recipe, problems: Problems) -> None:
    """A size that model.options gives by the config's own name is the one of `model:`, and plan and training take it from there."""
    model = recipe.model
    for ours, theirs in LLAMA_NAMES.items():
        for name in {ours, theirs} & model.options.keys():
            value, own = model.options[name], getattr(model, ours)
            if own is None and type(value) is int and value >= 1:
                setattr(model, ours, value)
            elif own is not None and own != value:
                problems.add(recipe.where("model.options"), f"{name} is {show(value)}, and model.{ours} is {own}. Keep one of the two.")  # fmt: skip


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


# The resolved recipe as YAML that runs again and means the same.


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
    """YAML of every key that has a value. Derived steps are a comment: they follow again from the horizon given."""
    values = {section: _given(section, keys) for section, keys in plain(recipe).items()}
    del values["run"]["trust_code"]  # of this start: the user's word, not the recipe's
    if "train.max_steps" in recipe.filled:
        del values["train"]["max_steps"]
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
    """`model.n_layer = 24 (set by model.depth)` for every value that the recipe left open and another one set."""
    lines = []
    for name, cause in recipe.filled.items():
        target: Any = recipe
        for part in name.split("."):
            target = target[part] if isinstance(target, dict) else getattr(target, part)
        lines.append(
            f"{name} = {target:,} (set by {cause})"
            if isinstance(target, int)
            else f"{name} = {_number(target)} (set by {cause})"
        )
    return lines


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _given(section: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the section without keys that are open. A null that undoes a default is kept."""
    kept: dict[str, Any] = {}
    for name, value in values.items():
        verbatim = section == "train" or name == "options"
        if isinstance(value, dict) and not verbatim:
            value = _given(section, value)
        elif isinstance(value, list):
            value = [_given(section, v) if isinstance(v, dict) else v for v in value]
        undone = section == "train" and value is None and ARGUMENTS[name].default is not None
        if undone or (value is not None and (value != {} or section == "train")):
            kept[name] = value
    return kept


def _float(value: float) -> str:
    """With a point, so that YAML 1.1 readers take it as a number too."""
    digits, e, exponent = repr(value).partition("e")
    return f"{digits}{'' if '.' in digits else '.0'}{e}{exponent}"


def _style(text: str) -> str | None:
    """Quotes where the text would read as a number, a word of YAML 1.2, or not at all."""
    return '"' if text in WORDS or INTEGER.fullmatch(text) or FLOAT.fullmatch(text) or text.startswith(".") else None
