"""What a model of somebody else brings with it: weight files, generation settings, parts for pictures and sound, a head of its own."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)
from transformers.utils import cached_file

# How pictures and sound become numbers: the model's folder is not whole without them.
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


class ModelOptionsError(ValueError):
    """The model that was asked for cannot be built, for the reason in the message."""


def weight_files(index: Path) -> list[Path]:
    """Return the files that an index of weights names. Raises ModelOptionsError for one outside the index's folder."""
    names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    for name in names:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ModelOptionsError(
                f"{index}: names {name}, a file outside its folder, so nothing is opened. Take the model from its source again."
            )
    return [index.parent / name for name in names]


def files_beside(path: str, names: tuple[str, ...], revision: str | None) -> dict[str, bytes]:
    """Return the content of those files that a folder or a repository of the Hub has."""
    found = {}
    for name in names:
        file = cached_file(
            path,
            name,
            revision=revision,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if file is not None:
            found[name] = Path(file).read_bytes()
    return found


def repaired_generation_config(given: dict[str, Any]) -> tuple[GenerationConfig, dict[str, Any]]:
    """Return the settings as transformers saves them, and those left out: `generate` ignores them, or refuses them.

    transformers reads a temperature without do_sample, decodes greedily, and refuses to save it: greedy it stays.
    """
    kept = {name: value for name, value in given.items() if value is not None}
    while True:
        try:
            config = GenerationConfig(**kept)
            config.validate(strict=True)
            break
        except Exception as error:  # the file is somebody else's, and may hold anything
            # All settings that have no effect are in a list; another problem names its setting first.
            names = re.findall(r"^- `(\w+)`", str(error), re.MULTILINE) or re.findall(r"`(\w+)`", str(error))[:1]
            left = {name: value for name, value in kept.items() if name not in names}
            if len(left) == len(kept):
                left = {name: kept[name] for name in TOKEN_IDS if isinstance(kept.get(name), int | list)}
            if len(left) == len(kept):
                raise
            kept = left
    return config, {name: value for name, value in given.items() if value is not None and name not in kept}


def generation_config_of(path: str, revision: str | None) -> tuple[GenerationConfig | None, dict[str, Any]]:
    """Return generation_config.json as `repaired_generation_config` does; None where there is none that can be read."""
    for content in files_beside(path, ("generation_config.json",), revision).values():
        try:
            given = json.loads(content)
        except ValueError:
            break
        if isinstance(given, dict):
            return repaired_generation_config(given)
    return None, {}


def foreign_kernels(config: PreTrainedConfig) -> list[str]:
    """Return the implementations of attention and experts that config.json asks for and torch does not have: code from the Hub."""
    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    wanted = [getattr(part, f"_{kind}_implementation", None) for part in parts for kind in ("attn", "experts")]
    return sorted({str(name) for name in wanted if name is not None and (not isinstance(name, str) or "/" in name)})


def whole_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class with all parts of a model that also reads pictures or sound; None for a model of text.

    AutoModelForCausalLM gives the text part of some, and knows nothing of others.
    """
    if config.get_text_config() is config or (config.architectures or [""])[0].endswith("ForCausalLM"):
        return None
    for mapping in (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING):
        if type(config) in mapping:
            return mapping[type(config)]
    return None


def freeze_other_parts(model: PreTrainedModel) -> dict[str, int]:
    """Keep what does not read text from being trained; return how many parameters each such part has, by its name."""
    text = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    trained = {id(parameter) for module in text if module is not None for parameter in module.parameters()}
    frozen: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        if id(parameter) not in trained:
            parameter.requires_grad_(False)
            frozen[name.removeprefix("model.").split(".")[0]] += parameter.numel()
    return dict(frozen)


def has_own_head(model: PreTrainedModel) -> bool:
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and head.weight is not table.weight


def keep_own_head(model: PreTrainedModel) -> bool:
    """Have the config say that the head is not the embedding where the file holds another one; return whether it said otherwise.

    transformers loads such a head, and replaces it by the embedding when it ties again: after new tokens, or in a copy.
    """
    configs = [c for c in (model.config, model.config.get_text_config()) if getattr(c, "tie_word_embeddings", False)]
    if not configs or not has_own_head(model):
        return False
    for config in configs:
        config.tie_word_embeddings = False
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)
    return True
