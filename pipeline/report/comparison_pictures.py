"""The runs' curves as a PNG file: the training loss over every axis, and bits per byte."""

import io
from collections.abc import Sequence

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from PIL import Image

from pipeline.report.aligned import AXES, COMPARED_BPB, curves_of, legends, one_protocol
from pipeline.report.comparison_curves import drawn, loss_of_all
from pipeline.report.curves import drawable, thin
from pipeline.report.palette import COLOURS, look
from pipeline.report.picture import plain
from pipeline.report.run_data import RunData

POINTS = 800  # of a curve: more than a panel is wide
SHADES = 10


def comparison_picture(runs: Sequence[RunData]) -> bytes | None:
    """The picture; None when no two points of any run could be drawn."""
    runs = drawn(runs)
    loss = loss_of_all(runs)
    panels = [(x, loss) for x in AXES]
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
        axes.set(xlabel=AXES[x], ylabel=name or "train/loss or train/loss_ema, as each run has it")
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
    """The curves' colours and black, each in steps to white."""
    full = np.array([to_rgb(colour) for colour in (*COLOURS, "black")])
    strengths = np.linspace(0, 1, SHADES)[:, None, None]
    shades = Image.new("P", (1, 1))
    shades.putpalette((255 * (1 - strengths * (1 - full))).round().astype(np.uint8).tobytes())
    return shades
