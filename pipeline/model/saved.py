"""Saved models: folders that from_pretrained loads in a process without this package, and the way back for a resume."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from .configuration_tandem import TandemConfig
from .errors import ModelOptionsError
from .modeling_tandem import (
    TandemForCausalLM,
    TandemForSequenceClassification,
    TandemForTokenClassification,
    TandemModel,
)
from .native import native_class, native_config, to_native_name

CLASSES = {
    AutoModel: TandemModel,
    AutoModelForCausalLM: TandemForCausalLM,
    AutoModelForSequenceClassification: TandemForSequenceClassification,
    AutoModelForTokenClassification: TandemForTokenClassification,
}
AUTO_MAP = {"AutoConfig": "configuration_tandem.TandemConfig"}
AUTO_MAP |= {auto.__name__: f"modeling_tandem.{ours.__name__}" for auto, ours in CLASSES.items()}
CODE_FILES = sorted(Path(__file__).parent.glob("*_tandem.py"))

AutoConfig.register("tandem", TandemConfig, exist_ok=True)
for auto, ours in CLASSES.items():
    auto.register(TandemConfig, ours, exist_ok=True)


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
    transformers writes and names it. The rows that vocab_multiple adds are left out: other programs' losses and
    kernels take every row of a head for an id. The model itself is not changed.
    """
    if hasattr(model, "peft"):  # the adapter alone: its base is never written again
        from .adapter import save_adapter

        save_adapter(model, Path(folder), dtype=dtype)
        return
    form = saved_form(model, Path(folder))
    _assign(form, model, model.state_dict() if state_dict is None else state_dict, dtype=dtype)
    form.save_pretrained(folder, max_shard_size=max_shard_size)


def saved_form(model: PreTrainedModel, folder: Path | None, *, padded: bool = False) -> PreTrainedModel:
    """Return the model as the class and config that are written, without weights; its code files go into the folder,
    if one is given.

    padded: keep the rows that vocab_multiple adds, which an exact resume needs.
    """
    config, model_class = copy.deepcopy(model.config), type(model)
    config.distributed_config = None  # of a sharded model: the program that loads the files has one process
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
    text = config.get_text_config()
    text.use_cache = True  # Trainer switches it off; who loads the model wants to generate
    if text is not config:
        vars(config).pop("use_cache", None)
    if config.model_type == "gpt2":
        # OpenAI's name of it: transformers dropped it, llama.cpp's converter reads it.
        config.n_ctx = config.n_positions
    _add_older_rope_keys(text)
    with torch.device("meta"):
        form = model_class(config)
    for name, content in getattr(model, "processor_files", {}).items():
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    if model_class is type(model) and hasattr(model, "_weight_conversions"):
        form._weight_conversions = model._weight_conversions  # the names that its files had
    if model.generation_config is not None:
        form.generation_config = copy.deepcopy(model.generation_config)
    return form


def _add_older_rope_keys(config: Any) -> None:
    """Say the bases of rotary positions also as transformers 4 did: mlx-lm 0.32 and others know no rope_parameters and
    take a default."""
    ropes = getattr(config, "rope_parameters", None) or {}
    ropes_of_all = ropes.get("full_attention") or ropes
    if "rope_theta" not in ropes_of_all:
        return
    config.rope_theta = ropes_of_all["rope_theta"]
    if local := ropes.get("sliding_attention"):
        config.rope_local_base_freq = local["rope_theta"]
    elif ropes_of_all.get("rope_type", "default") != "default":
        # Past the property of that name, which is rope_parameters.
        vars(config)["rope_scaling"] = {name: value for name, value in ropes.items() if name != "rope_theta"}


def saved_weights(form: PreTrainedModel, model: PreTrainedModel, state: dict | None = None) -> dict[str, torch.Tensor]:
    """Return the tensors that save_pretrained would write for the model: its own, not copied. form: what saved_form
    gave for it. state: the whole weights of a part of its names; of others there is a tensor without memory (meta)."""
    _assign(form, model, model.state_dict() if state is None else state, strict=state is None)
    return revert_weight_conversion(form, remove_tied_weights_from_state_dict(form.state_dict(), form))


