"""A recipe read from its file and overrides, its keys checked against each other, and written again with every
default."""

from dataclasses import fields
from typing import Any

import yaml

from pipeline.recipe.layers import find_recipe, read_layers, recipe_of
from pipeline.recipe.located_yaml import FLOAT, INTEGER, WORDS, Item, Problems, show
from pipeline.recipe.resolve import (
    KEY,
    MATRIX_GROUP,
    Stage,
    becomes_tandem,
    fill,
    group_settings,
    horizons,
    infer_stage,
    is_auto,
    plain,
    step_rows,
    warmup_of,
)
from pipeline.recipe.schema import (
    ARGUMENTS,
    COLUMN_ROLES,
    DERIVED,
    FORMATS,
    MOST_STEPS,
    REFUSED_OPTIMIZERS,
    SECTIONS,
    Argument,
    Group,
    Recipe,
    Source,
    freeze,
)
from pipeline.recipe.sizes import (
    LLAMA_NAMES,
    NOT_OPTIONS,
    PORTABLE_PATTERNS,
    PORTABLE_TYPE,
    TANDEM_OPTIONS,
    options_of,
)
from pipeline.recipe.values import MISSING, Converter, check_forms, check_profile_steps

# Checks of keys against each other: values that contradict one another.

COMMANDS = {"pretrain": "pipeline/pretrain.py", "sft": "pipeline/sft.py"}
MOST_APART = 1e9  # weights of sources
OPTIMIZERS = ("trainer", *MATRIX_GROUP)
BUILT_IN = ("tandem:quickstart_text", "tandem:quickstart_chat", "tandem:spelling")


def check_stage(recipe: Recipe, stage: str | None, problems: Problems) -> None:
    """A recipe for one stage given to the command of the other."""
    meant = recipe.stage
    if stage and meant != stage:
        why = "run.stage is" if recipe.run.stage else "its sources hold"
        what = meant if recipe.run.stage else {"sft": "conversations", "pretrain": "plain text"}[meant]
        problems.add(
            recipe.where("run.stage") if recipe.run.stage else f"{recipe.path}: data.sources",
            f"{why} {what}, and this command is stage {stage}. Run: accelerate launch {COMMANDS[meant]} {recipe.path}",
        )


def check_given(recipe: Recipe, problems: Problems) -> None:
    """Checks on what the recipe says itself, before anything is filled."""
    for check in (_horizon, _batch_keys, _sources, _optimizer, _model, _train, check_forms):
        check(recipe, problems)
    if not (isinstance(recipe.run.resume, int) or recipe.run.resume in ("auto", "never")):
        problems.add(
            recipe.where("run.resume"), f"is {recipe.run.resume!r}; it must be auto, never, or the number of a step."
        )


def check_filled(recipe: Recipe, problems: Problems) -> None:
    """Checks that need the sizes, the batch and the steps."""
    model, data = recipe.model, recipe.data
    if model.n_embd and model.n_head:
        heads = model.n_head
        if model.n_embd % heads:
            near = _nearest(model.n_embd, heads)
            problems.add(
                recipe.where("model.n_embd"),
                f"is {model.n_embd}, not a multiple of model.n_head ({heads}). Write {near}, or change model.n_head.",
            )
        elif options_of(recipe).get("position_embedding") == "rope" and model.n_embd // heads % 2:
            problems.add(
                recipe.where("model.n_head"),
                f"gives heads of {model.n_embd // heads} channels, and rope turns pairs. Make n_embd / n_head even.",
            )
        if model.n_kv_head and heads % model.n_kv_head:
            problems.add(
                recipe.where("model.n_kv_head"),
                f"is {model.n_kv_head} and does not divide model.n_head ({heads}). Write a divisor of {heads}.",
            )
    if model.n_positions and data.row_tokens > model.n_positions:
        cure = (
            "" if recipe.filled.get("model.n_positions") == "model.start_from" else ", or leave model.n_positions out"
        )
        problems.add(
            recipe.where("data.row_tokens"),
            f"is {data.row_tokens}, more than model.n_positions ({model.n_positions}). Make the rows shorter{cure}.",
        )
    if data.batch_tokens and data.batch_tokens % data.row_tokens:
        near = _nearest(data.batch_tokens, data.row_tokens)
        problems.add(
            recipe.where("data.batch_tokens"),
            f"is {data.batch_tokens}, not a multiple of data.row_tokens ({data.row_tokens}): a step is whole rows. "
            f"Write {near}.",
        )
    if data.batch_tokens:
        check_halvings(recipe, problems)
    if recipe.train.get("max_steps", 0) > MOST_STEPS:
        named = horizons(recipe)[0]
        problems.add(
            recipe.where(named),
            f"comes to {recipe.train['max_steps']:,} steps of {data.batch_tokens:,} tokens; {MOST_STEPS:,} are the "
            "most. Make it smaller.",
        )
    for check in (_embedding_dtype, check_profile_steps, check_warmup):
        check(recipe, problems)


