"""Models from folders or the Hub, as they are: generation settings, parts for pictures and sound, a head of their
own."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    NanoChatForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)
from transformers.utils import cached_file

from .build import use_chunked_loss
from .errors import ModelOptionsError
from .modeling_tandem import TandemForCausalLM
from .native import tandem_config, to_native_name
from .saved import from_pretrained, has_own_head, weight_files

# How pictures and sound become numbers: the model's folder is not whole without them.
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


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
    """Return the settings as transformers saves them, and those left out: of a file that it would refuse to save only
    the token ids stay.

    transformers reads a temperature without do_sample, decodes greedily, and refuses to save it: greedy it stays.
    """
    settings = {name: value for name, value in given.items() if value is not None}
    try:
        config = GenerationConfig(**settings)
        config.validate(strict=True)
    except Exception:  # the file is somebody else's, and may hold anything
        ids = {}
        for name in TOKEN_IDS:
            value = settings.get(name)
            if isinstance(value, int | list) and value != -1:  # -1: an unset pad_token_id of old
                ids[name] = settings.pop(name)
        return GenerationConfig(**ids), settings
    return config, {}


def generation_config_of(path: str, revision: str | None) -> tuple[GenerationConfig | None, dict[str, Any]]:
    """Return generation_config.json as `repaired_generation_config` does; None where there is none that can be
    read."""
    for content in files_beside(path, ("generation_config.json",), revision).values():
        try:
            given = json.loads(content)
        except ValueError:
            break
        if isinstance(given, dict):
            return repaired_generation_config(given)
    return None, {}


def whole_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class with all parts of a model that also reads pictures or sound; None for a model of text.

    AutoModelForCausalLM gives the text part of some, and knows nothing of others.
    """
    if config.get_text_config() is config or (config.architectures or [""])[0].endswith("ForCausalLM"):
        return None
    for mapping in (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING):
        if type(config) in mapping:
            found: Any = mapping[type(config)]
            return found
    return None


def freeze_other_parts(model: PreTrainedModel) -> dict[str, int]:
    """Keep what does not read text from being trained; return how many parameters each such part has, by its name."""
    text = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    trained: set[int] = set()
    for module in text:
        if module is not None:
            trained.update(map(id, module.parameters()))
    frozen: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        if id(parameter) not in trained:
            parameter.requires_grad_(False)
            frozen[name.removeprefix("model.").split(".")[0]] += parameter.numel()
    return dict(frozen)


def keep_own_head(model: PreTrainedModel) -> bool:
    """Have the config say that the head is not the embedding where the file holds another one; return whether it said
    otherwise.

    transformers loads such a head, and replaces it by the embedding when it ties again: after new tokens, or in a
    copy.
    """
    configs = [c for c in (model.config, model.config.get_text_config()) if getattr(c, "tie_word_embeddings", False)]
    if not configs or not has_own_head(model):
        return False
    for config in configs:
        config.tie_word_embeddings = False
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)
    return True


def load_model(
    path,
    *,
    dtype: torch.dtype = torch.float32,
    revision: str | None = None,
    attn_implementation=None,
    trust_remote_code: bool = False,
    text_type: str | None = None,
    native: bool = False,
):
    """The causal LM in a folder or on the Hub, on the CPU in `dtype`. trust_remote_code: whether the model's own code
    files are run. text_type: the model_type of the text part of a model with other parts, where it is to be loaded
    alone. native: take transformers' own class, whose names an adapter's file has.

    Else transformers' gpt2 and nanochat are loaded as Tandem, which computes the same (the loss in chunks, one graph).
    `notes` of the model are lines on differences from its files: settings left out, parts that are not
    trained. Raises OSError when nothing is there, ModelOptionsError when the weights do not fit the config.
    """
    path = str(path)
    for index in Path(path).glob("*.index.json"):
        weight_files(index)
    # Never left open: transformers would ask on the terminal then.
    config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    notes = []
    generation, dropped = generation_config_of(path, revision)
    given = {"revision": revision, "dtype": dtype, "generation_config": generation}
    # Always given: else the values of config.json count.
    kernels = {"attn_implementation": attn_implementation, "experts_implementation": None}
    # 1. The class: all parts of a model that also reads pictures, or the text alone; ours where it computes the same.
    whole = whole_class(config)
    if config.get_text_config().model_type == text_type:
        whole = None
    model: Any
    own_head = False
    if not native and config.model_type == "gpt2" and (ours := tandem_config(config)) is not None:
        model = from_pretrained(TandemForCausalLM, path, config=ours, **kernels, **given)
    elif not native and config.model_type == "nanochat" and tandem_config(config) is not None:
        theirs = from_pretrained(NanoChatForCausalLM, path, config=config, **kernels, **given)
        own_head = keep_own_head(theirs)
        model = _nanochat_as_tandem(theirs, attn_implementation=attn_implementation, dtype=dtype)
    else:
        auto: Any = whole or AutoModelForCausalLM
        trust = {} if whole else {"trust_remote_code": trust_remote_code}
        model = from_pretrained(auto, path, config=config, **kernels, **given, **trust)
        use_chunked_loss(model)
    # 2. What the files say otherwise than transformers would save.
    if generation is None and model.generation_config is not None:  # made of config.json then
        model.generation_config, dropped = repaired_generation_config(model.generation_config.to_dict())
    if dropped:
        listed = ", ".join(f"{name} {value}" for name, value in dropped.items())
        notes.append(f"model: left out of generation_config.json, as generate ignores or refuses it so: {listed}")
    model.own_head = keep_own_head(model) or own_head
    if model.own_head:
        notes.append("model: its head is not its embedding, so tie_word_embeddings is false from now on")
    # 3. The parts that do not read text stay as they are.
    if whole:
        model.processor_files = files_beside(path, PROCESSOR_FILES, revision)
        frozen = freeze_other_parts(model)
        if not frozen:
            raise ModelOptionsError(
                f"{path}: which part of {type(model).__name__} reads text is not known. Save that part as a model and "
                "take it."
            )
        left = ", ".join(f"{part} ({count:,} parameters)" for part, count in frozen.items())
        notes.append(f"model: trained on text alone; kept as it is: {left}")
    model.notes = notes
    return model


def _nanochat_as_tandem(native: PreTrainedModel, *, attn_implementation, dtype: torch.dtype) -> PreTrainedModel:
    with torch.device("meta"):
        model = TandemForCausalLM._from_config(
            tandem_config(native.config), attn_implementation=attn_implementation, dtype=dtype
        )
    weights = native.state_dict()
    renamed = {name: weights[to_native_name(name, "nanochat")] for name in model.state_dict()}
    model.load_state_dict(renamed, assign=True)
    model.tie_weights()
    model.generation_config = native.generation_config
    return model.eval()
