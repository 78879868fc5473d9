"""New models from a recipe's fields."""

import difflib
import inspect
import math
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from .errors import ModelOptionsError
from .groups import parameter_group
from .modeling_tandem import (
    IGNORED,
    TandemForCausalLM,
    TandemOutput,
    head_loss,
)

KNOWN: tuple[Any, ...] = (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)


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
            width = bound
            if name.split(".")[-2] in ("gate_proj", "up_proj"):
                width = 0.4 * bound
            parameter.uniform_(-width, width)


def _build(model_type: str | Callable[..., Any], fields: dict, attn_implementation: str | None) -> Any:
    if not isinstance(model_type, str):
        if not (isinstance(model_type, type) and issubclass(model_type, PreTrainedModel)):
            return model_type(**fields)
        config = _config(model_type.config_class, fields, model_type.__name__)
        return model_type._from_config(config, attn_implementation=attn_implementation, dtype=torch.float32)
    if model_type not in ("tandem", *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        near = difflib.get_close_matches(model_type, ["tandem", *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES], 3)
        advice = "Write tandem, gpt2, llama ..., or module:attr."
        if near:
            advice = f"Did you mean {' or '.join(near)}?"
        raise ModelOptionsError(f"model.type: {model_type} is no causal language model of transformers. {advice}")
    config = _config(CONFIG_MAPPING[model_type], fields, model_type)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation, dtype=torch.float32)


def _config(config_class, fields: dict, model_type: str):
    # transformers keeps unknown fields without a word, and the model would be another one than was meant.
    known = {*config_class.__dataclass_fields__, *config_class.attribute_map} - {"model_type"}
    if unknown := sorted(set(fields) - known):
        names = []
        for name in unknown:
            near = difflib.get_close_matches(name, known, 1)
            names.append(f"{name} (did you mean {near[0]}?)" if near else name)
        raise ModelOptionsError(
            f"model.options: {config_class.__name__} of model.type {model_type} has no field {', '.join(names)}."
        )
    try:
        return config_class(**fields)
    except Exception as error:  # strict dataclasses have their own error classes, one per kind of validator
        raise ModelOptionsError(f"model.options: {error}") from error


def set_generation_config(model: PreTrainedModel) -> None:
    """Generation ends at the end token, and at a document's beginning: nothing of this text follows it."""
    # Not every config class has all of them.
    bos = getattr(model.config, "bos_token_id", None)
    eos = getattr(model.config, "eos_token_id", None)
    pad = getattr(model.config, "pad_token_id", None)
    given = eos if isinstance(eos, list) else [eos]
    ends = [token for token in dict.fromkeys([*given, bos]) if token is not None]
    eos = ends[0] if len(ends) == 1 else ends or None
    model.generation_config = GenerationConfig(bos_token_id=bos, eos_token_id=eos, pad_token_id=pad)


def needs_no_code(model_type: Any) -> bool:
    """Return whether this program or transformers has the classes of a model_type, so that no code of the
    model is run."""
    return isinstance(model_type, str) and (model_type == "tandem" or any(model_type in names for names in KNOWN))
