"""report.html, comparison.html: first screen, plots and folded sections in one file that opens without a network and asks for nothing."""

import base64
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markdown_it import MarkdownIt
from markdown_it.rules_inline import StateInline
from markupsafe import Markup

from pipeline.report.curves import FIRST_SCREEN, Curve, Panel, look
from pipeline.report.plots import MARKS, bokeh_script, plots_of
from pipeline.report.summary import Summary

PAGE_BYTES = 2_000_000
MOST_PARTS = 8  # of a folded section, named beside its title
RELOAD_S = 5  # that a served page stands at least
CUT = "\n\nThe rest is left out here for its length; {} has it whole.\n"


def page(
    name: str,
    sections: dict[str, str],
    *,
    kind: str,
    panels: list[Panel],
    axes: dict[str, str],
    picture: bytes | None,
    summary: Summary | None = None,
    head: str = "",
    unfolded: tuple[str, ...] = (),
    one_legend: bool = False,
    version: str | None = None,
) -> str:
    """Return the whole page, at most PAGE_BYTES in UTF-8: the longest sections are cut where all of them would be more.

    kind: report or comparison, as the file beside it that holds the whole text is called. axes: labels of the x axes. summary,
    head: the first screen, of a run or in Markdown. unfolded: titles of sections that are open at first. one_legend: a name means
    the same curve in every panel, and is shown or hidden in all at once. version: of a page that is served (single.py).
    """
    plots = plots_of(panels, axes) if panels else None
    titles = [*sections, *(title for title in dict.fromkeys(p.section for p in panels) if title not in sections)]
    titles = [title for title in titles if title != FIRST_SCREEN]
    shown: dict[str, Any] = {
        "name": name,
        "kind": kind,
        "summary": summary,
        "head": Markup(html_of(head)),
        "unfolded": unfolded,
        "panels": [_panel(panel, place) for place, panel in enumerate(panels)],
        "legend": _legend([curve for panel in panels for curve in panel.curves]) if one_legend else [],
        "marks": {kind: colour for kind, colour in MARKS.items() if any(kind in panel.marks for panel in panels)},
        "plots": plots,
        "document": Markup((plots.document if plots else "null").replace("<", "\\u003c")),
        "bokeh": bokeh_script() if plots else "",
        "picture": base64.b64encode(picture).decode() if picture else "",
        "version": version,
        "RELOAD_S": RELOAD_S,
    }
    template = _environment().get_template("page.html.jinja")
    parts = {
        title: _parts(sections.get(title, ""), [p.title for p in panels if p.section == title]) for title in titles
    }
    empty = template.render(shown, sections=[_section(title, "", parts[title]) for title in titles])
    htmls = _fitted(sections, PAGE_BYTES - len(empty.encode(errors="backslashreplace")), cut=CUT.format(f"{kind}.md"))
    return template.render(shown, sections=[_section(title, htmls.get(title, ""), parts[title]) for title in titles])


def _panel(panel: Panel, place: int) -> dict[str, Any]:
    listed = "; ".join(
        f"{curve.name} from {curve.y[0]:.4g} to {curve.y[-1]:.4g}, lowest {curve.y.min():.4g}, highest {curve.y.max():.4g}"
        for curve in panel.curves
        if curve.style != "level"
    )
    return {
        "section": panel.section,
        "title": panel.title,
        "place": place,
        "note": panel.note,
        "curves": _legend(panel.curves),
        "summary": listed,
    }


def _legend(curves: list[Curve]) -> list[dict[str, str]]:
    """Return each name once, in the order of the places."""
    found: dict[str, dict[str, str]] = {}
    for curve in sorted(curves, key=lambda curve: curve.place):
        colour, dash = look(curve.place)
        dash = "dashed" if curve.style == "level" else dash
        found.setdefault(curve.name, {"name": curve.name, "colour": colour, "dash": dash, "style": curve.style})
    return list(found.values())


def _section(title: str, html: str, parts: Iterable[str] = ()) -> dict[str, Any]:
    """Return a section for the template. parts: what is shown beside the title while the section is folded."""
    name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    return {"title": title, "id": name, "html": Markup(html), "hint": ", ".join(dict.fromkeys(parts))}


def _parts(text: str, panels: list[str]) -> list[str]:
    """Return the titles of a section's plots and tables."""
    return [*panels, *re.findall(r"^### (.+)$", text, re.MULTILINE)][:MOST_PARTS]


def _fitted(sections: dict[str, str], room: int, *, cut: str) -> dict[str, str]:
    """Return every section as HTML. Where all do not fit, each one longer than its share is cut at a line."""
    htmls = {title: html_of(text) for title, text in sections.items()}
    sizes = {title: len(html.encode(errors="backslashreplace")) for title, html in htmls.items()}
    share = room
    while sum(min(size, share) for size in sizes.values()) > room:
        share = int(share * 0.9)
    for title, text in sections.items():
        lines = text.splitlines(keepends=True)
        while sizes[title] > share and lines:
            lines = lines[: int(len(lines) * min(0.9, share / sizes[title]))]
            htmls[title] = html_of("".join(lines) + _fence(lines) + cut)
            sizes[title] = len(htmls[title].encode(errors="backslashreplace"))
    return htmls


def _fence(lines: list[str]) -> str:
    """Return what closes a block of code that was cut."""
    opened = ""
    for line in lines:
        fence = re.match(r"`{3,}", line)
        if fence and not opened:
            opened = fence[0]
        elif opened and line.strip() == opened:
            opened = ""
    return f"\n{opened}\n" if opened else ""


def html_of(markdown: str) -> str:
    """Return the Markdown as HTML. HTML in it stays text, pictures are not loaded, wide tables scroll inside their box."""
    html = _markdown().render(markdown)
    # The section's own title is an h2, so its parts begin at h3 as they do in report.md.
    return html.replace("<table>", '<div class="wide" tabindex="0"><table>').replace("</table>", "</table></div>")


@cache
def _markdown() -> MarkdownIt:
    renderer = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
    renderer.inline.ruler.before("html_inline", "line_break", _line_break)
    return renderer


def _line_break(state: StateInline, silent: bool) -> bool:
    """Parse <br>, which a table's cell writes for a new line: a < of a text is never written bare."""
    if not state.src.startswith("<br>", state.pos):
        return False
    if not silent:
        state.push("hardbreak", "br", 0)
    state.pos += len("<br>")
    return True


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["markdown"] = lambda text: Markup(html_of(text))
    return environment
