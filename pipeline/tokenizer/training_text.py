"""The characters that a tokenizer is trained on: a bounded share of every source."""

from collections.abc import Iterator


def training_texts(sources: list, *, total_chars: int, document_chars: int) -> Iterator[str]:
    """Texts of the sources, each cut to document_chars, until total_chars are given or all sources end.

    Sources take turns block by block such that their shares of characters follow their weights (1 where none is given).
    The order depends on nothing but the sources: the same text comes in every process.
    """
    open_blocks = {number: source.read() for number, source in enumerate(sources)}
    taken = dict.fromkeys(open_blocks, 0.0)
    left = total_chars
    while open_blocks and left > 0:
        number = min(open_blocks, key=lambda n: (taken[n] / (sources[n].spec.weight or 1.0), n))
        block = next(open_blocks[number], None)
        if block is None:
            del open_blocks[number]
            continue
        for item in block.items:
            text = text_of(item)[: min(document_chars, left)]
            if text:
                yield text
            taken[number] += len(text)
            left -= len(text)
            if left <= 0:
                return


def text_of(item) -> str:
    """A document's text; of a conversation what its messages say, a line each."""
    if hasattr(item, "text"):
        return item.text
    contents = [message.get("content") for message in item.messages]
    return "\n".join(content for content in contents if isinstance(content, str))
