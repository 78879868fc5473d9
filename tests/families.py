"""Tiny models of families that people have, as transformers makes and saves them: sizes, control tokens, template, generation config.

The templates are the published ones, read from TRL's package; SmolLM3's, which it has not, is one of the same kind.
"""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from tests.conftest import docstrings

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 512}
GATED = {**SIZES, "intermediate_size": 64, "num_key_value_heads": 1}
# Of SmolLM3's kind: a system text with the day and a mode, marks around answers, the header inside them.
SMOLLM3 = """{%- set today = strftime_now("%d %B %Y") -%}
{{- "<|im_start|>system\\nToday Date: " ~ today ~ "\\nReasoning Mode: " ~ (reasoning_mode or "/think") ~ "\\n" -}}
{%- if messages[0].role == "system" -%}{{- messages[0].content -}}{%- endif -%}
{{- "<|im_end|>\\n" -}}
{%- for message in messages if message.role != "system" -%}
    {%- if message.role == "assistant" -%}
        {%- generation -%}{{- "<|im_start|>assistant\\n" + message.content.lstrip("\\n") + "<|im_end|>\\n" -}}{%- endgeneration -%}
    {%- else -%}
        {{- "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\\n" -}}{%- endif -%}
"""


@dataclass(frozen=True)
class Family:
    """specials: control tokens behind the text's; plain: added tokens that are none. template: a file of TRL's, or the text.

    ends: the control tokens that its generation config names. bos_first: its tokenizer puts bos before every text.
    """

    config: type
    sizes: dict
    specials: tuple[str, ...]
    bos: str | None
    eos: str
    pad: str | None
    template: str | None
    ends: tuple[str, ...]
    plain: tuple[str, ...] = ()
    bos_first: bool = False
    extra_rows: int = 0  # of the embedding, that stand for no id
    more: dict = field(default_factory=dict)


THINK = ("<think>", "</think>", "<tool_call>", "</tool_call>")
QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FAMILIES = {
    "llama": Family(
        LlamaConfig, GATED, ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|begin_of_text|>", "<|eot_id|>", None, "llama3", ("<|end_of_text|>", "<|eot_id|>"), bos_first=True,
    ),
    "qwen2": Family(
        Qwen2Config, GATED, QWEN, None, "<|im_end|>", "<|endoftext|>", "qwen2_5", ("<|im_end|>", "<|endoftext|>"), plain=THINK[2:], extra_rows=5,
        more={"tie_word_embeddings": False},
    ),
    "qwen3": Family(
        Qwen3Config, {**GATED, "head_dim": 16}, QWEN, None, "<|im_end|>", "<|endoftext|>", "qwen3", ("<|im_end|>", "<|endoftext|>"), plain=THINK,
        more={"tie_word_embeddings": True},
    ),
    "smollm3": Family(
        SmolLM3Config, GATED, ("<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>"), None, "<|im_end|>", "<|im_end|>",
        SMOLLM3, ("<|im_end|>",), plain=THINK, more={"tie_word_embeddings": True},
    ),
    "gemma3": Family(
        Gemma3TextConfig, {**GATED, "head_dim": 16, "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
        ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"), "<bos>", "<eos>", "<pad>", "gemma3", ("<eos>", "<end_of_turn>"), bos_first=True,
    ),
    "gpt_neox": Family(
        GPTNeoXConfig, {**SIZES, "intermediate_size": 64}, ("<|endoftext|>", "<|padding|>"), "<|endoftext|>", "<|endoftext|>", None, None, ("<|endoftext|>",),
    ),
}  # fmt: skip


def template_of(name: str) -> str:
    import trl

    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


@cache
def trained_bpe() -> str:
    """A byte-level BPE of 400 ids as its JSON, trained once."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(docstrings(modules=10), trainer)
    return backend.to_str()


def tokenizer_of(family: Family, *, template: str | None = None):
    """The BPE with the family's control tokens behind its ids."""
    backend = Tokenizer.from_str(trained_bpe())
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in family.specials])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in family.plain])
    if family.bos_first:
        ids = [(family.bos, backend.token_to_id(family.bos))]
        backend.post_processor = processors.TemplateProcessing(single=f"{family.bos} $A", special_tokens=ids)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=family.bos, eos_token=family.eos, pad_token=family.pad
    )
    template = template or family.template
    if template is not None:
        tokenizer.chat_template = template if "{" in template else template_of(template)
    return tokenizer


def save_model(name: str, folder: Path) -> Path:
    """A model of the family with random weights and its tokenizer, as a person has one on the disk."""
    family = FAMILIES[name]
    tokenizer = tokenizer_of(family)
    ends = [tokenizer.convert_tokens_to_ids(end) for end in family.ends]
    ids = {"bos_token_id": tokenizer.convert_tokens_to_ids(family.bos or family.specials[0]), "eos_token_id": ends[0]}
    ids["pad_token_id"] = tokenizer.pad_token_id
    config = family.config(vocab_size=len(tokenizer) + family.extra_rows, **family.sizes, **ids, **family.more)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config = GenerationConfig(
        bos_token_id=ids["bos_token_id"],
        eos_token_id=ends if len(ends) > 1 else ends[0],
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
