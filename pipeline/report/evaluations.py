"""Evaluations by command that are neither bits per byte nor benchmarks."""

from pipeline.report.run_data import RunData
from pipeline.report.tables import number, table


def other_results_text(data: RunData) -> str:
    rows = [[name, step, number(value, 6), of] for name, step, value, of in data.other_results()]
    return table(["metric", "step", "value", "of"], rows) if rows else ""
