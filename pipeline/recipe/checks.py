"""Checks of a recipe's keys against each other, and of values whose form would only fail later."""

import re
from collections.abc import Iterator
from glob import has_magic
from pathlib import Path
from typing import Any

from pipeline.process.commands import stage_command
from pipeline.process.network import SCHEMES, SHARDS_FORMS, is_address, is_supported, takes_shards
from pipeline.recipe.batch import KEY, StepRows
from pipeline.recipe.dial import MATRIX_GROUP, group_settings
from pipeline.recipe.layers import SHIPPED
from pipeline.recipe.located_yaml import Say, show
from pipeline.recipe.resolve import warmup_of
from pipeline.recipe.schema import (
    ARGUMENTS,
    COLUMN_ROLES,
    FORMATS,
    MOST_STEPS,
    Data,
    Hub,
    Model,
    Optimizer,
    Recipe,
    Run,
    Source,
)
from pipeline.recipe.sizes import PORTABLE_TYPE, options_of

MOST_APART = 1e9  # weights of sources
OPTIMIZERS = ("trainer", *MATRIX_GROUP)
BUILT_IN = ("tandem:quickstart_text", "tandem:quickstart_chat", "tandem:spelling")
BRANCH = re.compile(r"[A-Za-z0-9_][\w.\-/]*", re.ASCII)


def check_stage(recipe: Recipe, stage: str | None, say: Say) -> None:
    """Note a recipe for one stage that was given to the command of the other."""
    meant = recipe.stage
    if stage is None or meant == stage:
        return
    if recipe.run.stage:
        key, why = "run.stage", f"run.stage is {meant}"
    else:
        kind = "conversations" if meant == "sft" else "plain text"
        key, why = "data.sources", f"its sources hold {kind}"
    path = Path(str(recipe.path))
    name = path.stem if path.absolute().parent == SHIPPED else str(path)
    say(
        key,
        f"{why}, and this command is stage {stage}. Run: {stage_command(name, meant)}",
    )


def check_given(recipe: Recipe, say: Say) -> None:
    """Check what the recipe says itself, before anything is filled."""
    _horizon(recipe, say)
    _batch_keys(recipe, say)
    _sources(recipe.data, recipe.stage, say)
    _optimizer(recipe.optimizer, recipe.train, list(recipe.places), say)
    _model(recipe.model, say)
    if recipe.model.adapter is not None:
        _adapter(recipe, say)
    _train(recipe.train, say)
    _run(recipe.run, say)
    _addresses(recipe, say)
    _hub(recipe.hub, say)


def check_filled(recipe: Recipe, say: Say) -> None:
    """Check what needs the sizes, the batch and the steps."""
    model, data = recipe.model, recipe.data
    if model.n_embd and model.n_head:
        _heads(model, model.n_embd, model.n_head, say)
    if model.n_positions and data.row_tokens > model.n_positions:
        cure = ""
        if recipe.filled.get("model.n_positions") != "model.start_from":
            cure = ", or leave model.n_positions out"
        say(
            "data.row_tokens",
            f"is {data.row_tokens}, more than model.n_positions ({model.n_positions}). Make the rows shorter{cure}.",
        )
    if data.batch_tokens and data.batch_tokens % data.row_tokens:
        say(
            "data.batch_tokens",
            f"is {data.batch_tokens}, not a multiple of data.row_tokens ({data.row_tokens}): a step is whole rows. "
            f"Write {_nearest(data.batch_tokens, data.row_tokens)}.",
        )
    if data.batch_tokens:
        check_halvings(recipe.step_rows, recipe.data.row_tokens, say)
    if recipe.train.get("max_steps", 0) > MOST_STEPS:
        say(
            recipe.horizons[0],
            f"comes to {recipe.train['max_steps']:,} steps of {data.batch_tokens:,} tokens; {MOST_STEPS:,} are the "
            "most. Make it smaller.",
        )
    if model.embedding_dtype != "float32":
        _embedding_dtype(model, bool(recipe.train.get("fp16")), say)
    _profile_steps(recipe.monitor.profile_steps, recipe.train.get("max_steps"), say)
    check_warmup(recipe.optimizer, recipe.train, say)


