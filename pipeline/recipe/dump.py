"""The resolved recipe as YAML that runs again and means the same."""

from typing import Any

import yaml

from pipeline.recipe.fates import FATES
from pipeline.recipe.located_yaml import FLOAT, INTEGER, WORDS
from pipeline.recipe.resolve import plain
from pipeline.recipe.schema import Recipe


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
    """The section without keys that are open. A null that undoes a default is kept."""
    kept: dict[str, Any] = {}
    for name, value in values.items():
        verbatim = section == "train" or name == "options"
        if isinstance(value, dict) and not verbatim:
            value = _given(section, value)
        elif isinstance(value, list):
            value = [_given(section, v) if isinstance(v, dict) else v for v in value]
        undone = section == "train" and value is None and FATES[name].default is not None
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