def _embedding_dtype(recipe: Recipe, problems: Problems) -> None:
    """Refuse a model.embedding_dtype that the recipe's model does not support; training/build.py checks a model that
    comes from the Hub."""
    model, where = recipe.model, recipe.where("model.embedding_dtype")
    start = model.start_config
    if model.embedding_dtype == "float32":
        return
    if recipe.train.get("fp16"):
        problems.add(
            where, f"is {model.embedding_dtype} beside train.fp16, for GPUs without bfloat16. Keep one of the two."
        )
    if model.start_from and start is None:
        return
    kind = model.type if start is None else start.get("model_type")
    if not becomes_tandem(recipe):
        problems.add(where, f"is for model.type tandem, and this model is a {kind}. Remove it: float32 is used.")
    elif (options_of(recipe) if start is None else start).get("tie_word_embeddings", kind != "nanochat"):
        problems.add(
            where,
            f"is {model.embedding_dtype}, and the head is tied to the token embedding: it would be rounded too. "
            + ("Remove it." if start else "Remove it, or set model.options.tie_word_embeddings: false."),
        )


def check_halvings(recipe: Recipe, problems: Problems) -> None:
    """Smaller first steps of no whole rows, once data.batch_tokens is known."""
    rows = step_rows(recipe)
    if rows.full % (halved := 2**rows.halvings):
        problems.add(
            recipe.where("optimizer.schedule.batch_halvings"),
            f"is {rows.halvings}, and {rows.full} rows of a step cannot be halved that often. "
            f"Make data.batch_tokens a multiple of {halved * recipe.data.row_tokens}, or halve it less often.",
        )


def check_warmup(recipe: Recipe, problems: Problems) -> None:
    """A warm-up longer than the run, once its steps are known: a horizon in epochs is with the data."""
    steps = recipe.train.get("max_steps")
    if not steps:
        return
    name, warmup = warmup_of(recipe, steps)
    if warmup > steps:
        problems.add(
            recipe.where(name),
            f"is {warmup}, longer than the run of {steps} steps: the rate would never reach its peak. Write at most "
            f"{steps}.",
        )


def _nearest(value: int, multiple: int) -> str:
    low = value // multiple * multiple
    return f"{low} or {low + multiple}" if low else str(multiple)


def _horizon(recipe: Recipe, problems: Problems) -> None:
    named = horizons(recipe)
    if len(named) > 1:
        others = ", ".join(f"{n} ({recipe.places.get(n)})" for n in named[1:])
        problems.add(recipe.where(named[0]), f"is a second horizon beside {others}. Keep exactly one.")
    elif not named and not (recipe.model.depth and recipe.stage == "pretrain"):
        problems.add(
            f"{recipe.path}: train",
            "says nothing on how long to train. Give one of train.max_steps, train.num_train_epochs, run.tokens, "
            "run.tokens_per_param, run.flops.",
        )


