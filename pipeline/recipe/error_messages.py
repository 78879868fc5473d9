"""Messages for mistakes in a recipe: the key that was meant, and the type that a key has.

A recipe without mistakes needs none of it: the reader imports a message where it finds one.
"""

import difflib
import math
from dataclasses import is_dataclass
from typing import Any, Literal, get_args, get_origin

from pipeline.recipe.keys import all_keys, key_at
from pipeline.recipe.located_yaml import FLOAT, INSTEAD, SECRET_NAME, Item, show
from pipeline.recipe.schema import ARGUMENTS, REFUSED_OPTIMIZERS, SECTIONS, alternatives, keys_of
from pipeline.recipe.sizes import NOT_OPTIONS, TANDEM_OPTIONS

# Names that recipes elsewhere use, and what they are here: the new key, or a sentence.
RENAMED = {
    "warmup_ratio": (
        "train.warmup_steps (below 1 it is a share of the run) with optimizer.type trainer, else "
        "optimizer.schedule.warmup_steps"
    ),
    "evaluation_strategy": "train.eval_strategy",
    "no_cuda": "train.use_cpu",
    "torchdynamo": "train.torch_compile_backend",
    "group_by_length": "-rows all have data.row_tokens positions; remove it",
    "overwrite_output_dir": "-a run is continued, or refused when it is another one (run.resume); remove it",
    "logging_dir": "-TensorBoard's files lie in the run directory; remove it",
    "save_safetensors": "-weights are always safetensors; remove it",
    "torch_dtype": (
        "-weights train in float32 under train.bf16 or train.fp16; hub.dtype sets the finished model's type"
    ),
    "dtype": "-weights train in float32 under train.bf16 or train.fp16; hub.dtype sets the finished model's type",
    "half_precision_backend": "train.bf16 or train.fp16",
    "fp16_backend": "train.fp16",
    "fp16_opt_level": "train.fp16",
    "per_gpu_eval_batch_size": "train.per_device_eval_batch_size",
    "eval_batch_size": "train.per_device_eval_batch_size",
    "include_tokens_per_second": "-perf/tok_per_s is always logged; remove it",
    "include_inputs_for_metrics": "-evaluation keeps sums only; remove it",
    "push_to_hub_model_id": "hub.id",
    "push_to_hub_organization": "hub.id",
    "use_mps_device": "-Apple's GPU is found by itself; remove it",
    "use_ipex": "train.bf16",
    "jit_mode_eval": "train.torch_compile",
    "past_index": "-no model here needs it; remove it",
    "mp_parameters": "-remove it",
    "ray_scope": "-remove it",
    "dispatch_batches": "train.accelerator_config",
    "split_batches": "train.accelerator_config",
    "adafactor": "train.optim: adafactor",
    "tpu_num_cores": "-the launcher says this; remove it",
    "dataset_name": "data.sources (id)",
    "dataset_text_field": "text_column, in the entry of data.sources",
    "batch_size": (
        "data.batch_tokens (tokens of an optimizer step) or train.per_device_train_batch_size (rows of a micro-batch)"
    ),
    "total_batch_size": "data.batch_tokens",
    "num_iterations": "train.max_steps",
    "target_flops": "run.flops",
    "target_param_data_ratio": "run.tokens_per_param",
    "lr": "train.learning_rate with optimizer.type trainer, else optimizer.groups.<group>.learning_rate",
    "epochs": "train.num_train_epochs",
    "grad_clip": "train.max_grad_norm",
    "betas": "optimizer.groups.<group>.betas",
    "model_name_or_path": "model.start_from",
    "tokenizer_name_or_path": "tokenizer.path",
    "tokenizer_name": "tokenizer.path",
    "chat_template_path": "tokenizer.chat_template",
    "packing_strategy": "data.packing",
    "wandb_project": "monitor.project",
    **dict.fromkeys(("dataset", "datasets", "dataset_mixture"), "data.sources"),
    **dict.fromkeys(
        ("block_size", "seq_len", "sequence_len", "max_seq_len", "max_seq_length", "max_length"), "data.row_tokens"
    ),
    **dict.fromkeys(
        ("device_batch_size", "micro_batch_size", "per_gpu_train_batch_size"), "train.per_device_train_batch_size"
    ),
}


# Values that are refused with a reason, by their key: why, and what to write instead.
REFUSED_VALUES = {
    "train.optim": REFUSED_OPTIMIZERS,
    "hub.strategy": dict.fromkeys(
        ("every_save", "all_checkpoints"),
        ("this version publishes no revision of every checkpoint", "checkpoint (the newest one), or end"),
    ),
}


