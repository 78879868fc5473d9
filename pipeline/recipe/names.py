"""What to say about a key that does not exist: the right section, the new name, the nearest name."""

import difflib
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_type_hints

from pipeline.recipe.fates import FATES
from pipeline.recipe.presets import TANDEM_OPTIONS
from pipeline.recipe.problems import SECRET_NAME, lookalike
from pipeline.recipe.schema import SECTIONS, Recipe

# Names that recipes elsewhere use, and what they are here: the new key, or a sentence.
RENAMED = {
    "warmup_ratio": "train.warmup_steps (below 1 it is a share of the run) with optimizer.type trainer, else optimizer.schedule.warmup_steps",
    "evaluation_strategy": "train.eval_strategy",
    "no_cuda": "train.use_cpu",
    "torchdynamo": "train.torch_compile_backend",
    "group_by_length": "-rows all have data.row_tokens positions; remove it",
    "overwrite_output_dir": "-a run is continued, or refused when it is another one (run.resume); remove it",
    "logging_dir": "-TensorBoard's files lie in the run directory; remove it",
    "save_safetensors": "-weights are always safetensors; remove it",
    "torch_dtype": "-weights train in float32 under train.bf16 or train.fp16; hub.dtype sets the finished model's type",
    "dtype": "-weights train in float32 under train.bf16 or train.fp16; hub.dtype sets the finished model's type",
    "half_precision_backend": "train.bf16 or train.fp16",
    "fp16_backend": "train.fp16",
    "fp16_opt_level": "train.fp16",
    "per_gpu_train_batch_size": "train.per_device_train_batch_size",
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
    "dataset": "data.sources",
    "datasets": "data.sources",
    "dataset_mixture": "data.sources",
    "dataset_text_field": "data.sources.0.text_column",
    "block_size": "data.row_tokens",
    "seq_len": "data.row_tokens",
    "sequence_len": "data.row_tokens",
    "max_seq_len": "data.row_tokens",
    "max_seq_length": "data.row_tokens",
    "max_length": "data.row_tokens",
    "batch_size": "data.batch_tokens (tokens of an optimizer step) or train.per_device_train_batch_size (rows of a micro-batch)",
    "total_batch_size": "data.batch_tokens",
    "device_batch_size": "train.per_device_train_batch_size",
    "micro_batch_size": "train.per_device_train_batch_size",
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
}


@cache
def all_keys() -> dict[str, list[str]]:
    """Every key by its last word, as dotted paths; `data.sources.<n>.` stands as `data.sources.0.`."""
    found: dict[str, list[str]] = {}

    def walk(cls: Any, prefix: str) -> None:
        hints = get_type_hints(cls)
        for f in fields(cls):
            if f.metadata.get("internal"):
                continue
            found.setdefault(f.name, []).append(prefix + f.name)
            inner = [a for a in (hints[f.name], *get_args(hints[f.name])) if is_dataclass(a)]
            nested = [b for a in get_args(hints[f.name]) for b in get_args(a) if is_dataclass(b)]
            if inner:
                walk(inner[0], f"{prefix}{f.name}." if hints[f.name] is inner[0] else f"{prefix}{f.name}.0.")
            elif nested and f.name == "sources":
                walk(nested[0], f"{prefix}{f.name}.0.")

    walk(Recipe, "")
    for name, fate in FATES.items():
        if fate.accepted:
            found.setdefault(name, []).append(f"train.{name}")
    return found


def unknown_key(path: str) -> str:
    """The sentence about a key that is not in the schema. path: dotted, as written."""
    section, _, name = path.rpartition(".")
    if SECRET_NAME.search(name):
        return "a secret never stands in a recipe. Remove it, and set HF_TOKEN or run `hf auth login`; WANDB_API_KEY for W&B."
    places = all_keys()
    elsewhere = [p for p in places.get(name, []) if p != path]
    if name in SECTIONS and section:
        return f"no key of {section}; {name} is a section of its own. Begin its line at the left margin."
    if name in RENAMED:
        text = RENAMED[name]
        return f"is not a key here: {text[1:]}." if text.startswith("-") else f"is not a key here. Use {text}."
    if elsewhere:
        return f"unknown key here; it belongs to another section. Write it as {' or '.join(elsewhere[:3])}."
    if name in FATES and section != "train":
        return f"unknown key here, and train.{name} is not accepted: {fate_sentence(name)}"
    strange = lookalike(name)
    if near := difflib.get_close_matches(name, siblings(section), n=1, cutoff=0.6):
        return f"unknown key. {strange}Did you mean {f'{section}.' if section else ''}{near[0]}?"
    if near := difflib.get_close_matches(name, list(places), n=1, cutoff=0.8):
        return f"unknown key. {strange}Did you mean {' or '.join(places[near[0]][:3])}?"
    names = siblings(section)
    return f"unknown key. {strange}{section or 'A recipe'} has: {', '.join(names[:40])}{', ...' if len(names) > 40 else ''}."


def siblings(section: str) -> list[str]:
    """The keys that section has."""
    if section == "model.options":
        return list(TANDEM_OPTIONS)
    if section == "train":
        return [name for name, fate in FATES.items() if fate.accepted]
    if not section:
        return [*SECTIONS, "extends"]
    generic = ".".join("0" if part.isdecimal() else part for part in section.split(".")).replace(
        "data.validation", "data.sources"
    )
    paths = (p for group in all_keys().values() for p in group)
    return [p[len(generic) + 1 :] for p in paths if p.startswith(generic + ".") and "." not in p[len(generic) + 1 :]]


def fate_sentence(name: str) -> str:
    """Why a field of TrainingArguments is not accepted under train."""
    fate = FATES[name]
    if fate.fate == "ours":
        return f"is set by {fate.text}. Set it there."
    return f"is refused: {fate.text}. Remove it."