def _batch_keys(recipe: Recipe, problems: Problems) -> None:
    batch, accumulation = recipe.data.batch_tokens, recipe.train.get("gradient_accumulation_steps")
    if batch is not None and accumulation is not None:
        problems.add(
            recipe.where("data.batch_tokens"),
            "stands beside train.gradient_accumulation_steps, and each follows from the other. Keep one.",
        )
    if accumulation is not None and is_auto(recipe):
        problems.add(
            recipe.where(KEY),
            "is auto beside train.gradient_accumulation_steps: the global batch would follow from what fits. Give "
            "data.batch_tokens instead.",
        )
    if batch is None and accumulation is None and recipe.model.depth is None:
        problems.add(
            f"{recipe.path}: data.batch_tokens",
            "is missing: the tokens of one optimizer step. Give it, or train.gradient_accumulation_steps.",
        )


def _sources(recipe: Recipe, problems: Problems) -> None:
    if not recipe.data.sources:
        problems.add(
            f"{recipe.path}: data.sources",
            "is missing: there is nothing to train on. Give a list such as [{files: texts/*.parquet}].",
        )
    for key, sources in (("data.sources", recipe.data.sources), ("data.validation", recipe.data.validation or [])):
        for i, source in enumerate(sources):
            _source(recipe, f"{key}.{i}", source, problems)
    weighted = [s for s in recipe.data.sources if s.weight is not None]
    counted = [s for s in recipe.data.sources if s.epochs is not None]
    if weighted and max(s.weight or 0 for s in weighted) > MOST_APART * min(s.weight or 0 for s in weighted):
        problems.add(
            recipe.where("data.sources"),
            f"has weights of which one is more than {MOST_APART:g} times another: of the smaller no row would ever "
            "come. Bring them nearer.",
        )
    if weighted and counted and len(weighted) + len(counted) < len(recipe.data.sources):
        problems.add(
            recipe.where("data.sources"),
            "mixes weights, epochs and sources with neither. Give every source one of the two.",
        )


def _source(recipe: Recipe, name: str, source: Source, problems: Problems) -> None:
    check_source(recipe, name, source, problems)
    if source.columns is not None and _columns_mistake(source):
        return
    place, chat, roles = recipe.where(name), recipe.stage == "sft", set(source.columns or ())
    if chat and (source.text_column or source.format == "text" or "text" in roles):
        problems.add(
            place,
            "holds plain text, and SFT trains on conversations. Give messages_column or a chat format, or set "
            "run.stage: pretrain.",
        )
    if not chat and (source.messages_column or FORMATS.get(source.format or "") == "chat" or roles - {"text"}):
        problems.add(
            place, "holds conversations, and pretraining reads plain text. Give text_column, or set run.stage: sft."
        )


def check_source(recipe: Recipe, name: str, source: Source, problems: Problems) -> None:
    """Add what is wrong with a source in every stage."""
    place = recipe.where(name)
    if source.id is None and not source.files:
        problems.add(place, "names nothing to read. Give id (a data set of the Hub) or files (paths on this machine).")
    if source.weight is not None and source.epochs is not None:
        problems.add(place, "has a weight and epochs. Keep one.")
    if source.passes and name.startswith("data.validation"):
        problems.add(recipe.where(f"{name}.passes"), "counts in data.sources; validation is read once. Remove it.")
    if source.id and source.id.startswith("tandem:") and source.id not in BUILT_IN:
        problems.add(recipe.where(f"{name}.id"), f"there is no built-in {source.id}. There are {', '.join(BUILT_IN)}.")
    if source.format and ":" not in source.format and source.format not in FORMATS:
        problems.add(
            recipe.where(f"{name}.format"), f"is {source.format!r}. Write {', '.join(FORMATS)}, or module:attr."
        )
    if source.columns is not None and (mistake := _columns_mistake(source)):
        problems.add(recipe.where(f"{name}.columns"), mistake)
    if (source.config or source.revision) and source.id is None:
        problems.add(place, "config and revision belong to a data set of the Hub. Remove them, or give id.")


