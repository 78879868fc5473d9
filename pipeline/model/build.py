"""Models from a recipe's fields, from folders or the Hub, and as folders that transformers loads again."""

import copy
import difflib
import inspect
import json
import math
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    NanoChatConfig,
    NanoChatForCausalLM,
    PreTrainedModel,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from .configuration_tandem import TandemConfig
from .groups import parameter_group
from .modeling_tandem import (
    IGNORED,
    TandemForCausalLM,
    TandemForSequenceClassification,
    TandemForTokenClassification,
    TandemModel,
    TandemOutput,
    head_loss,
)

# Saved models: what from_pretrained loads in a process without this package, and the way back for a resume.

# Tandem models whose options are those of an architecture that transformers ships, and back.

KNOWN: tuple[Any, ...] = (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)
# Fields of TandemConfig that GPT2Config lacks and that do not change what the weights compute.
FREE = {"initialization", "vocab_multiple", "rope_theta", "qk_norm_scale", "sliding_window", "n_kv_head"}
EXTRAS = set(TandemConfig.__dataclass_fields__) - set(GPT2Config.__dataclass_fields__)
# What GPT-2 declares itself: the rest are every config's, which would stand in config.json as if somebody had set
# them.
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
    """Return the Tandem config that computes the same as transformers' gpt2 or nanochat, or None where there is
    none."""
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
    return config.n_kv_head == config.n_head and all(
        getattr(config, name) == value for name, value in defaults.items()
    )


CLASSES = {
    AutoModel: TandemModel,
    AutoModelForCausalLM: TandemForCausalLM,
    AutoModelForSequenceClassification: TandemForSequenceClassification,
    AutoModelForTokenClassification: TandemForTokenClassification,
}
AUTO_MAP = {"AutoConfig": "configuration_tandem.TandemConfig"}
AUTO_MAP |= {auto.__name__: f"modeling_tandem.{ours.__name__}" for auto, ours in CLASSES.items()}
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
    transformers writes and names it. The rows that vocab_multiple adds are left out: other programs' losses and
    kernels take every row of a head for an id. The model itself is not changed.
    """
    form = saved_form(model, Path(folder))
    _assign(form, model, model.state_dict() if state_dict is None else state_dict, dtype=dtype)
    form.save_pretrained(folder, max_shard_size=max_shard_size)


def saved_form(model: PreTrainedModel, folder: Path | None, *, padded: bool = False) -> PreTrainedModel:
    """Return the model as the class and config that are written, without weights; its code files go into the folder,
    if one is given.

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
    if dtype is not None:
        state = {name: value.to(dtype) if value.is_floating_point() else value for name, value in state.items()}
    if isinstance(model.config, TandemConfig):
        state = {to_native_name(name, form.config.model_type): value for name, value in state.items()}
        # Only rows of padding can be more than the form has.
        rows = {name: len(value) for name, value in form.state_dict().items()}
        state = {name: value[: rows.get(name)] for name, value in state.items()}
    form.load_state_dict(state, assign=True, strict=strict)
    form.tie_weights()


def load_weights(model: PreTrainedModel, folder) -> None:
    """Copies the weights that save_model wrote into a model of the same architecture, bit for bit in their dtype.

    Raises ValueError naming what is missing, left over or of another shape.
    """
    folder = Path(folder)
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
    wrong += [
        f"{name} is {tuple(value.shape)}, not {tuple(own[name].shape)}"
        for name, value in found.items()
        if value.shape != own[name].shape
    ]
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
    return {name: value for file in weight_files(index) for name, value in load_file(file).items()}


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


# Checks that tensors hold finite numbers only, in memory and in a model's files.


