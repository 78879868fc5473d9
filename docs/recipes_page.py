"""Write docs/recipes.md and recipes/schema.json from the schema: `python docs/recipes_page.py`."""

import json
import sys
from collections.abc import Iterable
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from pydantic import TypeAdapter

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pipeline.process.storage import write_text  # noqa: E402
from pipeline.recipe.dial import ADAM_GROUPS, MATRIX_GROUP  # noqa: E402
from pipeline.recipe.error_messages import expected  # noqa: E402
from pipeline.recipe.schema import ARGUMENTS, SECTIONS, Argument, Recipe, alternatives, keys_of  # noqa: E402
from pipeline.recipe.sizes import MODERN, TANDEM_OPTIONS  # noqa: E402
from pipeline.recipe.values import options_kind, recipe_kind  # noqa: E402

INTRODUCTION = """\
# Recipes

<!-- Written by `python docs/recipes_page.py`; change pipeline/recipe/schema.py, then run it again. -->

One YAML file is one run: `tandem pretrain RECIPE.yaml [section.key=value ...]`. Keys marked = must match when a run is continued:
with another value it is another run (`run.fork_from`). All others may change and are really applied.

- **Which file.** A path, or a bare name with or without `.yaml`, looked for here, in `recipes/` and among the shipped ones.
  `extends: other.yaml` takes over another recipe: sections are merged key by key, lists replaced. The resolved recipe is saved in the run
  directory and runs as it is.
- **How long.** Exactly one horizon is in force: `run.minutes`, `train.max_steps`, `train.num_train_epochs`, `run.tokens`,
  `run.tokens_per_param` or `run.flops`. One named by an override or an extending recipe replaces the inherited one and shortens a longer
  warm-up: `train.max_steps=20` is a smoke test of any recipe. `data.batch_tokens` and `train.gradient_accumulation_steps` replace each other alike.
- **Overrides** have the types of the file: `train.max_steps=100`, `'data.sources=[{files: x.parquet}]'` (a list is given whole, in a
  shell in quotes). Where a key holds text, its value is what was typed, `#` and colons included (`'run.note=C# port #3'`). A typo is
  refused with the nearest right name.
- **YAML** is read as 1.2: `3e-4` is a number; `yes`, `no`, `on` and `off` are text; `null` means that the key is not given. Anchors,
  aliases and merge keys (`<<: *name`) work; a top-level key that begins with `x-` is a place for anchors. A recipe has at most 1 MiB.
- **Code.** `module:attr` names an object of a module in `run.code_folder` (by default the recipe's folder).
- **Secrets.** A token or password is refused: set `HF_TOKEN` or run `hf auth login`; `WANDB_API_KEY` for W&B.
- **Editors** with a YAML language server complete and check keys by `recipes/schema.json`: begin a recipe with
  `# yaml-language-server: $schema=PATH/recipes/schema.json`.
"""  # noqa: E501
TRAIN = """\
## train

`transformers.TrainingArguments` by their own names: passed unchanged, passed with our default, set by another key, or
refused with the reason. Cadences (`logging_steps`, `eval_steps`, `save_steps`) count optimizer steps.
"""
OPTIONS = """\
### model.options

Fields of the config of `model.type`, verbatim. For `tandem` (GPT-2 when nothing is set):
"""


TYPES = {
    "a whole number": "integer",
    "a number": "number",
    "true or false": "boolean",
    "keys with values": "mapping",
    "a list": "list",
    " or null": "",
}
GROUP_DEFAULTS = """\
### Defaults of the groups

Those of nanochat, tuned at width 768 and batches of 2^19 tokens (`matrices (adamw)`: a value of small models). Under
`model.depth` every rate is multiplied by sqrt(batch_tokens / 2^19) (`rate_scale`; the gates' only where that is below 1),
those of the embeddings and the head also by sqrt(768 / n_embd), and Muon's decay becomes 0.28 x sqrt(batch_tokens / 2^19) x N(depth 12) / N.
"""  # noqa: E501


def render() -> str:
    """Return the whole page."""
    parts = [INTRODUCTION]
    hints = get_type_hints(Recipe)
    for section in SECTIONS:
        if section == "train":
            parts.append(_train())
            continue
        parts += _section(section, hints[section], level=2)
        if section == "model":
            parts.append(_options())
        if section == "optimizer":
            parts.append(_group_defaults())
    return "\n".join(parts)


