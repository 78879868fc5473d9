"""The panels as one static picture: for Markdown, the model card, print, and browsers without scripts."""

import io

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pipeline.report.curves import AXES, Panel, drawable
from pipeline.report.palette import look
from pipeline.report.plots import MARKS

COLUMNS = 2
DOTS_PER_INCH = 110


def picture(panels: list[Panel], *, title: str) -> bytes:
    """A PNG of all panels over the optimizer steps."""
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
    """The text without formulas in it."""
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