def first_nonfinite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the first name whose tensor holds a NaN or an infinity; of a sharded tensor this rank's part is looked
    at.

    The host waits once for each device, not for each tensor.
    """
    by_device: dict[torch.device, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        part = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        if part.is_floating_point() and part.numel():
            by_device[part.device][name] = part
    bad = set()
    for parts in by_device.values():
        # The smallest and the largest value: both are NaN where one is, and nothing of the tensor's size is made.
        finite = torch.stack([torch.stack(part.aminmax()).isfinite().all() for part in parts.values()]).tolist()
        bad |= {name for name, is_finite in zip(parts, finite, strict=True) if not is_finite}
    return next((name for name in tensors if name in bad), None)


def first_nonfinite_of_files(folder: Path) -> str | None:
    """Return the first name of a tensor in the folder's safetensors files that holds a NaN or an infinity; one is in
    memory at a time."""
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # no mapping
                if first_nonfinite({name: tensors.get_tensor(name)}):
                    return name
    return None


AutoConfig.register("tandem", TandemConfig, exist_ok=True)
for auto, ours in CLASSES.items():
    auto.register(TandemConfig, ours, exist_ok=True)


class ModelOptionsError(ValueError):
    """The model that was asked for cannot be built, for the reason in the message."""


def build_model(
    model_type: str | Callable[..., Any],
    fields: dict,
    *,
    attn_implementation: str | None = None,
    seed: int,
    identity_blocks: bool = False,
) -> PreTrainedModel:
    """Return a new fp32 model on the CPU, its weights a function of the seed alone; no global generator is moved.

    model_type: `tandem`, a causal LM of transformers (`llama`), or the user's own: a PreTrainedModel class or a
    function of the fields that returns a model. fields: those of its config class, special token ids among them.
    identity_blocks: draw the matrices again as initialize_identity_blocks does; of a Llama-like model of transformers.
    Raises ModelOptionsError for an unknown type, an unknown field or a combination that the config refuses.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _build(model_type, fields, attn_implementation)
        if identity_blocks:
            initialize_identity_blocks(model)
    set_generation_config(model)
    use_chunked_loss(model)
    return model.float()


# Classes of transformers whose forward is the base model, `lm_head` and the loss: no scale, cap or auxiliary loss
# between them.
PLAIN_HEADS = {"llama", "mistral", "qwen2", "qwen3"}


def use_chunked_loss(model: Any) -> None:
    """Have a model of PLAIN_HEADS compute the training's loss, and per_token_nll, as Tandem does: the logits of a
    whole batch are never held. Everything else, and what is saved, stays transformers' own."""
    kind, stock = getattr(model.config, "model_type", None), type(model).forward
    if kind not in PLAIN_HEADS or type(model).__module__ != f"transformers.models.{kind}.modeling_{kind}":
        return

    def forward(self, *args, labels=None, **kwargs):
        shift_labels, per_token_loss = kwargs.get("shift_labels"), kwargs.get("per_token_loss", False)
        if (labels is None and shift_labels is None) or not (self.training or per_token_loss):
            return stock(self, *args, labels=labels, **kwargs)
        if shift_labels is None:
            shift_labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        options = {"per_token_loss": per_token_loss, "num_items_in_batch": kwargs.get("num_items_in_batch")}
        for name in ("shift_labels", "logits_to_keep", *options):
            kwargs.pop(name, None)
        hidden_BTD = self.model(*args, **kwargs | {"use_cache": False}).last_hidden_state
        loss, nats_BT = head_loss(self.lm_head, hidden_BTD, shift_labels, vocab_size=self.config.vocab_size, **options)
        return TandemOutput(loss=loss, nats=nats_BT)

    # generate reads from the signature what forward takes. Not functools.wraps: Accelerate unwraps whatever was
    # wrapped.
    forward.__signature__ = inspect.signature(stock)  # type: ignore[attr-defined]
    model.forward = MethodType(forward, model)
    model.per_token_nll = MethodType(TandemForCausalLM.per_token_nll, model)


RESIDUAL_OUTPUTS = {"o_proj", "down_proj"}  # what writes into the residual stream, as Llama and its kin call it