def _columns_mistake(source: Source) -> str | None:
    """Return why `columns` of a source says none of its three things, or says it beside another key that does, or
    None."""
    columns = source.columns or {}
    example = "Write columns: {prompt: COLUMN, response: COLUMN}, {messages: COLUMN} or {text: COLUMN}."
    if unknown := [role for role in columns if role not in COLUMN_ROLES]:
        return f"names {', '.join(map(repr, unknown))}, which is none of {', '.join(COLUMN_ROLES)}. {example}"
    if not all(isinstance(column, str) and column for column in columns.values()):
        return f"must give each of {', '.join(columns)} the name of one column. {example}"
    main = [role for role in ("text", "messages", "prompt") if role in columns]
    only = {"text": {"text"}, "messages": {"messages", "system", "tools"}}.get(main[0] if main else "", set(columns))
    if len(main) != 1 or ("prompt" in columns) != ("response" in columns) or set(columns) - only:
        return f"says {', '.join(columns) or 'nothing'}, from which no document or conversation follows. {example}"
    if beside := [key for key in ("text_column", "messages_column", "format") if getattr(source, key)]:
        return f"stands beside {' and '.join(beside)}, which says the same. Keep columns."
    return None


def _optimizer(recipe: Recipe, problems: Problems) -> None:
    kind = recipe.optimizer.type
    if kind not in OPTIMIZERS and ":" not in kind:
        problems.add(recipe.where("optimizer.type"), f"is {kind!r}. Write {', '.join(OPTIMIZERS)}, or module:attr.")
        return
    if kind == "trainer":
        used = ("optimizer.type", "optimizer.groups", "optimizer.schedule")
        unused = [n for n in recipe.places if n.startswith("optimizer.") and n not in used]
        for name in (n for n in unused if not any(other.startswith(f"{n}.") for other in unused)):
            problems.add(
                recipe.where(name),
                "is not used by optimizer.type trainer, which takes train.learning_rate and its scheduler. "
                f"Set optimizer.type to {' or '.join(MATRIX_GROUP)}, or remove this.",
            )
        return
    for name in sorted(recipe.train):
        if ARGUMENTS[name].trainer_only and recipe.train[name] is not None:
            hints = {"learning_rate": _all_rates(recipe), "warmup_steps": "optimizer.schedule.warmup_steps"}
            hint = hints.get(name, "optimizer.groups and optimizer.schedule")
            problems.add(
                recipe.where(f"train.{name}"),
                f"is not used by optimizer.type {kind}. Use {hint}, or set optimizer.type: trainer.",
            )
    if ":" in kind:
        return
    for group in vars(recipe.optimizer.groups):
        settings: Group = getattr(recipe.optimizer.groups, group)
        for name, value in vars(settings).items():
            path = f"optimizer.groups.{group}.{name}"
            if value is not None and name not in group_settings(kind, group):
                problems.add(
                    recipe.where(path),
                    f"is not a setting of this group under optimizer.type {kind}; it has "
                    f"{', '.join(sorted(group_settings(kind, group)))}. Remove it.",
                )
        if settings.betas is not None and (len(settings.betas) != 2 or not all(0 <= b < 1 for b in settings.betas)):
            problems.add(
                recipe.where(f"optimizer.groups.{group}.betas"),
                f"is {settings.betas}; it must be two numbers from 0 to below 1. Write [0.9, 0.95].",
            )


def _all_rates(recipe: Recipe) -> str:
    """Return the keys for a user who means one learning rate; which one of several it were is not to be guessed."""
    rate = recipe.optimizer.groups.matrices.learning_rate or MATRIX_GROUP.get(recipe.optimizer.type, {}).get(
        "learning_rate"
    )
    own = f" (matrices: {rate:g})" if rate else ""
    return (
        "optimizer.rate_scale=0.5, which halves the rates of all groups, or optimizer.groups.<group>.learning_rate "
        f"for that of one{own}"
    )


