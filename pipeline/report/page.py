"""report.html, comparison.html: first screen, plots and folded sections in one file that opens without a network and
asks for nothing."""

import base64
import gzip
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import matplotlib
import numpy as np
from bokeh.document import Document
from bokeh.model import Model
from bokeh.models import ColumnDataSource, CrosshairTool, DataRange1d, NumeralTickFormatter, Range1d
from bokeh.models.annotations import Span
from bokeh.plotting import figure
from bokeh.resources import Resources
from markdown_it import MarkdownIt
from markdown_it.rules_inline import StateInline
from markupsafe import Markup
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from pipeline.report.curves import (
    FIRST_SCREEN,
    Curve,
    Panel,
    drawable,
)

if TYPE_CHECKING:
    from pipeline.report.summary import Summary


INK = "#808080"  # axes and grid: the page's background is light or dark
MARKS = {"restart": "#7f7f7f", "spike": "#d55e00", "not finite": "#d62728"}
HEIGHT, FIRST_HEIGHT = 260, 300


@dataclass(frozen=True)
class Plots:
    """document, roots: what Bokeh's script draws, one root a panel.

    axes: name, label, range of each x axis that any curve has, and the names that have no curve on it.
    """

    document: str
    roots: list[str]
    axes: list[dict]


def plots_of(panels: list[Panel], labels: dict[str, str]) -> Plots:
    """Return the plots of the panels. labels: of the x axes by name. The first is what is drawn over at first: every
    curve has it."""
    axes = _axes(panels, labels)
    shared = Range1d(start=axes[0]["range"][0], end=axes[0]["range"][1])
    cursor = Span(dimension="height", line_color=INK, line_dash="dotted", line_width=1)
    document = Document()
    roots: list[Model] = [_plot(panel, shared, cursor, axes) for panel in panels]
    with document.models.freeze():  # else every root has all models collected anew
        for root in roots:
            document.add_root(root)
    text = json.dumps(document.to_json(deferred=False), separators=(",", ":"))
    return Plots(text, [root.id for root in roots], axes)


@cache
def bokeh_script() -> str:
    """Return BokehJS without widgets or tables, as base64 of its gzip: a third of its size."""
    (script,) = Resources(mode="inline", components=["bokeh"]).js_raw[:1]
    return base64.b64encode(gzip.compress(script.encode(), 9, mtime=0)).decode()


def _axes(panels: list[Panel], labels: dict[str, str]) -> list[dict]:
    curves = curves_of(panels)
    found = []
    for axis, label in labels.items():
        having = [curve for curve in curves if axis in curve.x]
        if not having:
            continue
        places = np.concatenate([curve.x[axis] for curve in having])
        low, high = np.nanmin(places), np.nanmax(places)
        margin = 0.01 * (high - low) or 1.0
        drawn = {curve.name for curve in having}
        absent = [name for name in dict.fromkeys(curve.name for curve in curves) if name not in drawn]
        found.append(
            {"name": axis, "label": label, "range": [float(low - margin), float(high + margin)], "absent": absent}
        )
    return found


def _plot(panel: Panel, x_range: Range1d, cursor: Span, axes: list[dict]) -> Model:
    plot = figure(
        height=HEIGHT if panel.section else FIRST_HEIGHT,
        sizing_mode="stretch_width",
        x_range=x_range,
        y_range=DataRange1d(only_visible=True),  # a curve that is switched off gives its room to the others
        window_axis="x",  # what is zoomed to fills the height
        y_axis_type="log" if panel.log else "linear",
        tools="xbox_zoom,xpan,xwheel_zoom,reset,save",
        active_drag="xbox_zoom",
        active_scroll=None,
        toolbar_location="right",
        background_fill_alpha=0,
        border_fill_alpha=0,
        outline_line_alpha=0.3,
        outline_line_color=INK,
        min_border_left=60,  # the same in every plot, so that their axes lie above each other
        y_axis_label=panel.unit or None,
    )
    plot.tags = ["log"] if panel.log else []
    plot.xaxis.axis_label = None  # the page says over what all are drawn
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    for axis in plot.axis:
        axis.major_label_text_color = axis.axis_label_text_color = INK
        axis.axis_line_color = axis.major_tick_line_color = axis.minor_tick_line_color = INK
        axis.axis_label_text_font_style = "normal"
    plot.grid.grid_line_color = INK
    plot.grid.grid_line_alpha = 0.25
    plot.xaxis.formatter = NumeralTickFormatter(format="0.[00]a")  # 1.5m, 20b
    for kind, x in panel.marks.items():
        if len(x["step"]):
            source = ColumnDataSource({axis["name"]: _compact(x[axis["name"]]) for axis in axes})
            plot.vspan(x=axes[0]["name"], source=source, line_color=MARKS[kind], line_alpha=0.35, line_dash="dashed")
    for curve in panel.curves:
        # All axes are in the page: its script changes which of them is x.
        source = ColumnDataSource({name: _compact(x) for name, x in curve.x.items()} | {"y": _compact(curve.y)})
        how = {"x": axes[0]["name"], "y": "y", "source": source, "name": curve.name}
        line = plot.line(
            line_color=curve.colour,
            line_width=1 if curve.style == "thin" else 1.8,
            line_alpha=0.35 if curve.style == "points" else 1,  # nothing was measured between two evaluations
            line_dash=curve.dash,
            **how,
        )
        line.tags = [curve.style]
        if curve.style == "points":
            plot.scatter(size=7, fill_color=curve.colour, line_color=curve.colour, **how)
    plot.add_tools(CrosshairTool(overlay=cursor, dimensions="height", visible=False))
    return plot