def _heads(model: Model, width: int, heads: int, say: Say) -> None:
    kv_heads = model.n_kv_head
    if width % heads:
        near = _nearest(width, heads)
        say("model.n_embd", f"is {width}, not a multiple of model.n_head ({heads}). Write {near}, or change n_head.")
    elif options_of(model).get("position_embedding") == "rope" and width // heads % 2:
        say("model.n_head", f"gives heads of {width // heads} channels, and rope turns pairs. Make it even.")
    if kv_heads and heads % kv_heads:
        say(
            "model.n_kv_head", f"is {kv_heads} and does not divide model.n_head ({heads}). Write a divisor of {heads}."
        )


def _embedding_dtype(model: Model, fp16: bool, say: Say) -> None:
    """Refuse a model.embedding_dtype that the recipe's model does not support; training/build.py checks a model that
    comes from the Hub."""
    key = "model.embedding_dtype"
    if fp16:
        say(key, f"is {model.embedding_dtype}, and train.fp16 is for GPUs without bfloat16. Keep one of the two.")
    config = model.start_config or options_of(model)
    if model.start_from and model.start_config is None:
        return
    kind = config.get("model_type", model.type)
    if not model.becomes_tandem:
        say(key, f"is for model.type tandem, and this model is a {kind}. Remove it: float32 is used.")
    elif config.get("tie_word_embeddings", kind != "nanochat"):
        cure = "Remove it." if model.start_from else "Remove it, or set model.options.tie_word_embeddings: false."
        say(
            key,
            f"is {model.embedding_dtype}, and the head is tied to the token embedding: it would be rounded too. {cure}",
        )


def check_halvings(rows: StepRows, row_tokens: int, say: Say) -> None:
    """Note smaller first steps of no whole rows, once data.batch_tokens is known."""
    halved = 2**rows.halvings
    if rows.full % halved:
        say(
            "optimizer.schedule.batch_halvings",
            f"is {rows.halvings}, and {rows.full} rows of a step cannot be halved that often. "
            f"Make data.batch_tokens a multiple of {halved * row_tokens}, or halve it less often.",
        )


def check_warmup(optimizer: Optimizer, train: dict[str, Any], say: Say) -> None:
    """Note a warm-up longer than the run, once its steps are known: a horizon in epochs is with the data."""
    steps = train.get("max_steps")
    if not steps:
        return
    name, warmup = warmup_of(optimizer, train, steps)
    if warmup > steps:
        say(
            name,
            f"is {warmup}, longer than the run of {steps} steps: the rate would never reach its peak. Write at most "
            f"{steps}.",
        )


def _profile_steps(steps: list[int] | None, max_steps: int | None, say: Say) -> None:
    key = "monitor.profile_steps"
    if steps is None:
        return
    if len(steps) != 2 or not 0 <= steps[0] <= steps[1]:
        say(key, f"is {steps}; it must be the first and the last step. Write [10, 12].")
    elif max_steps and steps[1] >= max_steps:
        say(
            key,
            f"ends with step {steps[1]}, and the last step of this run is {max_steps - 1}: steps are counted from 0. "
            "Write earlier ones.",
        )


def _nearest(value: int, multiple: int) -> str:
    low = value // multiple * multiple
    return f"{low} or {low + multiple}" if low else str(multiple)


def _horizon(recipe: Recipe, say: Say) -> None:
    named = recipe.horizons
    if len(named) > 1:
        others = ", ".join(f"{name} ({recipe.places.get(name)})" for name in named[1:])
        say(named[0], f"is a second horizon after {others}. Keep exactly one.")
    elif not named and not (recipe.model.depth and recipe.stage == "pretrain"):
        say(
            "train",
            "says nothing on how long to train. Give one of train.max_steps, train.num_train_epochs, run.tokens, "
            "run.tokens_per_param, run.flops.",
        )


def _batch_keys(recipe: Recipe, say: Say) -> None:
    key, batch = "data.batch_tokens", recipe.data.batch_tokens
    accumulation = recipe.train.get("gradient_accumulation_steps")
    if batch is not None and accumulation is not None:
        say(key, "and train.gradient_accumulation_steps are both given, and each follows from the other. Keep one.")
    if accumulation is not None and recipe.is_auto:
        say(
            KEY,
            "is auto, and train.gradient_accumulation_steps is given: the global batch would follow from what fits. "
            "Give data.batch_tokens instead.",
        )
    if batch is None and accumulation is None and recipe.model.depth is None:
        say(key, "is missing: the tokens of one optimizer step. Give it, or train.gradient_accumulation_steps.")


