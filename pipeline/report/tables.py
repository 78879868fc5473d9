"""Markdown tables, and numbers for people."""

import datetime
import re
from collections.abc import Sequence
from typing import Any

# Control characters but tab and newline, and Unicode's marks of direction.
HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table. None becomes a dash; no text inside a cell can break it."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell(value) for value in line) + " |" for line in lines) + "\n"


def filled_table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """The table without the columns that are None in every row; "" without rows."""
    kept = [n for n in range(len(head)) if any(row[n] is not None for row in rows)]
    return table([head[n] for n in kept], [[row[n] for n in kept] for row in rows]) if rows else ""


def cell(value: Any) -> str:
    """The value as text that means itself: neither Markdown nor HTML in it is taken for such."""
    if value is None:
        return "-"
    text = (
        str(value)
        .replace("\\", "\\\\")
        .replace("&", "&amp;")
        .replace("<", "&lt;")
        .replace("|", "\\|")
        .replace("](", "]\\(")
        .replace("\r", " ")
        .replace("\n", "<br>")
    )
    text = re.sub(r"[*`~]|(?<![A-Za-z0-9_])_", r"\\\g<0>", text)
    return visible(text, backslash="\\\\")


def visible(text: str, *, backslash: str = "\\") -> str:
    """The text with characters that are not seen shown by their code.

    An untrained byte-level model writes control characters, and marks of direction turn around what stands after them.
    """
    return HIDDEN.sub(
        lambda match: backslash + (f"x{code:02x}" if (code := ord(match[0])) < 256 else f"u{code:04x}"), text
    )


def code(text: str, language: str = "") -> str:
    """A fenced block whose fence is longer than any in the text."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text.rstrip()}\n{fence}\n"


def number(value: float | int | None, digits: int = 4) -> str | None:
    """An integer with thousands marked, another number to `digits` significant digits; None stays None."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:,.{digits}g}" if abs(value) < 1e4 else f"{value:,.0f}"


def percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.2f} %"


def date(value: Any) -> Any:
    """Seconds since 1970 as an ISO date in UTC; anything else as it is."""
    if not isinstance(value, (int, float)):
        return value
    return datetime.datetime.fromtimestamp(value, datetime.UTC).isoformat(timespec="seconds")


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """At most `count` of the items, evenly spaced, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]