def _model(recipe: Recipe, problems: Problems) -> None:
    model = recipe.model
    own = {"modern": "tandem", "modern_bigram": "tandem", "portable": PORTABLE_TYPE}.get(model.preset, model.type)
    if model.type != own:
        problems.add(
            recipe.where("model.preset"),
            f"{model.preset} is a preset of model.type {own}, not of {model.type}. Remove one of the two.",
        )
    if model.n_kv_head and model.type == "gpt2":
        problems.add(
            recipe.where("model.n_kv_head"),
            "gpt2 has no grouped keys and values. Remove it, or use model.type: tandem.",
        )
    sized = all(getattr(model, name) for name in ("n_layer", "n_embd", "n_head"))
    if not sized and model.depth is None and not model.start_from:
        missing = [f"model.{n}" for n in ("n_layer", "n_embd", "n_head") if getattr(model, n) is None]
        problems.add(
            f"{recipe.path}: model", f"{' and '.join(missing)} missing. Give them, or model.depth, which sets all."
        )
    pattern = model.options.get("window_pattern") if model.type == "tandem" else None
    if pattern is not None and (not pattern or set(pattern) - set("SL")):
        problems.add(
            recipe.where("model.options.window_pattern"),
            f"is {pattern!r}; it must be letters S (sliding) and L (full), as SSSL.",
        )


def _train(recipe: Recipe, problems: Problems) -> None:
    train = recipe.train
    if train.get("bf16") is True and train.get("fp16"):
        problems.add(recipe.where("train.fp16"), "stands beside train.bf16. Keep one of the two.")
    if train.get("fp8") and (train.get("fp16") or not train.get("bf16")):
        problems.add(
            recipe.where("train.fp8"), "stands beside bf16, for all but the blocks. Write bf16: true, without fp16."
        )
    for name in ("torch_compile_mode", "torch_compile_backend"):
        if train.get(name) is not None and not train.get("torch_compile"):
            problems.add(
                recipe.where(f"train.{name}"),
                "is given and train.torch_compile is not: transformers would compile all the same, and the plan be "
                "wrong. Write torch_compile: true, or remove this.",
            )
    if train.get("torch_compile_mode") is not None and train.get("torch_compile_backend") not in (None, "inductor"):
        problems.add(
            recipe.where("train.torch_compile_mode"),
            f"is of the backend inductor, and train.torch_compile_backend is {train['torch_compile_backend']}. "
            "Remove one of the two.",
        )
    new, old = "activation_checkpointing", "gradient_checkpointing"
    if train.get(new) is not None and train.get(old) is not None:
        problems.add(
            recipe.where(f"train.{old}"), f"is the older name of train.{new}, and both are given. Keep {new}."
        )


# `RECIPE.yaml section.key=value ...` as one typed, resolved recipe, or every mistake of it at once.


def read_recipe(argv: list[str], *, stage: Stage | None = None) -> Recipe:
    """Return the recipe argv[0], by path or bare name, with the overrides argv[1:], frozen. stage: that of the
    command, None when it serves both.

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
            from pipeline.recipe.mistakes import unknown_key

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
        if argument is None or not argument.accepted:
            from pipeline.recipe.mistakes import unknown_key, why_not_accepted

            convert.problems.add(place, why_not_accepted(name) if argument else unknown_key(path))
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
    """Return whether the keys of a dictionary are those that its reader takes, with values of their types; else their
    mistakes are noted."""
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
    """A size that model.options gives by the config's own name is the one of `model:`, and plan and training take it
    from there."""
    model = recipe.model
    for ours, theirs in LLAMA_NAMES.items():
        for name in {ours, theirs} & model.options.keys():
            value, own = model.options[name], getattr(model, ours)
            if own is None and type(value) is int and value >= 1:
                setattr(model, ours, value)
            elif own is not None and own != value:
                problems.add(
                    recipe.where("model.options"),
                    f"{name} is {show(value)}, and model.{ours} is {own}. Keep one of the two.",
                )


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
            from pipeline.recipe.mistakes import unknown_key

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
        value: Any = recipe
        for part in name.split("."):
            value = value[part] if isinstance(value, dict) else getattr(value, part)
        shown = f"{value:,}" if isinstance(value, int) else f"{value:.6g}" if isinstance(value, float) else value
        lines.append(f"{name} = {shown} (set by {cause})")
    return lines


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
