"""Continuations of fixed prompts: the likeliest ones, and sampled ones that show the spread."""

from typing import Any

from pipeline.generation.texts import complete
from pipeline.recipe.schema import Samples

GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_k": 50}


def sample_texts(
    model, tokenizer, *, chat: bool, prompts: list[str] | None = None, max_new_tokens: int = 64
) -> list[dict[str, Any]]:
    """Rows of prompt, text, chat and the settings that made them; the same on every call. Default prompts: the recipe's."""
    prompts = prompts or Samples().prompts
    rows = []
    for settings in (GREEDY, SAMPLED):
        texts = complete(model, tokenizer, prompts, chat=chat, max_new_tokens=max_new_tokens, seed=0, **settings)
        rows += [
            {"prompt": prompt, "text": text, "chat": chat, **settings}
            for prompt, text in zip(prompts, texts, strict=True)
        ]
    return rows
