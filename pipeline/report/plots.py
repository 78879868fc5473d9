"""The panels as interactive plots: zoom, one x range and one cursor for all. Bokeh draws; its script comes out of its package."""

import base64
import gzip
import json
from dataclasses import dataclass
from functools import cache

import numpy as np
from bokeh.document import Document
from bokeh.model import Model
from bokeh.models import ColumnDataSource, CrosshairTool, DataRange1d, NumeralTickFormatter, Range1d
from bokeh.models.annotations import Span
from bokeh.plotting import figure
from bokeh.resources import Resources

from pipeline.report.curves import Panel, look

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
    """labels: of the x axes by name. The first is what is drawn over at first: every curve has it."""
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
    """BokehJS without widgets or tables, as base64 of its gzip: a third of its size."""
    (script,) = Resources(mode="inline", components=["bokeh"]).js_raw[:1]
    return base64.b64encode(gzip.compress(script.encode(), 9, mtime=0)).decode()


def _axes(panels: list[Panel], labels: dict[str, str]) -> list[dict]:
    curves = [curve for panel in panels for curve in panel.curves]
    names = dict.fromkeys(curve.name for curve in curves)
    found = []
    for axis, label in labels.items():
        having = [curve for curve in curves if axis in curve.x]
        if having:
            low, high = min(np.nanmin(c.x[axis]) for c in having), max(np.nanmax(c.x[axis]) for c in having)
            margin = 0.01 * (high - low) or 1.0
            absent = [name for name in names if name not in {curve.name for curve in having}]
            span = [float(low - margin), float(high + margin)]
            found.append({"name": axis, "label": label, "range": span, "absent": absent})
    return found


def _plot(panel: Panel, x_range: Range1d, cursor: Span, axes: list[dict]) -> Model:
    plot = figure(
        height=HEIGHT if panel.section else FIRST_HEIGHT,
        sizing_mode="stretch_width",
        x_range=x_range,
        y_range=DataRange1d(only_visible=True),  # a curve that is switched off gives its room to the others
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
    plot.xaxis.axis_label = None  # the page says over what all are drawn
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    for axis in plot.axis:
        axis.major_label_text_color = axis.axis_label_text_color = INK
        axis.axis_line_color = axis.major_tick_line_color = axis.minor_tick_line_color = INK
        axis.axis_label_text_font_style = "normal"
    plot.grid.grid_line_color, plot.grid.grid_line_alpha = INK, 0.25
    plot.xaxis.formatter = NumeralTickFormatter(format="0.[00]a")  # 1.5m, 20b
    for kind, x in panel.marks.items():
        if len(x["step"]):
            source = ColumnDataSource({name: _compact(x[name]) for name in (a["name"] for a in axes)})
            plot.vspan(x=axes[0]["name"], source=source, line_color=MARKS[kind], line_alpha=0.5, line_dash="dashed")
    for curve in panel.curves:
        colour, dash = look(curve.place)
        source = ColumnDataSource({name: _compact(x) for name, x in curve.x.items()} | {"y": _compact(curve.y)})
        how = {"x": axes[0]["name"], "y": "y", "source": source, "name": curve.name}
        line = plot.line(
            line_color=colour,
            line_width=1.5,
            line_alpha=0.55 if curve.style == "light" else 1,
            line_dash="dashed" if curve.style == "level" else dash,
            **how,
        )
        line.tags = [curve.style]
        if curve.style == "points":
            plot.scatter(size=6, fill_color=colour, line_color=colour, **how)
    plot.add_tools(CrosshairTool(overlay=cursor, dimensions="height", visible=False))
    return plot


def _compact(values: np.ndarray) -> np.ndarray:
    """Seven digits, four bytes: enough for the eye and for what is shown under the cursor."""
    return np.asarray(values, np.float32)