def _sources(data: Data, stage: str, say: Say) -> None:
    if not data.sources:
        say(
            "data.sources",
            "is missing: there is nothing to train on. Give a list such as [{files: texts/*.parquet}].",
        )
    if data.validation == []:
        say("data.validation", "is an empty list: nothing could be scored. Name a source, or leave it out.")
    for key, sources in (("data.sources", data.sources), ("data.validation", data.validation or [])):
        for i, source in enumerate(sources):
            check_source(f"{key}.{i}", source, say)
            if source.columns is None or _columns_mistake(source) is None:
                _kind_of_source(f"{key}.{i}", source, stage, say)
    # Shares of the rows: by weights or by epochs, or equal ones where nothing is given.
    weights = [source.weight for source in data.sources if source.weight is not None]
    counted = [source for source in data.sources if source.epochs is not None]
    if weights and max(weights) > MOST_APART * min(weights):
        say(
            "data.sources",
            f"has weights of which one is more than {MOST_APART:g} times another: of the smaller no row would ever "
            "come. Bring them nearer.",
        )
    if weights and counted and len(weights) + len(counted) < len(data.sources):
        say("data.sources", "mixes weights, epochs and sources with neither. Give every source one of the two.")
    if data.shards_from is not None and not takes_shards(data.shards_from):
        say(
            "data.shards_from", f"is {show(data.shards_from)}; it must be where shards were published: {SHARDS_FORMS}."
        )


def _kind_of_source(key: str, source: Source, stage: str, say: Say) -> None:
    roles, kind = set(source.columns or ()), FORMATS.get(source.format or "")
    if stage == "sft" and (source.text_column or kind == "text" or "text" in roles):
        say(
            key,
            "holds plain text, and SFT trains on conversations. Give messages_column or a chat format, or set "
            "run.stage: pretrain.",
        )
    if stage != "sft" and (source.messages_column or kind == "chat" or roles - {"text"}):
        say(key, "holds conversations, and pretraining reads plain text. Give text_column, or set run.stage: sft.")


def check_source(key: str, source: Source, say: Say) -> None:
    """Note what is wrong with a source in every stage."""
    if source.id is None and not source.files:
        say(key, "names nothing to read. Give id (a data set of the Hub) or files (paths on this machine).")
    if source.weight is not None and source.epochs is not None:
        say(key, "has a weight and epochs. Keep one.")
    if source.passes and key.startswith("data.validation"):
        say(f"{key}.passes", "counts in data.sources; validation is read once. Remove it.")
    if source.id and source.id.startswith("tandem:") and source.id not in BUILT_IN:
        say(f"{key}.id", f"there is no built-in {source.id}. There are {', '.join(BUILT_IN)}.")
    if source.format and ":" not in source.format and source.format not in FORMATS:
        say(f"{key}.format", f"is {source.format!r}. Write {', '.join(FORMATS)}, or module:attr.")
    if source.columns is not None and (mistake := _columns_mistake(source)):
        say(f"{key}.columns", mistake)
    if (source.config or source.revision) and source.id is None:
        say(key, "config and revision belong to a data set of the Hub. Remove them, or give id.")
    files = _listed(source.files)
    for address in filter(is_address, files):
        if not is_supported(address):
            schemes = ", ".join(f"{scheme}://" for scheme in SCHEMES)
            say(
                f"{key}.files",
                f"{address!r} is an address that nothing here reads ({schemes} are). Download it, or give the id of a "
                "data set of the Hub.",
            )
    if source.id is None and source.split != "train" and any(map(has_magic, files)):
        say(
            f"{key}.split",
            f"is {source.split!r}, and files named one by one have no splits. Name their folder, or leave split out.",
        )


def _listed(files: str | list[str] | None) -> list[str]:
    return [files] if isinstance(files, str) else files or []


