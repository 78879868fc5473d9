"""Curves of one run and of several, as a PNG."""

import io
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from PIL import Image

from pipeline.report.aligned import COMPARED_AXES, COMPARED_BPB, curves_of, legends, one_protocol
from pipeline.report.comparison import drawn, loss_of_all
from pipeline.report.curves import AXES, COLOURS, Panel, drawable, look, thin
from pipeline.report.plots import MARKS
from pipeline.report.run_data import RunData

# The panels as one static picture: for Markdown, the model card, print, and browsers without scripts.

COLUMNS = 2
DOTS_PER_INCH = 110


def picture(panels: list[Panel], *, title: str) -> bytes:
    """Return a PNG of all panels over the optimizer steps."""
    rows = -(-len(panels) // COLUMNS)
    with matplotlib.rc_context({"text.usetex": False, "font.size": 8}):
        height = 2.6 * rows + 0.4
        whole = Figure(figsize=(10, height), dpi=DOTS_PER_INCH)
        # Margins by hand, in inches: working them out costs matplotlib as much as drawing.
        whole.subplots_adjust(0.07, 0.5 / height, 0.98, 1 - 0.6 / height, wspace=0.2, hspace=0.45)
        whole.suptitle(plain(title[:80]), y=1 - 0.2 / height)
        for n, panel in enumerate(panels):
            _draw(panel, whole.add_subplot(rows, COLUMNS, n + 1))
        file = io.BytesIO()
        FigureCanvasAgg(whole).print_png(file, metadata={"Software": None})
    return file.getvalue()


def plain(text: str) -> str:
    """Return the text without formulas in it."""
    return text.replace("$", "\\$")


def _draw(panel: Panel, axes) -> None:
    axes.set_title(panel.title, fontsize=9)
    for kind, x in panel.marks.items():
        for step in x["step"]:
            axes.axvline(step, color=MARKS[kind], alpha=0.4, linestyle=":", linewidth=0.8)
    for curve in panel.curves:
        colour, dash = look(curve.place)
        axes.plot(
            curve.x["step"],
            drawable(curve.y),
            color=colour,
            alpha=0.4 if curve.style == "light" else 1,
            linestyle="dashed" if curve.style == "level" else dash,
            marker="o" if curve.style == "points" else None,
            markersize=3,
            linewidth=1.1,
            label=plain(curve.name).removeprefix("_"),  # matplotlib hides what begins with one
        )
    if panel.log:
        axes.set_yscale("log")
    axes.set_xlabel(AXES["step"])
    axes.set_ylabel(panel.unit)
    axes.grid(alpha=0.3)
    axes.ticklabel_format(style="plain", axis="x", useOffset=False)
    axes.legend(fontsize=7, framealpha=0.6)


# The runs' curves as a PNG file: the training loss over every axis, and bits per byte.

POINTS = 800  # of a curve: more than a panel is wide
SHADES = 10


def comparison_picture(runs: Sequence[RunData]) -> bytes | None:
    """Return the picture; None when no two points of any run could be drawn."""
    runs = drawn(runs)
    loss = loss_of_all(runs)
    panels = [(x, loss) for x in COMPARED_AXES]
    panels += [("tokens", name) for name in COMPARED_BPB if one_protocol(runs, name)]
    found = [(x, name, curves_of(runs, x, name)) for x, name in panels]
    found = [panel for panel in found if any(len(xs) > 1 for xs, _ in panel[2].values())]
    if not found:
        return None
    rows, columns = (len(found) + 1) // 2, min(len(found), 2)
    figure = Figure(figsize=(11, 4 * rows + 0.3 * len(runs)), dpi=100, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    looks = {label: look(place) for place, label in enumerate(legends(runs))}
    lines = {}
    for n, (x, name, curves) in enumerate(found, 1):
        axes = figure.add_subplot(rows, columns, n)
        for label, curve in curves.items():
            colour, dash = looks[label]
            marker = "." if len(curve[0]) < 50 else ""
            steps, values = thin(*curve, POINTS)
            (lines[label],) = axes.plot(
                steps, drawable(values), color=colour, linestyle=dash, linewidth=1.2, marker=marker
            )
        axes.set(xlabel=COMPARED_AXES[x], ylabel=name or "train/loss or train/loss_ema, as each run has it")
        if x in ("tokens", "flops"):
            axes.xaxis.set_major_formatter(EngFormatter())
        axes.grid(alpha=0.3)
    figure.legend(lines.values(), map(plain, lines), loc="outside upper left", fontsize=9)
    canvas.draw()
    file = io.BytesIO()
    # Noisy curves of many runs are a megabyte in full colour, a quarter of that in the few colours that are in them.
    drawing = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    drawing.quantize(palette=_shades(), dither=Image.Dither.NONE).save(file, "png", optimize=True)
    return file.getvalue()


def _shades() -> Image.Image:
    """Return the curves' colours and black, each in steps to white."""
    full = np.array([to_rgb(colour) for colour in (*COLOURS, "black")])
    strengths = np.linspace(0, 1, SHADES)[:, None, None]
    shades = Image.new("P", (1, 1))
    shades.putpalette((255 * (1 - strengths * (1 - full))).round().astype(np.uint8).tobytes())
    return shades
