"""Ids to text while they arrive: a character of several tokens is shown when its last byte is there."""

import re

UNFINISHED = "\ufffd"  # What a byte sequence decodes to that does not end as a character.


# C0 and C1 but tab and line feed: they move the cursor, set the title, write the clipboard. Then what turns the order of
# characters on the screen.
CONTROL = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u202a-\\u202e\\u2066-\\u2069]")


def terminal_text(text: str) -> str:
    """Return the text for a terminal: its control characters written as escapes, \\x1b for ESC."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


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
