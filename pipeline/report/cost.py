"""The cost of a run: time, device hours, money and energy, and the plan against the outcome."""

import statistics
from collections import Counter
from itertools import chain
from typing import Any

from pipeline.metrics import GIB
from pipeline.monitor.energy import energy_of, kwh, total_j
from pipeline.monitor.gpus import is_throttled
from pipeline.monitor.samples_file import NUMBERS, GpuSeries, read_gpus
from pipeline.process.storage import folder_bytes
from pipeline.report.markdown import facts_table, filled_table, joined, number, percent, table
from pipeline.report.run_data import RunData
from pipeline.run_dir.columns import mean_step_s


def cost_text(data: RunData) -> str:
    """Return runtime, device hours, cost, energy, goodput and tokens."""
    facts = [
        *spent(data),
        ["goodput, %", number(data.last("perf/goodput_pct"))],
        ["steps lost", number(data.last("perf/lost_steps"))],
        ["tokens (row positions)", number(data.tokens() or None)],
    ]
    return facts_table("cost", facts)


def spent(data: RunData) -> list[list[Any]]:
    """Return (name, value) of time, device hours, cost and energy; None for what is not known."""
    hours = device_hours(data)
    return [
        ["time running, all attempts", _hours(wall_s(data))],
        ["time in steps that count", _hours(data.last("perf/total_s"))],
        ["processes", number(data.fact("world_size")) if hours else None],
        ["device hours (time running x processes)", number(hours)],
        ["cost (device hours x run.gpu_hour_cost)", number(paid(data))],
        ["energy of the GPUs, kWh", number(data.last("perf/energy_kwh"))],
    ]


def wall_s(data: RunData) -> float | None:
    """Return the seconds from each attempt's start to its last sign of life, over all attempts."""
    return sum(last - began for _, began, last in data.running) or None


def device_hours(data: RunData) -> float | None:
    devices, running_s = data.fact("world_size"), wall_s(data)
    return devices * running_s / 3600 if devices and running_s else None


def paid(data: RunData) -> float | None:
    """Return run.gpu_hour_cost times the device hours of all attempts; None where either is not known."""
    price, hours = data.setting("run.gpu_hour_cost"), device_hours(data)
    return price * hours if price and hours else None


def _hours(seconds: float | None) -> str | None:
    if not seconds:
        return None
    return f"{seconds / 3600:.2f} h" if seconds >= 3600 else f"{seconds / 60:.2f} min"


def energy_text(data: RunData) -> str:
    """Return what gpu-<host>.csv says of load, heat, throttling and energy; "" where nobody sampled."""
    rows: list[list[Any]] = []
    joules: list[float | None] = []
    for path in data.run.all_gpu_samples():
        found = read_gpus(path)
        joules += [energy_of(gpu).best_j() for gpu in found]
        for index in sorted({gpu.index for gpu in found}):
            attempts = [gpu for gpu in found if gpu.index == index]
            rows.append([path.stem.removeprefix("gpu-"), index, *_of_gpu(attempts)])
    if not rows:
        return ""
    head = ["host", "GPU", "name", "power, W", "of its limit, %", "deg C", "busy, %", "memory, GiB", "SM clock, MHz"]
    head += ["throttled samples", "why"]
    facts: list[list[Any]] = []
    energy_j, tokens = total_j(joules), data.tokens()
    if energy_j is not None:
        facts.append(["energy of the GPUs, all attempts", f"{kwh(energy_j):.4g} kWh"])
        per_token = f"{number(energy_j / tokens)} J" if tokens else None
        facts.append(["energy per token, start and evaluations included", per_token])
    return joined(filled_table(head, rows), facts_table("energy", facts))


def _of_gpu(attempts: list[GpuSeries]) -> list[Any]:
    """Return the means over all attempts of a GPU, of temperature and memory the highest."""
    # A GPU that does not tell a number has no value of it, in any sample.
    means, highest = {}, {}
    for name in NUMBERS:
        values = list(chain.from_iterable(gpu.values(name) for gpu in attempts))
        if values:
            means[name] = f"{statistics.fmean(values):,.1f}"
            highest[name] = number(max(values))
    reasons = Counter[str]()
    for gpu in attempts:
        reasons.update(gpu.reasons)
    throttled = Counter({words: count for words, count in reasons.items() if is_throttled(words)})
    share = percent(throttled.total() / reasons.total()) if reasons else None
    row = [attempts[-1].name, means.get("power_w"), means.get("power_pct"), highest.get("temp_c")]
    row += [means.get("util_pct"), highest.get("mem_used_gib"), means.get("sm_clock_mhz")]
    return [*row, share, ", ".join(throttled) or None]


