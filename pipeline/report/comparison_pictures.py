"""The runs' curves as a PNG file: the training loss over every axis, and bits per byte."""

from collections.abc import Sequence
from pathlib import Path

from pipeline.report.aligned import AXES, COMPARED_BPB, curves_of, legends, one_protocol
from pipeline.report.run_data import RunData
from pipeline.report.tables import spread

POINTS = 4000  # of a curve: more than the picture is wide


def draw(runs: Sequence[RunData], path: Path) -> bool:
    """Write the picture; False when no two points of any run could be drawn."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    loss = _loss(runs)
    panels = [(x, loss) for x in AXES]
    panels += [("tokens", name) for name in COMPARED_BPB if one_protocol(runs, name)]
    drawn = [(x, name, curves_of(runs, x, name)) for x, name in panels]
    drawn = [panel for panel in drawn if any(len(curve) > 1 for curve in panel[2].values())]
    if not drawn:
        return False
    rows, columns = (len(drawn) + 1) // 2, min(len(drawn), 2)
    figure = Figure(figsize=(11, 4 * rows + 0.3 * len(runs)), layout="constrained")
    FigureCanvasAgg(figure)
    colors = {label: f"C{n % 10}" for n, label in enumerate(legends(runs))}
    lines = {}
    for n, (x, name, curves) in enumerate(drawn, 1):
        axes = figure.add_subplot(rows, columns, n)
        for label, points in curves.items():
            marker = "." if len(points) < 50 else ""
            xs, ys = zip(*spread(points, POINTS), strict=True)
            (lines[label],) = axes.plot(xs, ys, color=colors[label], linewidth=1.2, marker=marker)
        axes.set(xlabel=AXES[x], ylabel=name or "train/loss or train/loss_ema, as each run has it")
        if x in ("tokens", "flops"):
            axes.xaxis.set_major_formatter(EngFormatter())
        axes.grid(alpha=0.3)
    figure.legend(lines.values(), lines.keys(), loc="outside upper left", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return True


def _loss(runs: Sequence[RunData]) -> str | None:
    """The training loss that all runs have; None where they have not one of the same name."""
    return next((name for name in ("train/loss", "train/loss_ema") if all(data.series(name) for data in runs)), None)
