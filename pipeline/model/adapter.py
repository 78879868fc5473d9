"""Adapters of PEFT around a model's layers: new ones, their files, and the way back into whole weights.

The layers are replaced in place, so that the model keeps its class; `model.peft` is PEFT's view of it. An adapter's
folder is as PEFT writes it, adapter_config.json and adapter_model.safetensors: it names its base, and holds none of it.
"""

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.utils import cached_file

from .errors import ModelOptionsError

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Fields of PEFT's LoraConfig that are read from a file: what changes the numbers of an adapter.
FIELDS = (
    "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "fan_in_fan_out", "use_dora", "use_rslora",
    "modules_to_save", "trainable_token_indices", "ensure_weight_tying", "rank_pattern", "alpha_pattern",
    "layers_to_transform", "layers_pattern",
)  # fmt: skip
# Others that may be given: they say nothing of the numbers once it is trained.
WITHOUT_EFFECT = (
    "auto_mapping", "base_model_name_or_path", "inference_mode", "init_lora_weights", "megatron_core", "peft_type",
    "peft_version", "revision", "task_type", "loftq_config", "eva_config", "corda_config", "qalora_group_size",
    "runtime_config",
)  # fmt: skip


def is_adapted(model: Any) -> bool:
    """Return whether the model has adapters around its layers."""
    return hasattr(model, "peft")


def add_adapter(
    model: PreTrainedModel,
    settings: Mapping[str, Any],
    *,
    base: str,
    revision: str | None,
    new_ids: Sequence[int],
    seed: int,
) -> None:
    """Put new adapters around the model's layers; they alone are trained from then on.

    settings: of PEFT's LoraConfig. base, revision: the folder or Hub id of the weights, from which whoever loads the
    adapter takes them. new_ids: rows of embedding and head that the base was not trained for, which are trained too.
    Raises ModelOptionsError for what PEFT refuses, or would merge or load as another model.
    """
    # 1. What is trained whole, and single rows of the embedding and the head. PEFT lets a tied head follow.
    tables = _tables(model)
    tied = model.config.get_text_config().tie_word_embeddings
    whole = list(settings["modules_to_save"])
    paths = [path for path, _ in model.named_modules()]
    if unknown := [name for name in whole if not any(_matches(path, name) for path in paths)]:
        raise ModelOptionsError(f"modules_to_save: the model has no module {', '.join(unknown)}.")
    whole_tables = [table for table in tables if any(_matches(table, name) for name in whole)]
    in_rows = [table for table in tables if table not in whole_tables]
    if tied:
        in_rows = [] if whole_tables else tables[:1]
    rows = {table: list(new_ids) for table in in_rows if new_ids}
    given = dict(settings, modules_to_save=whole or None, trainable_token_indices=rows or None)
    given["ensure_weight_tying"] = bool(tied and whole_tables)

    # 2. The adapters. Their first values are a function of the seed, whatever was drawn before.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = _wrap(model, given)
    config.base_model_name_or_path, config.revision = base, revision
    adapted = [table for table in tables if hasattr(model.get_submodule(table), "lora_A")]
    if getattr(model, "own_head", False) and (rows or whole_tables or adapted):
        raise ModelOptionsError(
            "type: the base's config says that its head is its embedding, and its file holds another one, so PEFT "
            "would load another model. Save the base again with tie_word_embeddings: false."
        )
    if tied and adapted:
        raise ModelOptionsError(
            f"target: takes in {' and '.join(adapted)}, the embedding and the head in one, which PEFT would merge to "
            "another model. Leave it out, as all-linear does, or write modules_to_save."
        )


def _tables(model: PreTrainedModel) -> list[str]:
    """Return the paths of the embedding and of the head, where there is one."""
    found = [model.get_input_embeddings(), model.get_output_embeddings()]
    paths = {id(module): path for path, module in model.named_modules()}
    return [paths[id(module)] for module in found if module is not None]


def _matches(path: str, name: str) -> bool:
    return path == name or path.endswith(f".{name}")


def _wrap(model: PreTrainedModel, settings: Mapping[str, Any]) -> Any:
    """Put adapters around the layers; return PEFT's config of them."""
    import peft

    config = peft.LoraConfig(**settings, task_type="CAUSAL_LM")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Conv1D, which it then treats rightly; of no name of the base
            wrapped = peft.get_peft_model(model, config)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ModelOptionsError(f"target: PEFT cannot adapt this model ({' '.join(str(error).split())}).") from error
    vars(model)["peft"] = wrapped  # not as a module of the model: it holds the model
    return config


