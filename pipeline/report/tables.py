"""Markdown tables, numbers for people, and a curve as an SVG file."""

import datetime
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table. None becomes a dash; no text inside a cell can break it."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell(value) for value in line) + " |" for line in lines) + "\n"


def filled_table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """The table without the columns that are None in every row; "" without rows."""
    kept = [n for n in range(len(head)) if any(row[n] is not None for row in rows)]
    return table([head[n] for n in kept], [[row[n] for n in kept] for row in rows]) if rows else ""


def cell(value: Any) -> str:
    if value is None:
        return "-"
    text = (
        str(value)
        .replace("\\", "\\\\")
        .replace("|", "\\|")
        .replace("<", "&lt;")
        .replace("\r", " ")
        .replace("\n", "<br>")
    )
    # Control characters, which an untrained byte-level model writes, are shown by their code.
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda match: f"\\\\x{ord(match[0]):02x}", text)


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


def svg_curves(curves: Mapping[str, Sequence[tuple[float, float]]], *, title: str, x_name: str) -> str:
    """Curves over one x axis as an SVG picture; every curve has its points as (x, y)."""
    width, height, left, top, bottom = 720, 320, 60, 30, 40
    points = [point for curve in curves.values() for point in curve]
    (x0, x1), (y0, y1) = ((min(axis), max(axis)) for axis in zip(*points, strict=True))
    x1, y1 = (x1 if x1 > x0 else x0 + 1), (y1 if y1 > y0 else y0 + 1)

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x = left + (point[0] - x0) / (x1 - x0) * (width - left - 20)
        return x, height - bottom - (point[1] - y0) / (y1 - y0) * (height - top - bottom)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/><text x="{left}" y="18">{escape(title)}</text>',
        f'<text x="{width - 20}" y="{height - 8}" text-anchor="end">{escape(x_name)}</text>',
    ]
    for i in range(5):
        y_value, x_value = y0 + (y1 - y0) * i / 4, x0 + (x1 - x0) * i / 4
        x, y = place((x_value, y_value))
        parts.append(f'<line x1="{left}" x2="{width - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{y_value:.3g}</text>')
        parts.append(f'<text x="{x:.1f}" y="{height - bottom + 16}" text-anchor="middle">{x_value:,.0f}</text>')
    colors = ["#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e"]
    for i, (name, curve) in enumerate(curves.items()):
        color = colors[i % len(colors)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, curve))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        parts.append(
            f'<text x="{width - 24}" y="{top + 14 * i}" text-anchor="end" fill="{color}">{escape(name)}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"
