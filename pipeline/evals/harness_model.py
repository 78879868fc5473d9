"""A model and tokenizer as lm-evaluation-harness drives them, every text beginning as in training: with one BOS."""

import copy
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM

from pipeline.generation.texts import positions
from pipeline.process.errors import DataError
from pipeline.tokenizer.encode import encode_documents


class HarnessModel(HFLM):
    """HFLM with our ids: BOS where the tokenizer has one, whether or not it adds it itself, and never two.

    HFLM leaves BOS to the tokenizer: one that adds none (byte-level BPE) then scores every context without, one that
    adds it scores the likelihood of a text as two. Base models read control strings in a task's text as text. chat:
    texts come from the chat template, which writes its own BOS. A prompt longer than the model's positions loses its
    oldest tokens behind the BOS; `cut` holds the contexts that did. Raises DataError when the tokenizer has neither
    BOS nor EOS, so that an empty context has no token to begin with.
    """

    def __init__(self, model: Any, tokenizer: Any, *, batch_rows: int, chat: bool):
        first = tokenizer.bos_token_id
        if first is None:
            first = tokenizer.eos_token_id
        if first is None:
            raise DataError(
                "the tokenizer has neither a BOS nor an EOS token, so a text has nothing to begin with. Set bos_token "
                "in its tokenizer_config.json."
            )
        tokenizer = copy.deepcopy(tokenizer)  # HFLM sets a padding token, if need be a new one.
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token_id = first
        super().__init__(
            pretrained=model,
            tokenizer=tokenizer,
            backend="causal",
            batch_size=batch_rows,
            max_length=positions(model),
            prefix_token_id=first,
        )
        self.chat = chat
        self.cut: set[str] = set()

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id if self.tokenizer.eos_token_id is not None else self.prefix_token_id

    def tok_encode(self, string, add_special_tokens=None, left_truncate_len=None, **kwargs) -> list[int]:
        """Return the ids of the text alone; BOS is put before a context in the two places below."""
        if self.chat:
            ids = self.tokenizer.encode(string, add_special_tokens=False)
        else:
            ids = encode_documents(self.tokenizer, [string])[0].tolist()
        return ids[-left_truncate_len:] if left_truncate_len else ids

    def _encode_pair(self, context, continuation):
        context_ids, continuation_ids = super()._encode_pair(context, continuation)
        return self._begun(context_ids), continuation_ids

    def tok_batch_encode(self, strings, padding_side="left", left_truncate_len=None, truncation=False):
        """Return (B, T) ids and attention mask of contexts to generate from."""
        limit = left_truncate_len or self.max_length
        rows = [self._fitted(self._begun(self.tok_encode(string)), limit, text=string) for string in strings]
        width = max(map(len, rows))
        pad = self.tokenizer.pad_token_id
        input_ids_BT = torch.tensor([[pad] * (width - len(ids)) + ids for ids in rows])
        attention_mask_BT = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in rows])
        return input_ids_BT, attention_mask_BT

    def _loglikelihood_tokens(self, requests, **kwargs):
        fitted = []
        for key, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise DataError(
                    f"lm_eval: an answer of {len(continuation)} tokens is longer than the model's {self.max_length} "
                    f"positions: {key[1][:60]!r}. Leave that task out."
                )
            # The last token is a target only, no input.
            limit = self.max_length + 1 - len(continuation)
            fitted.append((key, self._fitted(context, limit, text=key and key[0]), continuation))
        return super()._loglikelihood_tokens(fitted, **kwargs)

    def _begun(self, ids: list[int]) -> list[int]:
        bos = self.tokenizer.bos_token_id
        if self.chat or bos is None:
            return ids or [self.prefix_token_id]
        return [bos, *ids]

    def _fitted(self, ids: list[int], limit: int, *, text: str | None) -> list[int]:
        if len(ids) <= limit:
            return ids
        if text is not None:  # A window of a long text, which the harness has cut to fit.
            self.cut.add(text)
        kept = ids[len(ids) - limit :]
        if ids[0] == self.tokenizer.bos_token_id:
            kept[:1] = ids[:1]
        return kept
