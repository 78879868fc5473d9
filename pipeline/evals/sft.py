"""What the assistant says, scored on held-out conversations: the same text for a base model and for what SFT made of it.

Only the assistant's words count: the questions are context, and the end token has no bytes. In training the data room's
validation rows are scored by bits_per_byte itself; here a conversation is a row, so any model with a chat template can be.
"""

from collections.abc import Iterator

import numpy as np
import torch

from pipeline.artifacts.errors import DataError
from pipeline.artifacts.protocol import Protocol, digest
from pipeline.data.conversations import fit_conversation
from pipeline.evals.bpb import IGNORED
from pipeline.tokenizer.chat import render, render_batch

RULE = 1  # raise it when the same conversations under the same window give another figure


def conversations_protocol(
    tokenizer, conversations: list[list[dict]], *, window: int, scored_bytes: int, coverage: float, dtype: str
) -> Protocol:
    """Return the protocol of what the assistant says, with the template that puts the conversations before the model.

    A shorter window cuts long conversations, which is another text: its scored_bytes are fewer.
    """
    return Protocol(
        {
            "score": "assistant",
            "texts": digest([digest(messages) for messages in conversations]),
            "bytes": scored_bytes,
            "window": window,
            "stride": "each conversation",
            "bos": "as the template",
            "template": digest(str(tokenizer.chat_template)),
            "dtype": dtype,
            "coverage": coverage,
            "rule": RULE,
        }
    )


def conversation_batches(
    tokenizer, conversations: list[list[dict]], *, window: int, rows: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of up to `rows` conversations, one a row, longest first; targets are what the assistant writes.

    A conversation longer than the window is cut at its last whole turn that fits, else left out, as in training. Raises
    DataError when the tokenizer has no chat template or no conversation fits.
    """
    if not tokenizer.chat_template:
        raise DataError(
            "the tokenizer has no chat template, so conversations cannot be put before the model. Score text with --text."
        )
    fitted, outcomes = [], set()
    for messages, rendered in zip(conversations, render_batch(tokenizer, conversations), strict=True):
        ids, trained, outcome = fit_conversation(
            messages, rendered, lambda m: render(tokenizer, m), capacity=window + 1, overflow="cut"
        )
        outcomes.add(outcome)
        if ids is not None:
            fitted.append((np.array(ids, np.int64), np.array(trained, bool)))
    if outcomes == {"no_target"}:
        raise DataError(
            f"nothing in the {len(conversations)} conversations is the assistant's by the tokenizer's chat template, which marks it with "
            "{% generation %} ... {% endgeneration %}, so no answer can be scored. Mark it there, or score text with --text."
        )
    if not fitted:
        raise DataError(
            f"none of the {len(conversations)} conversations has an answer within {window} tokens, so nothing can be scored. Give shorter ones."
        )
    fitted.sort(key=lambda pair: -len(pair[0]))
    for first in range(0, len(fitted), rows):
        some = fitted[first : first + rows]
        width = len(some[0][0]) - 1
        input_ids_BT = np.zeros((len(some), width), np.int64)
        labels_BT = np.full((len(some), width), IGNORED, np.int64)
        for row, (ids, trained) in enumerate(some):
            input_ids_BT[row, : len(ids) - 1] = ids[:-1]
            labels_BT[row, : len(ids) - 1] = np.where(trained[1:], ids[1:], IGNORED)
        yield {"input_ids": torch.from_numpy(input_ids_BT), "shift_labels": torch.from_numpy(labels_BT)}