def _columns_mistake(source: Source) -> str | None:
    """Return why `columns` of a source says none of its three things, or what another key says too; or None."""
    columns = source.columns or {}
    example = "Write columns: {prompt: COLUMN, response: COLUMN}, {messages: COLUMN} or {text: COLUMN}."
    if unknown := [role for role in columns if role not in COLUMN_ROLES]:
        return f"names {', '.join(map(repr, unknown))}, which is none of {', '.join(COLUMN_ROLES)}. {example}"
    # Exactly one of the three says what a row is, and which further columns may be named.
    main = [role for role in ("text", "messages", "prompt") if role in columns]
    allowed = {"text": {"text"}, "messages": {"messages", "system", "tools"}}.get("".join(main), set(columns))
    if len(main) != 1 or ("prompt" in columns) != ("response" in columns) or set(columns) - allowed:
        return f"says {', '.join(columns) or 'nothing'}, from which no document or conversation follows. {example}"
    if others := [key for key in ("text_column", "messages_column", "format") if getattr(source, key)]:
        return f"and {' and '.join(others)} say the same. Keep columns."
    return None


def _optimizer(optimizer: Optimizer, train: dict[str, Any], given: list[str], say: Say) -> None:
    """given: every key that the recipe has, dotted."""
    kind = optimizer.type
    if kind not in OPTIMIZERS and ":" not in kind:
        say("optimizer.type", f"is {kind!r}. Write {', '.join(OPTIMIZERS)}, or module:attr.")
        return
    if kind == "trainer":
        for name in _unused(given):
            say(
                name,
                "is not used by optimizer.type trainer, which takes train.learning_rate and its scheduler. "
                f"Set optimizer.type to {' or '.join(MATRIX_GROUP)}, or remove this.",
            )
        return
    for name in sorted(train):
        if ARGUMENTS[name].trainer_only and train[name] is not None:
            hints = {
                "learning_rate": "optimizer.rate_scale (all groups) or optimizer.groups.<group>.learning_rate",
                "warmup_steps": "optimizer.schedule.warmup_steps",
            }
            hint = hints.get(name, "optimizer.groups and optimizer.schedule")
            say(
                f"train.{name}",
                f"is not used by optimizer.type {kind}. Use {hint}, or set optimizer.type: trainer.",
            )
    if ":" not in kind:  # whose own code reads the groups as it likes
        _groups(optimizer, say)


def _unused(given: list[str]) -> Iterator[str]:
    """Yield the keys of optimizer that the trainer's own optimizer does not use, of nested ones the innermost."""
    used = ("optimizer.type", "optimizer.groups", "optimizer.schedule")  # the sections: emptied by null
    unused = [name for name in given if name.startswith("optimizer.") and name not in used]
    for name in unused:
        if not any(other.startswith(f"{name}.") for other in unused):
            yield name


def _groups(optimizer: Optimizer, say: Say) -> None:
    for group, settings in vars(optimizer.groups).items():
        known = group_settings(optimizer.type, group)
        for name, value in vars(settings).items():
            if value is not None and name not in known:
                say(
                    f"optimizer.groups.{group}.{name}",
                    f"is not a setting of this group under optimizer.type {optimizer.type}; it has "
                    f"{', '.join(sorted(known))}. Remove it.",
                )
        betas = settings.betas
        if betas is not None and (len(betas) != 2 or not all(0 <= beta < 1 for beta in betas)):
            say(
                f"optimizer.groups.{group}.betas",
                f"is {betas}; it must be two numbers from 0 to below 1. Write [0.9, 0.95].",
            )


def _model(model: Model, say: Say) -> None:
    kind = {"modern": "tandem", "modern_bigram": "tandem", "portable": PORTABLE_TYPE}.get(model.preset, model.type)
    if model.type != kind:
        say(
            "model.preset",
            f"{model.preset} is a preset of model.type {kind}, not of {model.type}. Remove one of the two.",
        )
    if model.n_kv_head and model.type == "gpt2":
        say("model.n_kv_head", "gpt2 has no grouped keys and values. Remove it, or use model.type: tandem.")
    # Nothing can be built without these three.
    missing = [f"model.{name}" for name in ("n_layer", "n_embd", "n_head") if getattr(model, name) is None]
    if missing and model.depth is None and not model.start_from:
        say("model", f"{' and '.join(missing)} missing. Give them, or model.depth, which sets all.")
    if model.type != "tandem":
        return
    pattern = model.options.get("window_pattern")
    if pattern is not None and (not pattern or set(pattern) - set("SL")):
        say(
            "model.options.window_pattern",
            f"is {pattern!r}; it must be letters S (sliding) and L (full), as SSSL.",
        )
    for name, value in model.options.items():
        if name.endswith("_pdrop") and not 0 <= value < 1:
            say(f"model.options.{name}", f"is {value}; it is the share that is dropped: at least 0 and below 1.")
    window = model.options.get("sliding_window")
    if window is not None and window < 1:
        say("model.options.sliding_window", f"is {window}; a token sees itself at least. Write 1 or more.")