def _compact(values: np.ndarray) -> np.ndarray:
    """Return the numbers in seven digits, four bytes: enough for the eye and for what is shown under the cursor."""
    return np.asarray(values, np.float32)


COLUMNS = 2
WIDTHS = {"thin": 0.6, "points": 0.4}
DOTS_PER_INCH = 110


def picture(
    panels: Sequence[tuple[str, Panel]], labels: dict[str, str], *, title: str, one_legend: bool = False
) -> bytes:
    """Return a PNG of the panels, each over its axis. labels: of the x axes. one_legend: a name means the same curve
    in all."""
    rows = -(-len(panels) // COLUMNS)
    # Names of runs may hold dollar signs and backslashes: no TeX.
    with matplotlib.rc_context({"text.usetex": False, "font.size": 8}):
        names = {curve.name for _, panel in panels for curve in panel.curves}
        listed = 0.2 * len(names) if one_legend else 0.0
        height = 2.6 * rows + 0.4 + listed
        whole = Figure(figsize=(10, height), dpi=DOTS_PER_INCH)
        # Margins by hand, in inches: working them out costs matplotlib as much as drawing.
        whole.subplots_adjust(0.07, 0.5 / height, 0.98, 1 - (0.6 + listed) / height, wspace=0.2, hspace=0.45)
        whole.suptitle(plain(title[:80]), y=1 - 0.2 / height)
        lines: dict[str, Any] = {}
        for n, (x, panel) in enumerate(panels):
            axes = whole.add_subplot(rows, COLUMNS, n + 1)
            axes.set_xlabel(labels[x])
            lines |= _draw(panel, axes, x, smooth=not one_legend)
            if not one_legend:
                axes.legend(fontsize=7, framealpha=0.6)
        if one_legend:
            whole.legend(lines.values(), lines, loc="upper left", bbox_to_anchor=(0.07, 1 - 0.3 / height))
        file = io.BytesIO()
        FigureCanvasAgg(whole).print_png(file, metadata={"Software": None})
    return file.getvalue()


def plain(text: str) -> str:
    """Return the text without formulas in it."""
    return text.replace("$", "\\$")


def _draw(panel: Panel, axes: Any, x: str, *, smooth: bool) -> dict[str, Any]:
    """Draw the curves that have a place on the axis; return their lines by name. smooth: in many shades, a megabyte
    for many runs."""
    axes.set_title(panel.title, fontsize=9)
    if panel.is_bars:
        names = [plain(curve.name) for curve in panel.curves]
        axes.barh(names, [curve.y[-1] for curve in panel.curves], color=[curve.colour for curve in panel.curves])
        axes.plot([curve.y[0] for curve in panel.curves], names, "|", color=INK, label="at first")
        axes.invert_yaxis()
        axes.set_xlabel(panel.unit)
        return {}
    for kind, places in panel.marks.items():
        for place in places[x]:
            axes.axvline(place, color=MARKS[kind], alpha=0.4, linestyle=":", linewidth=0.8)
    lines = {}
    for curve in panel.curves:
        name = plain(curve.name).removeprefix("_")  # matplotlib hides what begins with one
        (lines[name],) = axes.plot(
            curve.x.get(x, np.full(len(curve.y), np.nan)),
            drawable(curve.y),
            color=curve.colour,
            linestyle=curve.dash,
            marker="o" if curve.style == "points" else None,
            markersize=3,
            linewidth=WIDTHS.get(curve.style, 1.2),
            antialiased=smooth,
            label=name,
        )
    if panel.log:
        axes.set_yscale("log")
    axes.set_ylabel(panel.unit)
    axes.grid(alpha=0.3)
    if x in ("step", "tokens"):
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    return lines


SECTION_CHARS = 100_000
RELOAD_S = 5  # that a served page stands at least


def page(
    name: str,
    sections: dict[str, str],
    *,
    kind: str,
    panels: list[Panel],
    axes: dict[str, str],
    picture: bytes | None,
    summary: "Summary | None" = None,
    head: str = "",
    unfolded: tuple[str, ...] = (),
    one_legend: bool = False,
    version: str | None = None,
) -> str:
    """Return the whole page; sections longer than SECTION_CHARS are cut.

    kind: report or comparison, as the file beside it that holds the whole text is called. axes: labels of the x axes.
    summary, head: the first screen, of a run or in Markdown. unfolded: titles of sections that are open at first.
    one_legend: a name means the same curve in every panel, and is shown or hidden in all at once. version: of a page
    that is served (serve.py).
    """
    shown: dict[str, Any] = {
        "name": name,
        "kind": kind,
        "summary": summary,
        "head": Markup(html_of(head)),
        "unfolded": unfolded,
        "panels": [],
        "legend": [],
        "plots": None,
        "document": "null",
        "bokeh": "",
        "picture": base64.b64encode(picture or b"").decode(),
        "version": version,
        "RELOAD_S": RELOAD_S,
    }
    marks = set(chain.from_iterable(panel.marks for panel in panels))
    shown["marks"] = {mark: colour for mark, colour in MARKS.items() if mark in marks}
    if one_legend:
        shown["legend"] = _legend(curves_of(panels))
    plotted = [panel for panel in panels if not panel.is_bars]
    places = iter(range(len(plotted)))
    for panel in panels:
        shown["panels"].append(_panel(panel, None if panel.is_bars else next(places)))
    if plotted:
        plots = plots_of(plotted, axes)
        document = plots.document.replace("<", "\\u003c")  # no text in it can end the script
        shown |= {"plots": plots, "document": Markup(document), "bokeh": bokeh_script()}
    # Panels may be of a section that has no text; those of the first screen are above all sections.
    without_text = {panel.section: "" for panel in panels if panel.section not in (*sections, FIRST_SCREEN)}
    listed = []
    for title, text in (sections | without_text).items():
        listed.append(_section(title, html_of(_cut(text, rest=f"{kind}.md"))))
    return _environment().get_template("page.html.jinja").render(shown, sections=listed)


def curves_of(panels: Sequence[Panel]) -> list[Curve]:
    return [curve for panel in panels for curve in panel.curves]


def _panel(panel: Panel, place: int | None) -> dict[str, Any]:
    """Return what the template shows. place: among the plots; None where bars are drawn, by the page itself."""
    listed = []  # the curves in words, for who cannot see them
    for curve in panel.curves:
        if curve.style != "level":
            ends = f"from {curve.y[0]:.4g} to {curve.y[-1]:.4g}"
            listed.append(f"{curve.name} {ends}, lowest {curve.y.min():.4g}, highest {curve.y.max():.4g}")
    return {
        "section": panel.section,
        "title": panel.title,
        "place": place,
        "note": panel.note,
        "unit": panel.unit,
        "curves": _legend(panel.curves),
        "summary": "; ".join(listed),
        "bars": [] if place is not None else _bars(panel.curves),
    }


def _bars(curves: list[Curve]) -> list[dict[str, Any]]:
    """Return the first and the last value of each curve, with their lengths in percent of the longest."""
    most = max(np.abs(curve.y).max() for curve in curves) or 1.0
    found = []
    for curve in curves:
        ends = list(dict.fromkeys([curve.y[0], curve.y[-1]]))
        lengths = [100 * max(value, 0) / most for value in ends]
        text = " \u2192 ".join(f"{value:.4g}" for value in ends)
        found.append({"name": curve.name, "colour": curve.colour, "lengths": lengths, "text": text})
    return found


def _legend(curves: list[Curve]) -> list[dict[str, str]]:
    """Return each name once, in the order of the places."""
    found: dict[str, dict[str, str]] = {}
    for curve in sorted(curves, key=lambda curve: curve.place):
        shown = {"name": curve.name, "colour": curve.colour, "dash": curve.dash, "style": curve.style}
        found.setdefault(curve.name, shown)
    return list(found.values())


def _section(title: str, html: str) -> dict[str, Any]:
    name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    return {"title": title, "id": name, "html": Markup(html)}


def _cut(text: str, *, rest: str) -> str:
    """Return the beginning of a section that is too long for the page, with the file that has the rest."""
    if len(text) <= SECTION_CHARS:
        return text
    lines = text[:SECTION_CHARS].splitlines()[:-1]
    fences = [line for line in lines if line.startswith("```")]
    if len(fences) % 2:  # cut within a block, which is closed by a fence as long as the one that opens it
        lines.append(fences[-1].rstrip("abcdefghijklmnopqrstuvwxyz"))
    return "\n".join(lines) + f"\n\nThe rest is left out here for its length; {rest} has it whole.\n"


def html_of(markdown: str) -> str:
    """Return the Markdown as HTML. HTML in it stays text, pictures are not loaded, wide tables scroll inside their
    box."""
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
