"""A model that knows what follows certain prompts, through the interface of any causal LM of transformers."""

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class KnowingConfig(PreTrainedConfig):
    model_type = "knowing"


class KnowingModel(PreTrainedModel):
    """After a prompt of `answers` (ids -> ids) it writes the answer, elsewhere the id 0. The cache is the ids so far."""

    config_class = KnowingConfig

    def __init__(self, config, answers: dict[tuple[int, ...], list[int]]):
        super().__init__(config)
        self.anchor = torch.nn.Parameter(torch.zeros(1))  # gives the model a device
        self.next_id = {}
        for prompt, answer in answers.items():
            for n, token in enumerate(answer):
                self.next_id[(*prompt, *answer[:n])] = token

    def forward(self, input_ids, attention_mask=None, past_key_values=None, use_cache=None):
        known = past_key_values or [[] for _ in input_ids]
        logits_BTV = torch.zeros(*input_ids.shape, self.config.vocab_size)
        seen = []
        for row, ids in enumerate(input_ids.tolist()):
            past = len(known[row])
            all_ids = known[row] + ids
            first = 0 if attention_mask is None else int((attention_mask[row] == 0).sum())  # padded on the left
            for t in range(past, len(all_ids)):
                logits_BTV[row, t - past, self.next_id.get(tuple(all_ids[first : t + 1]), 0)] = 1
            seen.append(all_ids)
        return CausalLMOutputWithPast(logits=logits_BTV, past_key_values=seen if use_cache else None)


def knowing_model(tokenizer, answers: dict[tuple[int, ...], list[int]]) -> KnowingModel:
    return KnowingModel(KnowingConfig(vocab_size=len(tokenizer)), answers)
