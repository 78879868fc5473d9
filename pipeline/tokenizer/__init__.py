"""Tokenizers: trained on the run's own text or ready made, with a chat template, and the raw bytes of every id.

`load_or_train` is the way in; `chat`, `encode` and `byte_lengths` take what it gives.
"""

from typing import Any

from pipeline.recipe.schema import TokenizerSettings
from pipeline.tokenizer.load import identity, load_ready

__all__ = ["identity", "load_or_train"]


def load_or_train(
    settings: TokenizerSettings, sources: list, *, validation: list | None = None, beside: str | None = None
) -> Any:
    """Return the PreTrainedTokenizerFast of a run, with chat template, bos, eos and pad.

    A ready one (`tokenizer.path`) gets the control tokens it lacks, each with a printed line. Otherwise one is trained
    on the sources, once per text and settings: every process finds it in the cache, one trains while the others wait.
    It is judged then: report.json beside it, printed; `validation` and `beside` are for that judgement alone. Raises
    RecipeError, InputMissingError or ServiceError for what the recipe names; DataError when the sources hold no text.
    """
    if settings.tokenizer.path:
        return load_ready(settings)
    from pipeline.tokenizer.train import trained_tokenizer

    return trained_tokenizer(settings, sources, validation=validation, beside=beside)
