"""The panels as interactive plots: zoom, one x range and one cursor for all. Bokeh draws; its script comes out of its package."""

import base64
import gzip
import json
from dataclasses import dataclass

import numpy as np
from bokeh.document import Document
from bokeh.model import Model
from bokeh.models import ColumnDataSource, CrosshairTool, DataRange1d, HoverTool, NumeralTickFormatter, Range1d
from bokeh.models.annotations import Span
from bokeh.plotting import figure
from bokeh.resources import Resources

from pipeline.report.curves import AXES, Panel

# Colours that can be told apart by the colour-blind (Okabe and Ito 2008) and on white as on black.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f7f")
INK = "#808080"  # axes and grid: the page's background is light or dark
MARKS = {"restart": "#7f7f7f", "spike": "#d55e00", "not finite": "#d62728"}
HEIGHT = 260


@dataclass(frozen=True)
class Plots:
    """document, roots: what Bokeh's script draws, one root a panel. axes: name, label, range of each x axis."""

    document: str
    roots: list[str]
    axes: list[dict]


def plots_of(panels: list[Panel]) -> Plots:
    axes = _axes(panels)
    shared = Range1d(start=axes[0]["range"][0], end=axes[0]["range"][1])
    cursor = Span(dimension="height", line_color=INK, line_dash="dotted", line_width=1)
    document = Document()
    roots: list[Model] = [_plot(panel, shared, cursor, axes) for panel in panels]
    with document.models.freeze():  # else every root has all models collected anew
        for root in roots:
            document.add_root(root)
    text = json.dumps(document.to_json(deferred=False), separators=(",", ":"))
    return Plots(text, [root.id for root in roots], axes)


def bokeh_script() -> str:
    """BokehJS without widgets or tables, as base64 of its gzip: a third of its size."""
    (script,) = Resources(mode="inline", components=["bokeh"]).js_raw[:1]
    return base64.b64encode(gzip.compress(script.encode(), 9, mtime=0)).decode()


def _axes(panels: list[Panel]) -> list[dict]:
    """Those that every curve has."""
    curves = [curve for panel in panels for curve in panel.curves]
    found = []
    for name, label in AXES.items():
        if all(name in curve.x for curve in curves):
            low, high = min(c.x[name].min() for c in curves), max(c.x[name].max() for c in curves)
            margin = 0.01 * (high - low) or 1.0
            found.append({"name": name, "label": label, "range": [float(low - margin), float(high + margin)]})
    return found


def _plot(panel: Panel, x_range: Range1d, cursor: Span, axes: list[dict]) -> Model:
    plot = figure(
        height=HEIGHT,
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
        min_border_left=8,
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
    for n, curve in enumerate(panel.curves):
        colour = COLOURS[n % len(COLOURS)]
        source = ColumnDataSource({a["name"]: _compact(curve.x[a["name"]]) for a in axes} | {"y": _compact(curve.y)})
        how = {"x": axes[0]["name"], "y": "y", "source": source, "name": curve.name}
        line = plot.line(
            line_color=colour,
            line_width=1.5,
            line_alpha=0.4 if curve.style == "light" else 1,
            line_dash="dashed" if curve.style == "level" else "solid",
            **how,
        )
        if curve.style == "points":
            plot.scatter(size=6, fill_color=colour, line_color=colour, **how)
        if curve.style != "level":
            told = [(axis["name"], f"@{axis['name']}{{0,0.[00]}}") for axis in axes]
            tips = [("", "$name"), (panel.unit or "value", "@y{0.[000000]}"), *told]
            plot.add_tools(HoverTool(renderers=[line], tooltips=tips, mode="vline", visible=False))
    plot.add_tools(CrosshairTool(overlay=cursor, dimensions="height", visible=False))
    return plot


def _compact(values: np.ndarray) -> np.ndarray:
    """Seven digits, four bytes: enough for the eye and for what is shown under the cursor."""
    return np.asarray(values, np.float32)