def _assign(
    form: PreTrainedModel,
    model: PreTrainedModel,
    state: dict,
    *,
    dtype: torch.dtype | None = None,
    strict: bool = True,
) -> None:
    written = {}
    shapes = form.state_dict()
    for name, value in state.items():
        if dtype is not None and value.is_floating_point():
            value = value.to(dtype)
        if isinstance(model.config, TandemConfig):
            name = to_native_name(name, form.config.model_type)
            if name in shapes:  # rows of padding are all that can be more than the form has
                value = value[: len(shapes[name])]
        written[name] = value
    form.load_state_dict(written, assign=True, strict=strict)
    form.tie_weights()


def load_weights(model: PreTrainedModel, folder) -> None:
    """Copies the weights that save_model wrote into a model of the same architecture, bit for bit in their dtype.

    Raises ValueError naming what is missing, left over or of another shape.
    """
    folder = Path(folder)
    if hasattr(model, "peft"):
        from .adapter import ADAPTER_WEIGHTS, load_adapter_weights

        load_adapter_weights(model, load_file(folder / ADAPTER_WEIGHTS), str(folder))
        return
    own = model.state_dict()
    state = read_tensors(folder)
    if not isinstance(model.config, TandemConfig) and not state.keys() <= own.keys():
        # transformers has other names or shapes in its files: experts one by one, towers by older names.
        config = copy.deepcopy(model.config)
        config.distributed_config = None
        dtype = next(iter(state.values())).dtype
        state = from_pretrained(type(model), str(folder), config=config, dtype=dtype).state_dict()
    written_as = json.loads((folder / "config.json").read_text())["model_type"]
    rename = written_as if isinstance(model.config, TandemConfig) else ""
    names = {name: to_native_name(name, rename) for name in own}
    tied = model._tied_weights_keys or {}
    if tied and has_own_head(model):
        tied = {}
    found = {name: state[theirs] for name, theirs in names.items() if theirs in state}
    wrong = [f"{name} is missing" for name in own if name not in found and name not in tied]
    wrong += [f"{name} is left over" for name in sorted(set(state) - set(names.values()))]
    for name, value in found.items():
        if value.shape != own[name].shape:
            wrong.append(f"{name} is {tuple(value.shape)}, not {tuple(own[name].shape)}")
    if wrong:
        raise ValueError(f"{folder}: these are not this model's weights: {'; '.join(wrong[:5])}.")
    with torch.no_grad():
        for name, value in found.items():
            own[name].copy_(cut_like(value, own[name]))


def has_own_head(model: PreTrainedModel) -> bool:
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and head.weight is not table.weight


def cut_like(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor that every rank has whole as `like` is: cut among the ranks, each with its part, or as it is."""
    if not isinstance(like, DTensor):
        return whole
    # Not sent by rank 0: every rank has read the same file.
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def read_tensors(folder, name: str = "model.safetensors") -> dict[str, torch.Tensor]:
    """Return all tensors of a file, or of the several that its index names, as transformers cuts a large model, by the
    names in there. The files are mapped: what is not looked at takes no memory."""
    index = Path(folder) / f"{name}.index.json"
    if not index.exists():
        return load_file(Path(folder) / name)
    tensors: dict[str, torch.Tensor] = {}
    for file in weight_files(index):
        tensors |= load_file(file)
    return tensors


def weight_files(index: Path) -> list[Path]:
    """Return the files that an index of weights names. Raises ModelOptionsError for one outside the index's folder."""
    names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    for name in names:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ModelOptionsError(
                f"{index}: names {name}, a file outside its folder, so nothing is opened. Take the model from its "
                "source again."
            )
    return [index.parent / name for name in names]


def from_pretrained(model_class, path: str, **given) -> PreTrainedModel:
    """Return the model, or raise ModelOptionsError where its weights are not those of its config."""
    # Shapes that do not fit raise nothing here, so that everything wrong is named at once, below.
    model, info = model_class.from_pretrained(path, output_loading_info=True, ignore_mismatched_sizes=True, **given)
    wrong = []
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        keys = sorted(map(str, info[kind]))
        if keys:
            wrong.append(f"{kind.replace('_', ' ')}: {', '.join(keys[:5])}")
    if wrong:
        where = Path(path) if Path(path).exists() else path
        raise ModelOptionsError(
            f"{where}: its weights are not those of its config ({'; '.join(wrong)}). Save the model again."
        )
    return model