def _table(*rows: Iterable[str]) -> str:
    """Return a table whose first row is its head."""
    lines = [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    lines.insert(1, "|---" * len(list(rows[0])) + "|")
    return "\n".join([*lines, ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _section(path: str, cls: Any, *, level: int) -> list[str]:
    """Return the parts of a section, and of those in it."""
    rows = [("key", "type", "default", "meaning")]
    nested = []
    for f, annotation in keys_of(cls):
        doc = f.metadata["doc"]
        inner = next(filter(is_dataclass, alternatives(annotation)), None)  # model.adapter may be left out
        if inner is not None:
            nested.append((f"{path}.{f.name}", inner))
            rows.append((f.name, "keys", "", doc))
            continue
        if f.name == "sources":
            nested.append((f"{path}.{f.name}.<n>", get_args(annotation)[0]))
        mark = " =" if f.metadata["must_match"] else ""
        rows.append((f.name + mark, _type(annotation), _value(f.metadata["default"]), doc))
    if path == "optimizer.groups":  # they have the same keys
        nested = [(f"{path}.<group>", nested[0][1])]
    parts = [f"{'#' * level} {_cell(path)}", "", f"{cls.__doc__}", "", _table(*rows)]
    for name, inner in nested:
        parts += _section(name, inner, level=level + 1)
    return parts


def _type(annotation: Any) -> str:
    words = expected(annotation)
    for long, short in TYPES.items():
        words = words.replace(long, short)
    return words


def _value(value: Any) -> str:
    if value is None or value == {} or value == []:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "; ".join(map(str, value))
    if isinstance(value, dict):
        inner = ", ".join(f"{name}: {_value(one)}" for name, one in value.items())
        return f"{{{inner}}}"
    if isinstance(value, int) and value >= 10_000:
        return f"{value:,}"
    return str(value)


def _options() -> str:
    rows = [(name, _type(kind), _value(MODERN.get(name))) for name, kind in TANDEM_OPTIONS.items()]
    return "\n".join([OPTIONS, _table(("field", "type", "preset modern"), *rows)])


def _group_defaults() -> str:
    groups = dict(ADAM_GROUPS)
    for kind, settings in MATRIX_GROUP.items():
        groups[f"matrices ({kind})"] = settings
    names = ("learning_rate", "betas", "eps", "weight_decay", "momentum")
    rows = []
    for group, settings in groups.items():
        rows.append([group, *(_value(settings.get(name)) for name in names)])
    return "\n".join([GROUP_DEFAULTS, _table(("group", *names), *rows)])


def _train() -> str:
    parts = [TRAIN]
    titles = {"supported": "Passed unchanged", "overridden": "Passed with our default", "added": "Added"}
    for kind, title in titles.items():
        rows = [("field", "type", "default", "meaning")]
        for name, argument in _arguments(kind):
            text = argument.text
            if argument.trainer_only:
                text += " Only with optimizer.type: trainer."
            if argument.only:
                text += f" No other value is accepted: {argument.only}."
            mark = " =" if argument.must_match else ""
            rows.append((name + mark, _type(argument.type), _value(argument.default), text))
        parts += [f"### {title}", "", _table(*rows)]
    for kind, title, head in (("managed", "Set by another key", "set by"), ("rejected", "Refused", "why")):
        fields: dict[str, list[str]] = {}
        for name, argument in _arguments(kind):
            fields.setdefault(argument.text, []).append(name)
        rows = [(", ".join(names), reason) for reason, names in fields.items()]
        parts += [f"### {title}", "", _table(("field", head), *rows)]
    return "\n".join(parts)


def _arguments(kind: str) -> list[tuple[str, Argument]]:
    return [(name, argument) for name, argument in ARGUMENTS.items() if argument.kind == kind]


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a recipe file as pydantic writes it; checks over several keys are the reader's."""
    made = TypeAdapter(recipe_kind()).json_schema()
    schema = _for_editors(made, made["$defs"])
    for name, cls in get_type_hints(Recipe).items():
        if name in SECTIONS:
            schema["properties"][name] = {"description": cls.__doc__, **schema["properties"][name]}
    options = TypeAdapter(options_kind()).json_schema()["properties"]
    schema["properties"]["model"]["properties"]["options"]["properties"] = _for_editors(options, {})
    extends = "Another recipe that this one changes: a path relative to this file, or a bare name."
    schema["properties"] = {"extends": {"type": "string", "description": extends}, **schema["properties"]}
    anchors = {"^x-": {"description": "A place for anchors."}}
    head = {"$schema": "http://json-schema.org/draft-07/schema#"}
    return {**head, **schema, "title": "Tandem recipe", "patternProperties": anchors, "type": "object"}


def _for_editors(schema: Any, definitions: dict[str, Any]) -> Any:
    """Return the schema with its definitions in their places, null for an empty section, and numbers such as
    2_000_000, which are text to YAML 1.2 and so to an editor."""
    if isinstance(schema, list):
        return [_for_editors(part, definitions) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]] | {k: v for k, v in schema.items() if k != "$ref"}
    schema = {name: _for_editors(part, definitions) for name, part in schema.items() if name not in ("$defs", "title")}
    if schema.get("type") in ("integer", "number"):
        schema |= {"type": [schema["type"], "string"], "pattern": "^[-+]?[0-9]+(_[0-9]+)+$"}
    if schema.get("additionalProperties") is False:
        schema["type"] = ["object", "null"]
    return schema


if __name__ == "__main__":
    for path, text in {
        ROOT / "docs" / "recipes.md": render(),
        ROOT / "recipes" / "schema.json": json.dumps(json_schema(), indent=1) + "\n",
    }.items():
        write_text(path, text)
        print(f"wrote {path}")
