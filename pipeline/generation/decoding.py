"""Ids to text while they arrive: a character of several tokens is shown when its last byte is there."""

from pipeline.artifacts.errors import readable

UNFINISHED = "\ufffd"  # What a byte sequence decodes to that does not end as a character.


def terminal_text(text: str) -> str:
    """Return the text for a terminal: its control characters written as escapes, \\x1b for ESC."""
    return readable(text, most=len(text))


class TextStream:
    """`push(id)` gives the text that is certain since the last call, `rest()` what is left at the end.

    Control tokens give no text. `text` is all of it so far.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.shown = 0

    @property
    def text(self) -> str:
        return self.tokenizer.decode(self.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def push(self, token: int) -> str:
        self.ids.append(token)
        text = self.text
        # More bytes can only change the unfinished end.
        return self._show(text, len(text.rstrip(UNFINISHED)))

    def rest(self) -> str:
        text = self.text
        return self._show(text, len(text))

    def _show(self, text: str, end: int) -> str:
        new = text[self.shown : end]
        self.shown = max(self.shown, end)
        return new
