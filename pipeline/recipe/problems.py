"""Mistakes of a recipe, collected so that the user reads all of them at once."""

import re
import unicodedata
from typing import Any

from pipeline.artifacts.errors import RecipeError

# Values that are secrets by their shape: tokens of the Hub, GitHub, W&B, model providers, and a password inside a URL.
SECRET_VALUE = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\bgh[opsu]_[A-Za-z0-9]{16,}|\bgithub_pat_\w{16,}|\bsk-[A-Za-z0-9_-]{20,}|\bwandb_v\d_\w{16,}|://[^/\s:@]+:[^/\s@]+@"
)
SECRET_NAME = re.compile(r"(^|_)(token|password|passwd|api_?key|secret|credentials?)$", re.IGNORECASE)


def lookalike(text: str) -> str:
    """Return `It holds U+0430 (CYRILLIC SMALL LETTER A). ` for the first character that no name of ours has; it may look like one that it has."""
    strange = next((c for c in text if not (c.isascii() and c.isprintable())), None)
    if strange is None:
        return ""
    name = unicodedata.name(strange, "a character without a name")
    return f"It holds U+{ord(strange):04X} ({name}). "


class Problems:
    """A list of `where: what is wrong. What to do.` lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, where: str, what: str) -> None:
        line = f"{where}: {what}"
        if line not in self.lines:
            self.lines.append(line)

    def raise_if_any(self) -> None:
        if self.lines:
            raise RecipeError("\n".join(sorted(self.lines, key=_by_place)))


def _by_place(line: str) -> tuple[str, int]:
    match = re.match(r"(.*?):(\d+): ", line)
    return (match[1], int(match[2])) if match else (line.split(": ")[0], 0)


def show(value: Any) -> str:
    """A value as a message may print it: short, and never a secret."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if SECRET_VALUE.search(text):
        return "(a secret)"
    text = text if len(text) <= 60 else text[:57] + "..."
    return repr(text) if isinstance(value, str) else text
