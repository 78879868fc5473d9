"""Plan against outcome: what the run promised at its start, what became of it, and the ratio of the two."""

from typing import Any

from pipeline.metrics import VAL_BPB
from pipeline.process.storage import folder_bytes
from pipeline.report.run_data import RunData, number, table
from pipeline.run_dir.columns import mean_step_s

GIB = 2**30


def outcome_text(data: RunData) -> str:
    """Return a table of what was planned and found, found / planned where both are known; "" for a run without a plan."""
    plan = data.manifest.get("plan") or {}
    if not plan:
        return ""
    rows = [
        [name, _cell(planned, unit), _cell(found, unit), _ratio(planned, found)]
        for name, unit, planned, found in _rows(data, plan)
        if planned is not None or found is not None
    ]
    return _how(data, plan) + table(["", "planned", "found", "found / planned"], rows)


def _rows(data: RunData, plan: dict[str, Any]) -> list[tuple[str, str, Any, Any]]:
    """(name, unit, planned, found); None where a side is not known."""
    model = data.manifest.get("model") or {}
    probe = plan.get("probe") or {}
    step_s, (device_b, host_b) = mean_step_s(data.columns), _peaks(data)
    in_steps = None if step_s is None else step_s * data.step()
    wall = wall_s(data)
    devices, price = plan.get("processes"), (data.recipe.get("run") or {}).get("gpu_hour_cost")
    paid = price * devices * wall / 3600 if price and devices and wall else None
    flops = model.get("flops_per_token")
    sealed = [size for _, size, whole in data.checkpoints if whole]
    disk = sum(size for _, size, _ in data.checkpoints) + (
        folder_bytes(data.run.model) if data.run.model.is_dir() else 0
    )
    bpb = plan.get("val_bpb") or {}
    rows: list[tuple[str, str, Any, Any]] = [
        ("parameters", "", plan.get("parameters"), model.get("parameters")),
        ("steps", "", plan.get("steps"), data.step() or None),
        ("tokens (row positions)", "", plan.get("tokens"), data.tokens() or None),
        ("FLOPs, nanochat's formula", "", plan.get("flops"), flops * data.tokens() if flops and data.tokens() else None),
        ("a step", "s", probe.get("step_s"), step_s),
        ("time in steps, without first intervals' compilation", "s", plan.get("training_s"), in_steps),
        ("time in steps, all of it", "s", None, data.last("perf/total_s")),
        ("wall time of all attempts, planned without preparing data", "s", ((plan.get("duration_s") or {}).get("total") or {}).get("value"), wall),
        ("memory of a process, as probed", "GiB", plan.get("process_bytes"), host_b if device_b is None else device_b),
        ("memory of a process, by arithmetic", "GiB", (plan.get("memory_bytes") or {}).get("total"), host_b if device_b is None and "process" in (plan.get("memory_bytes") or {}) else device_b),
        ("a checkpoint", "GiB", plan.get("checkpoint_bytes"), max(sealed, default=None)),
        ("disk of checkpoints and model: planned at the fullest, found now", "GiB", plan.get("run_disk_bytes"), disk or None),
        ("cost, by the wall", "", plan.get("cost"), paid),
        ("energy", "kWh", plan.get("energy_kwh"), data.last("perf/energy_kwh")),
        (f"final {VAL_BPB}", "", bpb.get("value"), data.last(VAL_BPB) if bpb else None),
    ]  # fmt: skip
    return rows


def _how(data: RunData, plan: dict[str, Any]) -> str:
    """Return what the plan's hours and BPB stand on, and what the comparison leaves out."""
    sentences = []
    if probe := plan.get("probe"):
        sentences.append(
            f"Hours and memory were planned from a probe of {probe['steps']} steps on this machine ({probe['low_s']:.3f} to {probe['high_s']:.3f} s each)."
        )
    elif "duration_source" in plan:
        sentences.append(f"Hours were planned {plan['duration_source']}.")
    elif "assumed_mfu" in plan:
        sentences.append(f"Hours were planned at {plan['assumed_mfu']:.0%} of the peak, an assumption.")
    if span := (plan.get("duration_s") or {}).get("total"):
        sentences.append(f"The whole was to take from {_cell(span['low'], 's')} to {_cell(span['high'], 's')}.")
    if bpb := plan.get("val_bpb"):
        sentences.append(
            f"By earlier runs ({bpb['fit']}) val/bpb was to lie from {bpb['low']:.4f} to {bpb['high']:.4f} (95 %)."
        )
    if data.step() < (plan.get("steps") or 0):
        sentences.append("The run is not at its end: time and totals are those so far.")
    if (shape := data.manifest.get("shape") or {}) and shape.get("device", plan.get("device")) != plan.get("device"):
        sentences.append(f"It was planned for {plan.get('device')} and last ran on {shape['device']}.")
    return " ".join(sentences) + "\n\n" if sentences else ""


def wall_s(data: RunData) -> float | None:
    """Return the seconds from each attempt's start to the last sign of it, over all attempts, evaluations and saves included."""
    return sum(last - began for _, began, last in data.running) or None


def _peaks(data: RunData) -> tuple[float | None, float | None]:
    """Return the most memory of the device and of the host, in bytes: as the end recorded it, else the most that was logged."""
    found = data.manifest.get("peak_memory_bytes") or {}

    def logged(name: str) -> float | None:
        return max((value * GIB for _, value in data.series(name)), default=None)

    return (
        found.get("device") or logged("mem/run_peak_allocated_gib") or logged("mem/peak_allocated_gib"),
        found.get("host") or logged("mem/host_rss_gib"),
    )


def _cell(value: Any, unit: str) -> str | None:
    if value is None:
        return None
    if unit == "GiB":
        return f"{value / GIB:,.3f} GiB"
    if unit == "s":
        return f"{value:,.3f} s" if value < 600 else f"{value / 3600:,.3f} h"
    text = number(value, 6) if isinstance(value, int) or value < 1e9 else f"{value:.6e}"
    return f"{text} {unit}".strip()


def _ratio(planned: Any, found: Any) -> str | None:
    if not planned or found is None:
        return None
    return "exact" if planned == found else f"{found / planned:.3f}"
