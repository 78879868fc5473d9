"""Markdown of reports and cards: tables, blocks and numbers, in which no text of a run can change the layout."""

import datetime
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

# Control characters but tab and newline, and Unicode's marks of direction.
HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


# In this order: what stands for a character may hold those before it.
CELL_TEXTS = (
    ("\\", "\\\\"),
    ("&", "&amp;"),
    ("<", "&lt;"),
    ("|", "\\|"),
    ("](", "]\\("),
    ("\r", " "),
    ("\n", "<br>"),
)


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table, "" without rows. None becomes a dash; no text inside a cell can break it."""
    if not rows:
        return ""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(cell, line))} |\n" for line in lines)


def filled_table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return the table without the columns that are None in every row; "" without rows."""
    columns = zip(head, *rows, strict=True)
    kept = [column for column in columns if any(value is not None for value in column[1:])]
    if not kept:
        return ""
    head, *rows = zip(*kept, strict=True)
    return table(head, rows)


def facts_table(what: str, facts: Sequence[Sequence[Any]]) -> str:
    """Return the table of (name, value), without those that are not known; "" when none is."""
    return table([what, "value"], [fact for fact in facts if fact[1] is not None])


def joined(*parts: str) -> str:
    """Return the parts that say something, a blank line between them."""
    return "\n".join(filter(None, parts))


def titled(title: str, text: str) -> str:
    """Return the text under a title of a section's part; "" where there is no text."""
    return f"### {title}\n\n{text}" if text else ""


def lines_of(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def cell(value: Any) -> str:
    """Return the value as text that means itself: neither Markdown nor HTML in it is taken for such."""
    if value is None:
        return "-"
    text = str(value)
    for bare, shown in CELL_TEXTS:
        text = text.replace(bare, shown)
    text = re.sub(r"[*`~]|(?<![A-Za-z0-9_])_", r"\\\g<0>", text)
    return visible(text, backslash="\\\\")


def visible(text: str, *, backslash: str = "\\") -> str:
    """Return the text with characters that are not seen shown by their code.

    An untrained byte-level model writes control characters, and marks of direction turn around what follows them.
    """

    def escaped(match: re.Match[str]) -> str:
        point = ord(match[0])
        return f"{backslash}x{point:02x}" if point < 256 else f"{backslash}u{point:04x}"

    return HIDDEN.sub(escaped, text)


def code(text: str, language: str = "") -> str:
    """Return a fenced block whose fence is longer than any in the text."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text.rstrip()}\n{fence}\n"


def number(value: float | int | None, digits: int = 4) -> str | None:
    """Return an integer with thousands marked, another number to `digits` significant digits; None stays None."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:,.{digits}g}" if abs(value) < 1e4 else f"{value:,.0f}"


def fixed(value: float | None, digits: int = 4) -> str | None:
    """Return the number with so many digits after the point; None stays None."""
    return None if value is None else f"{value:.{digits}f}"


def percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.2f} %"


def date(value: Any) -> Any:
    """Return seconds since 1970 as an ISO date in UTC; anything else as it is."""
    if not isinstance(value, (int, float)):
        return value
    return datetime.datetime.fromtimestamp(value, datetime.UTC).isoformat(timespec="seconds")


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """Return at most `count` of the items, evenly spaced, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    places = np.arange(count) * (len(items) - 1) / (count - 1)
    return [items[place] for place in places.round().astype(int)]
