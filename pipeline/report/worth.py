"""Was it worth its cost: what the run took and what it reached. Facts only; the judgement is the reader's."""

from typing import Any

from pipeline.report.metadata import results_text
from pipeline.report.outcome import wall_s
from pipeline.report.run_data import RunData
from pipeline.report.tables import number, table


def worth_text(data: RunData) -> str:
    """Runtime, device hours, cost, energy, tokens, goodput, and the final numbers."""
    rows = spent(data)
    for name, what in (("perf/goodput_pct", "goodput, %"), ("perf/lost_steps", "steps lost")):
        if (value := data.last(name)) is not None:
            rows.append([what, number(value)])
    if data.tokens():
        rows.append(["tokens (row positions)", number(data.tokens())])
    facts = table(["what it took", "value"], rows) if rows else ""
    reached = results_text(data)
    return "\n".join(part for part in (facts, f"Final numbers:\n\n{reached}" if reached else "") if part)


def spent(data: RunData) -> list[list[Any]]:
    """(what, value) of time, device hours, cost and energy, as far as they are known."""
    running_s = wall_s(data)
    rows: list[list[Any]] = []
    if running_s:
        rows.append(["time running, all attempts", _hours(running_s)])
    if steps_s := data.last("perf/total_s"):
        rows.append(["time in steps that count", _hours(steps_s)])
    if running_s and (devices := data.manifest.get("world_size")):
        rows.append(["processes", number(devices)])
        rows.append(["device hours (time running x processes)", number(devices * running_s / 3600)])
        if price := (data.recipe.get("run") or {}).get("gpu_hour_cost"):
            rows.append(["cost (device hours x run.gpu_hour_cost)", number(price * devices * running_s / 3600)])
    if (energy := data.last("perf/energy_kwh")) is not None:
        rows.append(["energy of the GPUs, kWh", number(energy)])
    return rows


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.2f} h" if seconds >= 3600 else f"{seconds / 60:.2f} min"