def _adapter(recipe: Recipe, say: Say) -> None:
    model = recipe.model
    if model.start_from is None:
        say("model.adapter", "trains few weights around a model's own, and model.start_from names no model. Give it.")
    if recipe.optimizer.type == "muon_adamw":
        say(
            "optimizer.type",
            "is muon_adamw, which is for whole matrices, and an adapter trains two factors of each. Write trainer or "
            "adamw.",
        )
    if model.embedding_dtype != "float32":
        say("model.embedding_dtype", "is for embeddings that are trained, and model.adapter leaves them. Remove it.")
    if recipe.train.get("fp8"):
        say("train.fp8", "converts matrices that are trained, and model.adapter leaves them as they are. Remove it.")


def _train(train: dict[str, Any], say: Say) -> None:
    for name, value in train.items():
        argument = ARGUMENTS[name]
        if argument.only and value != argument.default:
            why = f"is {show(value)} and must stay {show(argument.default)}: {argument.only}. Remove it."
            say(f"train.{name}", why)
    if train.get("bf16") is True and train.get("fp16"):
        say("train.fp16", "and train.bf16 are both given. Keep one of the two.")
    if train.get("fp8") and (train.get("fp16") or not train.get("bf16")):
        say("train.fp8", "needs bf16 for all but the blocks. Write bf16: true, without fp16.")
    for name in ("torch_compile_mode", "torch_compile_backend"):
        if train.get(name) is not None and not train.get("torch_compile"):
            say(
                f"train.{name}",
                "is given and train.torch_compile is not: transformers would compile all the same, and the plan be "
                "wrong. Write torch_compile: true, or remove this.",
            )
    backend = train.get("torch_compile_backend")
    if train.get("torch_compile_mode") is not None and backend not in (None, "inductor"):
        say(
            "train.torch_compile_mode",
            f"is of the backend inductor, and train.torch_compile_backend is {backend}. Remove one of the two.",
        )
    new, old = "activation_checkpointing", "gradient_checkpointing"
    if train.get(new) is not None and train.get(old) is not None:
        say(f"train.{old}", f"is the older name of train.{new}, and both are given. Keep {new}.")


def _addresses(recipe: Recipe, say: Say) -> None:
    """Note addresses where a folder of that name would be made here."""
    paths = {
        "run.directory": recipe.run.directory,
        "data.cache_dir": recipe.data.cache_dir,
        "tokenizer.path": recipe.tokenizer.path,
        "model.start_from": recipe.model.start_from,
    }
    for key, path in paths.items():
        if path and is_address(path):
            say(
                key,
                f"is {show(path)}, an address, and only files of a source may lie in a store. Write a path on this "
                "machine.",
            )


def _run(run: Run, say: Say) -> None:
    if run.name is not None and run.fork_from is not None and run.fork_from.partition("@")[0] == run.name:
        say("run.fork_from", f"names {run.name}, which is this run. Give it another run.name.")
    if run.hardware is not None:
        try:
            from pipeline.hardware.accelerators import parse_hardware

            parse_hardware(run.hardware)
        except ValueError as error:
            say("run.hardware", str(error))


def _hub(hub: Hub, say: Say) -> None:
    branch = (hub.revision or "main").replace("{run}", "run")
    if not BRANCH.fullmatch(branch) or ".." in branch or branch.endswith(("/", ".", ".lock")):
        say(
            "hub.revision",
            f'is {hub.revision!r}, which cannot name a branch. Write letters, digits and ._-/, and "{{run}}" for the '
            "run's name.",
        )
