"""Saved models: what from_pretrained loads in a process without this package, and the way back for a resume."""

import copy
import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import GPT2Config, GPT2LMHeadModel, NanoChatConfig, NanoChatForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from .configuration_tandem import TandemConfig

# Tandem models whose options are those of an architecture that transformers ships, and back.

# Fields of TandemConfig that GPT2Config lacks and that do not change what the weights compute.
FREE = {"initialization", "vocab_multiple", "rope_theta", "qk_norm_scale", "sliding_window", "n_kv_head"}
EXTRAS = set(TandemConfig.__dataclass_fields__) - set(GPT2Config.__dataclass_fields__)
# What GPT-2 declares itself: the rest are every config's, which would stand in config.json as if somebody had set them.
GPT2_FIELDS = tuple(GPT2Config.__annotations__)
# Special tokens and what else both sides call alike.
SHARED = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "initializer_range")
NANOCHAT_NAMES = {
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_key_value_heads": "n_kv_head",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
    "attention_dropout": "attn_pdrop",
    "rms_norm_eps": "layer_norm_epsilon",
    "final_logit_softcapping": "final_logit_softcapping",
}
# What transformers' nanochat always is.
NANOCHAT_OPTIONS: dict[str, Any] = {
    "normalization": "rms_norm",
    "position_embedding": "rope",
    "use_bias": False,
    "qk_norm": True,
    "qk_norm_scale": 1.0,
    "embedding_norm": True,
    "value_embeddings": False,
    "residual_lambdas": False,
    "backout": False,
    "smear": False,
    "bigram_embeddings": None,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
}
NANOCHAT_PARAMETERS = [
    (r"^transformer\.wte\.", "model.embed_tokens."),
    (r"^transformer\.h\.(\d+)\.attn\.c_([qkv])\.", r"model.layers.\1.self_attn.\2_proj."),
    (r"^transformer\.h\.(\d+)\.attn\.c_proj\.", r"model.layers.\1.self_attn.o_proj."),
    (r"^transformer\.h\.(\d+)\.mlp\.c_fc\.", r"model.layers.\1.mlp.fc1."),
    (r"^transformer\.h\.(\d+)\.mlp\.c_proj\.", r"model.layers.\1.mlp.fc2."),
]


def native_config(config: TandemConfig) -> GPT2Config | NanoChatConfig | None:
    """Return the config of transformers' own class that computes the same with the same weights, or None."""
    if config.padded_vocab_size != config.vocab_size or any(config.windows):
        return None
    if _is_gpt2(config):
        return GPT2Config(**{name: getattr(config, name) for name in GPT2_FIELDS})
    if all(getattr(config, name) == value for name, value in NANOCHAT_OPTIONS.items()):
        fields: dict[str, Any] = {theirs: getattr(config, ours) for theirs, ours in NANOCHAT_NAMES.items()}
        inner = config.n_inner if config.n_inner is not None else 4 * config.n_embd
        rope = {"rope_type": "default", "rope_theta": float(config.rope_theta)}
        shared: dict[str, Any] = {name: getattr(config, name) for name in SHARED}
        return NanoChatConfig(**fields, **shared, intermediate_size=inner, rope_parameters=rope)
    return None


def native_class(config):
    return {"gpt2": GPT2LMHeadModel, "nanochat": NanoChatForCausalLM}[config.model_type]


def tandem_config(config) -> TandemConfig | None:
    """Return the Tandem config that computes the same as transformers' gpt2 or nanochat, or None where there is none."""
    if config.model_type == "gpt2":
        if config.add_cross_attention or config.reorder_and_upcast_attn:
            return None
        return TandemConfig(**{name: getattr(config, name) for name in GPT2_FIELDS})
    rope = config.rope_parameters or {}
    if rope.get("rope_type", "default") != "default" or config.attention_bias:
        return None
    fields = {ours: getattr(config, theirs) for theirs, ours in NANOCHAT_NAMES.items()}
    shared = {name: getattr(config, name) for name in SHARED}
    options: dict[str, Any] = NANOCHAT_OPTIONS | fields | shared
    return TandemConfig(**options, n_inner=config.intermediate_size, rope_theta=rope["rope_theta"])


def to_native_name(name: str, model_type: str) -> str:
    if model_type == "nanochat":
        for ours, theirs in NANOCHAT_PARAMETERS:
            name = re.sub(ours, theirs, name)
    return name


def _is_gpt2(config) -> bool:
    defaults = {name: TandemConfig.__dataclass_fields__[name].default for name in EXTRAS - FREE}
    return config.n_kv_head == config.n_head and all(getattr(config, name) == value for name, value in defaults.items())


AUTO_MAP = {
    "AutoConfig": "configuration_tandem.TandemConfig",
    "AutoModel": "modeling_tandem.TandemModel",
    "AutoModelForCausalLM": "modeling_tandem.TandemForCausalLM",
    "AutoModelForSequenceClassification": "modeling_tandem.TandemForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_tandem.TandemForTokenClassification",
}
CODE_FILES = sorted(Path(__file__).parent.glob("*_tandem.py"))


