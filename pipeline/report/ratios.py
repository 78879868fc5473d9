"""Speed, memory and energy of runs as ratios to the first one."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.report.imports.imported_run import meaning_of
from pipeline.report.run_data import RunData
from pipeline.report.tables import number, table

# Medians leave the first logged interval of a run out, which holds compilation; peaks are of the whole run.
HOW = {
    "perf/tok_per_s": "median",
    "perf/tok_per_s_per_gpu": "median",
    "perf/step_s": "median",
    "perf/tflops_per_gpu": "median",
    "perf/mfu_pct": "median",
    "perf/bf16_mfu_pct": "median",
    "data/wait_s": "median",
    "perf/total_s": "last",
    "mem/allocated_gib": "median",
    "mem/peak_allocated_gib": "largest",
    "mem/run_peak_allocated_gib": "largest",
    "mem/reserved_gib": "largest",
    "mem/device_used_gib": "largest",
    "mem/host_rss_gib": "largest",
    "gpu/power_w": "median",
    "perf/energy_j_per_token": "last",
    "perf/energy_kwh": "last",
}


def ratios_text(runs: Sequence[RunData]) -> str:
    """A table of what at least two runs tell; no ratio where the same name is not the same number. "" when there is none."""
    rows: list[list[Any]] = []
    for name, how in HOW.items():
        values = [summary(data, name) for data in runs]
        if sum(value is not None for value in values) < 2:
            continue
        meanings = [meaning_of(data, name) for data in runs]
        cells = [
            f"{number(v)}{' *' if m else ''}" if v is not None else None for v, m in zip(values, meanings, strict=True)
        ]
        others = zip(values[1:], meanings[1:], strict=True)
        rows.append([name, how, *cells, *(_ratio(v, values[0], same=m == meanings[0]) for v, m in others)])
    if not rows:
        return ""
    head = ["", "of the run", *(data.name for data in runs), *(f"{data.name} / {runs[0].name}" for data in runs[1:])]
    marked = any(cell.endswith(" *") for row in rows for cell in row if isinstance(cell, str))
    return table(head, rows) + ("\n\\* another number by that name: see the imported logs below.\n" if marked else "")


def summary(data: RunData, name: str) -> float | None:
    """The run's one figure of a metric; None where it has none."""
    _, values = data.curve(name)
    if not len(values):
        return None
    if HOW[name] == "median":
        return float(np.median(values[1:] if len(values) > 1 else values))
    return values.max().item() if HOW[name] == "largest" else values[-1].item()


def _ratio(value: float | None, first: float | None, *, same: bool) -> str | None:
    return f"{value / first:.3f}" if value is not None and first and same else None