def plan_vs_actual_text(data: RunData) -> str:
    """Return a table of what was planned and what came, with their ratio; "" for a run without a plan."""
    plan = data.manifest.get("plan") or {}
    if not plan:
        return ""
    rows = []
    for name, unit, planned, actual in _compared(data, plan):
        if planned is not None or actual is not None:
            rows.append([name, _cell(planned, unit), _cell(actual, unit), _ratio(planned, actual)])
    sentences = []
    if "duration_source" in plan:
        sentences.append(f"Hours were planned {plan['duration_source']}.")
    if data.step() < (plan.get("steps") or 0):
        sentences.append("The run is not at its end: time and totals are those so far.")
    head = " ".join(sentences)
    return joined(f"{head}\n" if head else "", table(["", "planned", "found", "found / planned"], rows))


def _compared(data: RunData, plan: dict[str, Any]) -> list[tuple[str, str, Any, Any]]:
    """Return (name, unit, planned, actual); None where a side is not known."""
    # The plan counts a step without compilation, so the outcome leaves out each attempt's first interval.
    step_s, flops, tokens = mean_step_s(data.columns), data.fact("model.flops_per_token"), data.tokens()
    made_flops = flops * tokens if flops and tokens else None
    steps_s = None if step_s is None else step_s * data.step()
    memory = plan.get("process_bytes") or data.fact("plan.memory_bytes.total")
    whole = [size for _, size, sealed in data.checkpoints if sealed]
    disk = sum(size for _, size, _ in data.checkpoints)
    if data.run.model.is_dir():
        disk += folder_bytes(data.run.model)
    return [
        ("parameters", "", plan.get("parameters"), data.fact("model.parameters")),
        ("steps", "", plan.get("steps"), data.step() or None),
        ("tokens (row positions)", "", plan.get("tokens"), tokens or None),
        ("FLOPs, nanochat's formula", "", plan.get("flops"), made_flops),
        ("a step", "s", data.fact("plan.probe.step_s"), step_s),
        ("time in steps", "s", plan.get("training_s"), steps_s),
        ("wall time of all attempts", "s", data.fact("plan.duration_s.total.value"), wall_s(data)),
        ("memory of a process", "GiB", memory, _peak(data)),
        ("a checkpoint", "GiB", plan.get("checkpoint_bytes"), max(whole, default=None)),
        ("disk of checkpoints and model", "GiB", plan.get("run_disk_bytes"), disk or None),
        ("cost", "", plan.get("cost"), paid(data)),
        ("energy", "kWh", plan.get("energy_kwh"), data.last("perf/energy_kwh")),
    ]


def _peak(data: RunData) -> float | None:
    """Return the most memory of the device, else of the host, in bytes."""
    recorded = data.manifest.get("peak_memory_bytes") or {}
    if "device" in recorded or "host" in recorded:
        return recorded.get("device", recorded.get("host"))
    for name in ("mem/run_peak_allocated_gib", "mem/peak_allocated_gib", "mem/host_rss_gib"):
        if data.last(name) is not None:
            return data.curve(name)[1].max().item() * GIB
    return None


def _cell(value: Any, unit: str) -> str | None:
    if value is None:
        return None
    if unit == "GiB":
        return f"{value / GIB:,.3f} GiB"
    if unit == "s":
        return f"{value:,.3f} s" if value < 600 else f"{value / 3600:,.3f} h"
    text = number(value, 6) if isinstance(value, int) or value < 1e9 else f"{value:.6e}"
    return f"{text} {unit}".strip()


def _ratio(planned: Any, actual: Any) -> str | None:
    if not planned or actual is None:
        return None
    return "exact" if planned == actual else f"{actual / planned:.3f}"
