"""`python -m pipeline.recipe` writes docs/recipes.md and recipes/schema.json."""

import json
from collections.abc import Iterable
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from pydantic import TypeAdapter

from pipeline.process.storage import write_text
from pipeline.recipe.dial import ADAM_GROUPS, MATRIX_GROUP
from pipeline.recipe.error_messages import expected
from pipeline.recipe.schema import ARGUMENTS, SECTIONS, Argument, Recipe, alternatives, keys_of
from pipeline.recipe.sizes import MODERN, TANDEM_OPTIONS
from pipeline.recipe.values import options_kind, recipe_kind

INTRODUCTION = """\
# Recipes

<!-- Written by `python -m pipeline.recipe`; change pipeline/recipe/schema.py, then run it again. -->

One YAML file is one run: `accelerate launch pipeline/pretrain.py RECIPE.yaml [section.key=value ...]`.

- Overrides have the types of the file: `train.max_steps=100`, `data.sources=[{files: x.parquet}]` (a list is given whole). A typo is refused with the nearest right name. Where a key holds text, its value is what
  was typed, `#`, colons and line breaks included (`'run.note=C# port #3'`), but for quotes around the whole; `null` is no value.
  Other values are read as YAML, and one of which a part would become a comment is refused.
- A recipe has at most 1 MiB, and its text no control characters but tabs and line breaks. `null` means that the key is not given.
- A recipe is named by its path or by its bare name, with or without `.yaml`: `quickstart_pretrain` is looked for here, in
  `recipes/` and among the shipped ones.
- `extends: other.yaml` (relative to the file, or a bare name) takes over another recipe; sections are merged key by key, lists replaced.
- Anchors, aliases and merge keys (`<<: *name`) work; a top-level key that begins with `x-` is a place for anchors.
- In a shell put a value with spaces, brackets or braces in quotes: `'data.sources=[{files: x.parquet}]'`.
- Exactly one horizon is in force: `train.max_steps`, `train.num_train_epochs`, `run.tokens`, `run.tokens_per_param` or
  `run.flops`. One named by an override or an extending recipe replaces the inherited one, and shortens an inherited warm-up that is
  longer than the run: `train.max_steps=20` is a smoke test of any recipe. The same holds for
  `data.batch_tokens` and `train.gradient_accumulation_steps`.
- Scalars are read as YAML 1.2 reads them: `3e-4` is a number; `yes`, `no`, `on` and `off` are text.
- `module:attr` names an object of a module in `run.code_folder` (by default the recipe's folder).
- Editors with a YAML language server complete keys, show their meaning and mark mistakes by `recipes/schema.json`, which
  the shipped recipes name in their first line; begin yours with `# yaml-language-server: $schema=PATH/recipes/schema.json`.
- A token or password is refused: set `HF_TOKEN` or run `hf auth login`; `WANDB_API_KEY` for W&B.
- The resolved recipe is saved in the run directory and runs as it is. Keys marked = must match when a run is continued;
  with another value it is another run (`run.fork_from`). All others may change and are really applied.
"""  # noqa: E501
TRAIN = """\
## train

`transformers.TrainingArguments` by their own names. Every field is passed unchanged (the default is
transformers'), passed with our default, set by another key of the recipe, or refused with its reason; what is added is
this program's. Cadences
(`logging_steps`, `eval_steps`, `save_steps`) count optimizer steps.
"""
OPTIONS = """\
### model.options

Fields of the config of `model.type`, verbatim. For `tandem` (GPT-2 when nothing is set):
"""


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
    return expected(annotation).replace(" or null", "")


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
        reasons = [(name, argument.text) for name, argument in _arguments(kind)]
        parts += [f"### {title}", "", _table(("field", head), *reasons)]
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
    root = Path(__file__).parents[2]
    for path, text in {
        root / "docs" / "recipes.md": render(),
        root / "recipes" / "schema.json": json.dumps(json_schema(), indent=1) + "\n",
    }.items():
        write_text(path, text)
        print(f"wrote {path}")
