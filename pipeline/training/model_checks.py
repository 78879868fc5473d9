"""Checks of a model of another class: differences from ours that nobody would notice while it trains."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.utils.generic import is_flash_attention_requested

from pipeline.process.errors import DataError, RecipeError, first_line
from pipeline.tokenizer.load import comes_back_beside
from pipeline.training.trainer import balancing_loss

NUM_IDS = 8  # of the row that a model of another class is tried with


@contextmanager
def probed(model: Any) -> Iterator[torch.Tensor]:
    """Yield ids to try the model with, while it evaluates and attends as a CPU can: without dropout and flash
    kernels."""
    training, attention = model.training, model.config._attn_implementation
    model.eval()
    if attention != "sdpa":
        model.config._attn_implementation = "eager"
    try:
        with torch.no_grad():
            yield torch.arange(NUM_IDS)[None] % model.config.get_text_config().vocab_size
    finally:
        model.train(training)
        model.config._attn_implementation = attention


def divides_by_num_items(model: Any) -> bool:
    """Return whether the loss is the cross-entropy of the model's own logits with shift_labels, summed, over
    num_items_in_batch, apart from a loss that balances experts.

    As transformers' causal LMs have it. A model that ignores the number gives the mean of its own micro-batch:
    gradients of micro-batches and ranks would not add up to the mean over a step's tokens. One that ignores
    shift_labels shifts the labels again, and learns to skip a token. Called as training calls it; a forward that does
    not take these arguments is one more way to be wrong.
    """
    # Targets are the next tokens, the last position has none; the sum over them is divided by 2, not by their number.
    with probed(model) as ids:
        labels = ids.roll(-1).index_fill(-1, torch.tensor([NUM_IDS - 1]), -100)
        try:
            output = model(input_ids=ids, labels=labels, shift_labels=labels, num_items_in_batch=torch.tensor(2.0))
        except TypeError:
            return False
    expected = torch.nn.functional.cross_entropy(output.logits[0].float(), labels[0], reduction="sum") / 2
    added = balancing_loss(model, output)
    if added is not None:
        expected = expected + added
    return bool((output.loss - expected).abs() <= 1e-4 * expected)


def refuse_quantized(model: Any, where: str) -> None:
    """Raise DataError where transformers keeps weights of the model quantized.

    Floats that it quantizes in each step (BitNet's) can be trained.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if getattr(model, "is_quantized", False) and not getattr(quantizer, "is_qat_trainable", False):
        method = getattr(model.config.quantization_config, "quant_method", "unknown method")
        raise DataError(
            f"{where}: its weights are quantized ({getattr(method, 'value', method)}), which no step can change. "
            "Start from the same model in bf16 or fp32."
        )


def check_foreign(model: Any, tokenizer: Any, *, where: Callable[[str], str], isolated_rows: int) -> None:
    """Raise RecipeError for another model class that could not be trained, or not be used afterwards.

    where: gives the file and line of a key; isolated_rows: the most rows of a batch whose documents are kept apart.
    """
    kind = type(model).__name__
    try:
        summed = divides_by_num_items(model)
    except Exception as error:  # whatever a model without its pictures ends in
        raise RecipeError(
            f"{where('model.type')}: {kind} computes nothing from text alone ({first_line(error)}), so it cannot be "
            "trained here. Save its text part as a model of its own and start from that."
        ) from error
    if not summed:
        raise RecipeError(
            f"{where('model.type')}: {kind} does not give the summed loss of shift_labels over num_items_in_batch, so "
            "its loss would be of other tokens or depend on the micro-batch. Let forward hand **kwargs to "
            "self.loss_function, as transformers' own models do."
        )
    if isolated_rows > 1 and is_flash_attention_requested(model.config):
        raise RecipeError(
            f"{where('model.attn_implementation')}: the flash kernels of transformers keep packed documents apart in "
            f"batches of one row only, and this run has batches of {isolated_rows}. Write sdpa."
        )
    if not comes_back_beside(model.config, tokenizer):
        raise RecipeError(
            f"{where('model.type')}: with a {kind}, transformers loads a tokenizer class of its own instead of the "
            "saved one, whose ids differ. Take another model.type, or start from a model of this type with its own "
            "tokenizer."
        )


class KeepEnds(TrainerCallback):
    """Keeps the ids that end a generation: Trainer adds the tokenizer's eos, which may be a new token that no text
    has."""

    def __init__(self, model: Any):
        self.holders = [c for c in (model.config.get_text_config(), model.generation_config) if c is not None]
        self.ends = [getattr(holder, "eos_token_id", None) for holder in self.holders]

    def on_train_begin(self, args, state, control, **kwargs):
        for holder, ends in zip(self.holders, self.ends, strict=True):
            holder.eos_token_id = ends
