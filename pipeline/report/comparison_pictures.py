"""The runs' curves as a PNG file: the training loss over every axis, and bits per byte."""

from collections.abc import Sequence
from pathlib import Path

from pipeline.artifacts.errors import InputMissingError
from pipeline.report.aligned import AXES, COMPARED_BPB, curves_of, legends, one_protocol
from pipeline.report.run_data import RunData


def draw(runs: Sequence[RunData], path: Path) -> bool:
    """Write the picture; False when no two points of any run could be drawn.

    Raises InputMissingError without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise InputMissingError(
            f"{path}: pictures are drawn by matplotlib, which is not installed. pip install matplotlib, or leave --output out."
        ) from None
    panels: list[tuple[str, str | None]] = [(x, None) for x in AXES]
    panels += [("tokens", name) for name in COMPARED_BPB if one_protocol(runs, name)]
    drawn = [(x, name, curves_of(runs, x, name)) for x, name in panels]
    drawn = [panel for panel in drawn if any(len(curve) > 1 for curve in panel[2].values())]
    if not drawn:
        return False
    rows, columns = (len(drawn) + 1) // 2, min(len(drawn), 2)
    figure = Figure(figsize=(11, 4 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    colors = {label: f"C{n % 10}" for n, label in enumerate(legends(runs))}
    for n, (x, name, curves) in enumerate(drawn, 1):
        axes = figure.add_subplot(rows, columns, n)
        for label, points in curves.items():
            marker = "." if name or len(points) == 1 else ""
            axes.plot(*zip(*points, strict=True), color=colors[label], label=label, linewidth=1.2, marker=marker)
        axes.set(xlabel=AXES[x], ylabel=name or " or ".join(sorted({data.loss_name() for data in runs})))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return True