def save_model(
    model: PreTrainedModel,
    folder,
    *,
    dtype: torch.dtype | None = None,
    state_dict: dict | None = None,
    max_shard_size: str = "50GB",
) -> None:
    """Writes config, generation config, weights and, where it needs them, code files into the folder.

    A Tandem whose options are those of transformers' gpt2 or nanochat is written as that and loads anywhere; another
    one carries its code and loads with trust_remote_code=True. dtype: of the weights written, default as they are.
    state_dict: the whole weights, where the model holds only a shard. max_shard_size: of one file of weights, as
    transformers writes and names it. The rows that vocab_multiple adds are left out: other programs' losses and kernels take
    every row of a head for an id. The model itself is not changed.
    """
    form = saved_form(model, Path(folder))
    _assign(form, model, model.state_dict() if state_dict is None else state_dict, dtype=dtype)
    form.save_pretrained(folder, max_shard_size=max_shard_size)


def saved_form(model: PreTrainedModel, folder: Path | None, *, padded: bool = False) -> PreTrainedModel:
    """Return the model as the class and config that are written, without weights; its code files go into the folder, if one is given.

    padded: keep the rows that vocab_multiple adds, which an exact resume needs.
    """
    config, model_class = copy.deepcopy(model.config), type(model)
    config.distributed_config = None  # of a sharded model: whoever loads what is written has one process
    if isinstance(config, TandemConfig):
        if not padded:
            config.vocab_multiple = 1
        if (native := native_config(config)) is not None:
            config, model_class = native, native_class(native)
        else:
            config.auto_map = AUTO_MAP
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                for file in CODE_FILES:
                    shutil.copyfile(file, folder / file.name)
    config.use_cache = True  # Trainer switches it off; who loads the model wants to generate
    if config.model_type == "gpt2":
        config.n_ctx = (
            config.n_positions
        )  # OpenAI's name of it: transformers dropped it, llama.cpp's converter reads it
    with torch.device("meta"):
        form = model_class(config)
    if model.generation_config is not None:
        form.generation_config = copy.deepcopy(model.generation_config)
    return form


def saved_weights(form: PreTrainedModel, model: PreTrainedModel, state: dict | None = None) -> dict[str, torch.Tensor]:
    """Return the tensors that save_pretrained would write for the model: its own, not copied. form: what saved_form gave for it.
    state: the whole weights of a part of its names; of others there is a tensor without memory (meta)."""
    _assign(form, model, model.state_dict() if state is None else state, strict=state is None)
    return revert_weight_conversion(form, remove_tied_weights_from_state_dict(form.state_dict(), form))


def _assign(
    form: PreTrainedModel, model: PreTrainedModel, state: dict, *, dtype: torch.dtype | None = None, strict: bool = True
) -> None:
    if dtype is not None:
        state = {name: value.to(dtype) if value.is_floating_point() else value for name, value in state.items()}
    if isinstance(model.config, TandemConfig) and not isinstance(form.config, TandemConfig):
        state = {to_native_name(name, form.config.model_type): value for name, value in state.items()}
    if isinstance(model.config, TandemConfig):  # only rows of padding can be more than the form has
        rows = {name: len(value) for name, value in form.state_dict().items()}
        state = {name: value[: rows.get(name)] for name, value in state.items()}
    form.load_state_dict(state, assign=True, strict=strict)
    form.tie_weights()


def load_weights(model: PreTrainedModel, folder) -> None:
    """Copies the weights that save_model wrote into a model of the same architecture, bit for bit in their dtype.

    Raises ValueError naming what is missing, left over or of another shape.
    """
    folder = Path(folder)
    state = read_tensors(folder)
    written_as = json.loads((folder / "config.json").read_text())["model_type"]
    own = model.state_dict()
    rename = written_as if isinstance(model.config, TandemConfig) else ""
    names = {name: to_native_name(name, rename) for name in own}
    tied = {name for name in own if names[name] not in state and _is_tied(model, name)}
    left = set(state) - set(names.values())
    wrong = [f"{name} is missing" for name in own if names[name] not in state and name not in tied]
    wrong += [f"{name} is left over" for name in sorted(left)]
    wrong += [
        f"{name} is {tuple(state[names[name]].shape)}, not {tuple(value.shape)}"
        for name, value in own.items()
        if names[name] in state and state[names[name]].shape != value.shape
    ]
    if wrong:
        raise ValueError(f"{folder}: these are not this model's weights: {'; '.join(wrong[:5])}.")
    with torch.no_grad():
        for name, value in own.items():
            if name not in tied:
                value.copy_(cut_like(state[names[name]], value))


def cut_like(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor that every rank has whole as `like` is: cut among the ranks, each with its part, or as it is."""
    if not isinstance(like, DTensor):
        return whole
    # Not sent by rank 0: every rank has read the same file.
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def read_tensors(folder, name: str = "model.safetensors") -> dict[str, torch.Tensor]:
    """Return all tensors of a file, or of the several that its index names, as transformers cuts a large model, by the names in there.
    The files are mapped: what is not looked at takes no memory."""
    index = Path(folder) / f"{name}.index.json"
    if not index.exists():
        return load_file(Path(folder) / name)
    files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    return {name: value for file in files for name, value in load_file(Path(folder) / file).items()}


def _is_tied(model, name: str) -> bool:
    return model.config.tie_word_embeddings and name in (model._tied_weights_keys or {})