def unknown_key(path: str) -> str:
    """Return the sentence about a key that is not in the schema. path: dotted, as written."""
    section, _, name = path.rpartition(".")
    if SECRET_NAME.search(name):
        return f"a recipe holds no secrets. {INSTEAD}"
    if section == "train" and name in ARGUMENTS:
        return why_not_accepted(name)
    if section == "model.options" and name in NOT_OPTIONS:
        return f"is no option. It is set by {NOT_OPTIONS[name]}. Set it there."
    places = all_keys()
    elsewhere = [p for p in places.get(name, []) if p != path]
    if name in SECTIONS and section:
        return f"no key of {section}; {name} is a section. Begin its line at the left margin."
    if name in RENAMED:
        text = RENAMED[name]
        if text.startswith("-"):
            return f"is not a key here: {text[1:]}."
        return f"is not a key here. Use {text}."
    if elsewhere:
        return f"unknown key here; it belongs to another section. Write it as {' or '.join(elsewhere[:3])}."
    if name in ARGUMENTS and section != "train":
        return f"unknown key here, and train.{name} is not accepted: {why_not_accepted(name)}"
    names = siblings(section)
    if near := difflib.get_close_matches(name, names, n=1, cutoff=0.6):
        meant = f"{section}.{near[0]}".removeprefix(".")
        return f"unknown key. Did you mean {meant}?"
    if near := difflib.get_close_matches(name, list(places), n=1, cutoff=0.8):
        return f"unknown key. Did you mean {' or '.join(places[near[0]][:3])}?"
    listed = ", ".join(names[:40])
    if len(names) > 40:
        listed += ", ..."
    return f"unknown key. {section or 'A recipe'} has: {listed}."


def siblings(section: str) -> list[str]:
    """Return the keys that section has."""
    if section == "model.options":
        return list(TANDEM_OPTIONS)
    if section == "train":
        return [name for name, argument in ARGUMENTS.items() if argument.accepted]
    if not section:
        return [*SECTIONS, "extends"]
    if section.startswith("train."):
        return list(ARGUMENTS[section.removeprefix("train.")].keys or ())
    kinds = (option for option in alternatives(key_at(section)[0]) if is_dataclass(option))
    return [f.name for kind in kinds for f, _ in keys_of(kind)]  # type: ignore[arg-type]


def why_not_accepted(name: str) -> str:
    """Return why a field of TrainingArguments is not accepted under train."""
    argument = ARGUMENTS[name]
    if argument.kind == "managed":
        return f"is set by {argument.text}. Set it there."
    return f"is refused: {argument.text}. Remove it."


WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
# Bounds by pydantic's errors, and by the names of the schema.
OUT_OF_BOUNDS = {"greater_than_equal", "greater_than", "less_than_equal", "less_than"}
BOUND_WORDS = {"minimum": "at least", "above": "greater than", "maximum": "at most", "below": "below"}


def wrong_value(path: str, item: Item, errors: set[str]) -> str:
    """Return the sentence about a value that pydantic refuses. errors: by its types of errors."""
    annotation, limits = key_at(path)
    if "extra_forbidden" in errors:
        return unknown_key(path)
    if path in SECTIONS or any(map(is_dataclass, alternatives(annotation))):
        return f"holds {describe(item)}; it must be keys with values. Write them below it, indented."
    if errors & OUT_OF_BOUNDS:
        bounds = []
        for name, words in BOUND_WORDS.items():
            limit = limits.get(name)
            if isinstance(limit, float):
                limit = f"{limit:g}"
            if limit is not None:
                bounds.append(f"{words} {limit}")
        return f"is {show(item.value)}; it must be {' and '.join(bounds)}."
    if "string_pattern_mismatch" in errors:
        return f"is {show(item.value)}; it must be {limits['form'][0]}."
    if isinstance(item.value, str) and (refused := REFUSED_VALUES.get(path, {}).get(item.value)):
        why, instead = refused
        return f"{item.value} is refused: {why}. Write {instead}."
    return wrong_type(annotation, item)


def wrong_type(annotation: Any, item: Item) -> str:
    """Return the sentence about a value that its key cannot hold."""
    if item.value is None:
        return f"is null; it must be {expected(annotation)}. Leave the key out for its default."
    return f"is {describe(item)}; it must be {expected(annotation)}.{advice(alternatives(annotation), item)}"


def expected(annotation: Any) -> str:
    """Return the annotation in words: `a whole number or null`."""
    words = []
    for option in alternatives(annotation):
        if get_origin(option) is Literal:
            words.append(" | ".join(map(str, get_args(option))))
        elif get_origin(option) is list and is_dataclass(get_args(option)[0]):
            words.append("a list")
        elif get_origin(option) is list:
            words.append(f"a list of {expected(get_args(option)[0])}")
        elif option is dict or get_origin(option) is dict:
            words.append("keys with values")
        else:
            words.append(WORDS.get(option, getattr(option, "__name__", str(option))))
    return " or ".join(words)


def describe(item: Item) -> str:
    """Return the value in words."""
    value = item.value
    if isinstance(value, dict):
        return "keys with values"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, str):
        return f"the text {show(value)}"
    return show(value)


def advice(options: tuple[Any, ...], item: Item) -> str:
    """Return what to do about a value of the wrong type."""
    value = item.value
    choices = [str(v) for o in options if get_origin(o) is Literal for v in get_args(o)]
    if isinstance(value, str) and choices and (near := difflib.get_close_matches(value, choices, n=1)):
        return f" Did you mean {near[0]}?"
    if isinstance(value, str) and bool in options:
        return " Write true or false without quotes."
    if isinstance(value, str) and (int in options or float in options):
        return " Write the number without quotes." if FLOAT.fullmatch(value) else " Write a number."
    if isinstance(value, float) and int in options:
        return f" Write {round(value)}." if math.isfinite(value) else " Write a whole number."
    if str in options and not isinstance(value, (dict, list)):
        return " Put it in quotes."
    if any(get_origin(o) is list for o in options):
        return " Write it as a list: [{key: value}]." if isinstance(value, dict) else " Write it as a list: [a, b]."
    return " Change it."
