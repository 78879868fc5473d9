"""A causal LM that knows some texts by heart, whatever it is fed beside: a real forward with a real cache.

It keeps the ids that it has read where others keep keys, so that it sees exactly what a caller fed it: another history
than the beginning of one of its texts is an error, as are wrong positions.
"""

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.gpt2 import GPT2Config


class Scripted(PreTrainedModel):
    """texts: (ids, wishes): the token that it writes after ids[:n] is wishes[n]."""

    config_class = GPT2Config

    def __init__(self, texts: list[tuple[list[int], list[int]]], *, vocab_size: int, n_positions: int = 1000):
        super().__init__(GPT2Config(vocab_size=vocab_size, n_positions=n_positions))
        self.nothing = torch.nn.Parameter(torch.zeros(1))
        self.texts = texts
        self.batch_sizes: list[int] = []  # of each forward

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None):
        self.batch_sizes.append(len(input_ids))
        cache = DynamicCache() if past_key_values is None else past_key_values
        states = input_ids[:, None, :, None].float()
        seen_BT = cache.update(states, states, 0)[0][:, 0, :, 0].long()
        logits = torch.stack([self._row(n, row, attention_mask, position_ids) for n, row in enumerate(seen_BT)])
        return CausalLMOutputWithPast(logits=logits[:, None], past_key_values=cache)

    def _row(self, n, seen_T, mask_BT, position_ids_BT):
        history = seen_T if mask_BT is None else seen_T[mask_BT[n].bool()]
        assert position_ids_BT is None or position_ids_BT[n, -1] == len(history) - 1
        history = history.tolist()
        wishes = [wishes[len(history)] for ids, wishes in self.texts if ids[: len(history)] == history]
        assert wishes, f"no text begins {history}"
        return F.one_hot(torch.tensor(wishes[0]), self.config.vocab_size).float()