def adapter_weights(model: Any) -> dict[str, torch.Tensor]:
    """Return what is trained by PEFT's names in its file, not copied."""
    import peft

    weights = peft.get_peft_model_state_dict(model.peft, save_embedding_layers=False)
    return {name: tensor.detach().contiguous() for name, tensor in weights.items()}


def write_adapter_config(model: Any, folder: Path) -> None:
    """Write adapter_config.json, and the generation config, into the folder."""
    given = model.peft.peft_config["default"].to_dict()
    for name, value in given.items():
        if isinstance(value, set):  # else every process would write it in another order
            given[name] = sorted(value)
    text = json.dumps({**given, "inference_mode": True}, indent=2, sort_keys=True)
    (folder / ADAPTER_CONFIG).write_text(text + "\n")
    model.generation_config.save_pretrained(folder)


def save_adapter(model: Any, folder: Path, *, dtype: torch.dtype | None = None) -> None:
    """Write the adapter alone, as PEFT's save_pretrained does."""
    folder.mkdir(parents=True, exist_ok=True)
    write_adapter_config(model, folder)
    weights = {}
    for name, tensor in adapter_weights(model).items():
        weights[name] = tensor.to(dtype or tensor.dtype, copy=True)  # of tied ones each: safetensors shares nothing
    save_file(weights, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})


def load_adapter_weights(model: Any, weights: Mapping[str, torch.Tensor], where: str) -> None:
    """Copy the weights of an adapter's file into the same adapters, bit for bit in their dtype. Raises ValueError
    where they are those of others. where: begins the message."""
    import peft

    own = adapter_weights(model)
    wrong = [f"{name} is missing" for name in own if name not in weights]
    wrong += [f"{name} is left over" for name in weights if name not in own]
    for name, value in own.items():
        if name in weights and weights[name].shape != value.shape:
            wrong.append(f"{name} is {tuple(weights[name].shape)}, not {tuple(value.shape)}")
    if wrong:
        raise ValueError(f"{where}: these are not this adapter's weights: {'; '.join(wrong[:5])}.")
    peft.set_peft_model_state_dict(model.peft, dict(weights))


def read_adapter_config(path: str, revision: str | None) -> dict[str, Any]:
    """Return adapter_config.json of a folder or a repository of the Hub. Raises ModelOptionsError for one that has
    what is not read here."""
    given = json.loads(_file(path, ADAPTER_CONFIG, revision).read_bytes())
    if given.get("peft_type") != "LORA":
        raise ModelOptionsError(f"{path}: is an adapter of type {given.get('peft_type')}; LORA alone is read here.")
    odd = [name for name, value in given.items() if value and name not in (*FIELDS, *WITHOUT_EFFECT)]
    odd = [name for name in odd if (name, given[name]) != ("bias", "none")]
    if odd or not isinstance(given.get("base_model_name_or_path"), str):
        raise ModelOptionsError(
            f"{path}: its adapter_config.json has {', '.join(odd) or 'no base'}, which is not read here. Load it with "
            "PEFT, merge it, and take the merged model."
        )
    return given


def _file(path: str, name: str, revision: str | None) -> Path:
    return Path(str(cached_file(path, name, revision=revision)))


def load_adapter(model: PreTrainedModel, path: str, given: Mapping[str, Any], *, revision: str | None) -> None:
    """Put the trained adapters of a folder or a repository around the layers of their base, which is loaded. given:
    its adapter_config.json."""
    weights = load_file(_file(path, ADAPTER_WEIGHTS, revision))
    # Ids that the base lacks are in the adapter: as trained rows, or as a table that is saved whole.
    rows = [max(ids) + 1 for ids in (given.get("trainable_token_indices") or {}).values()]
    rows += [len(weights[name]) for name in weights if name.endswith(f"{_tables(model)[0]}.weight")]
    embedding: Any = model.get_input_embeddings()
    if rows and max(rows) > len(embedding.weight):
        model.resize_token_embeddings(max(rows), mean_resizing=False)
    with torch.random.fork_rng(devices=[]):
        config = _wrap(model, {name: given[name] for name in FIELDS if given.get(name) is not None})
    config.base_model_name_or_path, config.revision = given["base_model_name_or_path"], given.get("revision")
    load_adapter_weights(model, weights, path)


def merge_adapter(model: Any) -> PreTrainedModel:
    """Return the model with the adapters added to its weights, a model as any other."""
    merged = model.peft.merge_and_unload(safe_merge=True)
    del merged.peft
    return merged
