"""Whether a model's loss is the sum over its targets, divided by the number that it is told."""

from typing import Any

import torch


@torch.no_grad()
def divides_by_num_items(model: Any) -> bool:
    """True when a twice as large num_items_in_batch halves the loss, as transformers' causal LMs have it.

    A model that ignores the number gives the mean of its own micro-batch: gradients of micro-batches and ranks would not
    add up to the mean over a step's tokens, and every loss shown would be a sum of means. Raises nothing of its own.
    """
    training, attention = model.training, model.config._attn_implementation
    model.eval()  # dropout would give two losses
    model.config._attn_implementation = "eager"  # the model is still on the CPU, where no flash kernel runs
    ids = torch.arange(4)[None] % model.config.get_text_config().vocab_size
    once, twice = (
        model(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(count)).loss.item() for count in (4.0, 8.0)
    )
    model.train(training)
    model.config._attn_implementation = attention
    return abs(once - 2 * twice) <= 1e-3 * abs(once)
