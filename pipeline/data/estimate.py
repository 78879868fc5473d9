"""The length of a run in epochs before its rows are packed."""

import json
from itertools import chain
from typing import Any

from pipeline.process.errors import DataError
from pipeline.recipe.schema import SourceSettings, TokenizerSettings
from pipeline.sources.open import open_sources
from pipeline.sources.raw_rows import text_bytes
from pipeline.sources.source import OpenSource
from pipeline.tokenizer.chat import rendered_talks
from pipeline.tokenizer.encode import plain_backend

COUNTED_BYTES = 1_000_000  # of each source; of the rest the size is known


def about_tokens(
    settings: SourceSettings, tokenizer_settings: TokenizerSettings, *, start_from: str | None, epochs: float
) -> tuple[float | None, int | None]:
    """Return the tokens of a run in epochs, by those of each source's first megabyte, and the bytes that are held out;
    None where sizes are not known, for the tokens also where a source has a weight or the tokenizer is that of a model
    elsewhere.

    A tokenizer that has to be trained is trained on these texts. Raises as open_sources.
    """
    from pipeline.tokenizer.load import ready_tokenizer
    from pipeline.tokenizer.train import text_of, train_bpe

    section = tokenizer_settings.tokenizer
    sources, validation = open_sources(settings)
    sizes = [text_bytes(source) for source in validation]
    held_out = None if None in sizes else sum(filter(None, sizes))
    elsewhere = section.path is None and start_from is not None
    if elsewhere or any(source.spec.weight is not None for source in sources):
        return None, held_out
    first = [_first_items(source) for source in sources]
    if section.path:
        tokenizer, _ = ready_tokenizer(tokenizer_settings)
    else:
        texts = map(text_of, chain.from_iterable(items for items, _ in first))
        assert section.vocab_size is not None
        tokenizer = train_bpe(texts, vocab_size=section.vocab_size, split_pattern=section.split_pattern)
    tokens = 0.0
    for source, (items, share) in zip(sources, first, strict=True):
        if share is None:
            return None, held_out
        tokens += _count_tokens(items, tokenizer, settings) / share * (source.spec.epochs or 1.0)
    return tokens * epochs, held_out


def _first_items(source: OpenSource) -> tuple[list[Any], float | None]:
    """Return the source's first documents or conversations, and the share of it that they are."""
    items, size = list[Any](), 0
    for item in chain.from_iterable(block.items for block in source.read()):
        if size >= COUNTED_BYTES:
            whole = text_bytes(source)
            return items, min(1.0, size / whole) if whole else None
        items.append(item)
        content = item.text if source.kind == "text" else json.dumps(item.messages, ensure_ascii=False)
        size += len(content.encode())
    return items, 1.0


def _count_tokens(items: list[Any], tokenizer: Any, settings: SourceSettings) -> int:
    """Return the tokens of documents, each with its BOS, or of conversations, which are cut to a row; padding of rows
    of one each too."""
    row_tokens = settings.data.row_tokens
    if settings.kind == "chat":
        rendered = [talk for talk in rendered_talks(tokenizer, items) if not isinstance(talk, DataError)]
        if settings.data.one_text_rows:
            return len(rendered) * row_tokens
        return sum(min(len(ids), row_tokens + 1) for ids, _ in rendered)
    encoded = plain_backend(tokenizer).encode_batch([item.text for item in items], add_special_tokens=False)
    return sum(len(encoding.ids) + 1 for encoding in encoded)