@torch.no_grad()
def initialize_identity_blocks(model: PreTrainedModel) -> None:
    """Draw the matrices as nanochat does: blocks begin as the identity, the head near zero, the embedding wide.

    Norms and biases stay as transformers has them. Measured against transformers' normal(0.02) in docs/log.md.
    """
    bound = math.sqrt(3 / model.config.get_text_config().hidden_size)  # standard deviation 1 / sqrt(width)
    for name, parameter in model.named_parameters():
        group = parameter_group(name, parameter)
        if group == "embeddings" and not model.config.tie_word_embeddings:
            parameter.normal_(0.0, 0.8)
        elif group == "head":
            parameter.normal_(0.0, 0.001)
        elif group == "matrices" and name.split(".")[-2] in RESIDUAL_OUTPUTS:
            parameter.zero_()
        elif group == "matrices":
            into_mlp = name.split(".")[-2] in ("gate_proj", "up_proj")
            parameter.uniform_(-0.4 * bound, 0.4 * bound) if into_mlp else parameter.uniform_(-bound, bound)


def _build(model_type: str | Callable[..., Any], fields: dict, attn_implementation: str | None) -> Any:
    if not isinstance(model_type, str):
        if not (isinstance(model_type, type) and issubclass(model_type, PreTrainedModel)):
            return model_type(**fields)
        config = _config(model_type.config_class, fields, model_type.__name__)
        return model_type._from_config(config, attn_implementation=attn_implementation, dtype=torch.float32)
    if model_type not in ("tandem", *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        near = difflib.get_close_matches(model_type, ["tandem", *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES], 3)
        raise ModelOptionsError(
            f"model.type: {model_type} is no causal language model of transformers."
            + (f" Did you mean {' or '.join(near)}?" if near else " Write tandem, gpt2, llama ..., or module:attr.")
        )
    config = _config(CONFIG_MAPPING[model_type], fields, model_type)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation, dtype=torch.float32)


def _config(config_class, fields: dict, model_type: str):
    # transformers keeps unknown fields without a word, and the model would be another one than was meant.
    known = {*config_class.__dataclass_fields__, *config_class.attribute_map} - {"model_type"}
    if unknown := sorted(set(fields) - known):
        near = {name: difflib.get_close_matches(name, known, 1) for name in unknown}
        names = ", ".join(name + (f" (did you mean {near[name][0]}?)" if near[name] else "") for name in unknown)
        raise ModelOptionsError(
            f"model.options: {config_class.__name__} of model.type {model_type} has no field {names}."
        )
    try:
        return config_class(**fields)
    except Exception as error:  # strict dataclasses have their own error classes, one per kind of validator
        raise ModelOptionsError(f"model.options: {error}") from error


def set_generation_config(model: PreTrainedModel) -> None:
    """Generation ends at the end token, and at a document's beginning: nothing of this text follows it."""
    # Not every config class has all of them.
    bos, eos, pad = (getattr(model.config, f"{name}_token_id", None) for name in ("bos", "eos", "pad"))
    ends = list(dict.fromkeys([*(eos if isinstance(eos, list) else [eos]), bos]))
    ends = [token for token in ends if token is not None]
    eos = ends[0] if len(ends) == 1 else ends or None
    model.generation_config = GenerationConfig(bos_token_id=bos, eos_token_id=eos, pad_token_id=pad)


def needs_no_code(model_type: Any) -> bool:
    """Return whether this program or transformers has the classes of a model_type, so that no code beside the weights
    is run."""
    return isinstance(model_type, str) and (model_type == "tandem" or any(model_type in names for names in KNOWN))


def from_pretrained(model_class, path: str, **given) -> PreTrainedModel:
    """Return the model, or raise ModelOptionsError where its weights are not those of its config."""
    # Asked not to raise at a shape that does not fit, so that everything wrong is named at once, below.
    model, info = model_class.from_pretrained(path, output_loading_info=True, ignore_mismatched_sizes=True, **given)
    wrong = {kind: sorted(map(str, info[kind])) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    if any(wrong.values()):
        where = Path(path) if Path(path).exists() else path
        listed = "; ".join(f"{kind.replace('_', ' ')}: {', '.join(of[:5])}" for kind, of in wrong.items() if of)
        raise ModelOptionsError(f"{where}: its weights are not those of its config ({listed}). Save the model again.")
    return model
