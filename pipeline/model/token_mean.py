"""Whether a model's loss is the sum over its targets, divided by the number that it is told."""

from typing import Any

import torch

NUM_IDS = 8


@torch.no_grad()
def divides_by_num_items(model: Any) -> bool:
    """True when the loss is the cross-entropy of the model's own logits with shift_labels, summed, over num_items_in_batch.

    As transformers' causal LMs have it. A model that ignores the number gives the mean of its own micro-batch: gradients
    of micro-batches and ranks would not add up to the mean over a step's tokens. One that ignores shift_labels shifts
    the labels again, and learns to skip a token. Called as training calls it; a forward that does not take these
    arguments is one more way to be wrong.
    """
    training, attention = model.training, model.config._attn_implementation
    model.eval()  # dropout would give two losses
    model.config._attn_implementation = "eager"  # the model is still on the CPU, where no flash kernel runs
    ids = torch.arange(NUM_IDS)[None] % model.config.get_text_config().vocab_size
    labels = ids.roll(-1).index_fill(-1, torch.tensor([NUM_IDS - 1]), -100)
    try:
        output = model(input_ids=ids, labels=labels, shift_labels=labels, num_items_in_batch=torch.tensor(2.0))
    except TypeError:
        return False
    finally:
        model.train(training)
        model.config._attn_implementation = attention
    expected = torch.nn.functional.cross_entropy(output.logits[0].float(), labels[0], reduction="sum") / 2
    return bool((output.loss - expected).abs() <= 1e-3 * expected)
