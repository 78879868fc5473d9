"""What the GPUs did and drew, from gpu-<host>.csv: load, heat, what held their clocks back, energy and its price."""

import statistics
from collections import Counter
from typing import Any

from pipeline.monitor.energy import EnergyMeter, energy_of, kwh, usual_period_s
from pipeline.monitor.gpu import is_throttled
from pipeline.monitor.samples import GpuSeries, read_gpus
from pipeline.report.run_data import RunData
from pipeline.report.tables import filled_table, number, percent, table


def energy_text(data: RunData) -> str:
    """Markdown; "" for a run whose GPUs nobody sampled."""
    rows: list[list[Any]] = []
    sampled: list[tuple[GpuSeries, EnergyMeter]] = []
    for path in data.run.all_gpu_samples():
        host = path.stem.removeprefix("gpu-")
        found = read_gpus(path)
        sampled += [(gpu, energy_of(gpu)) for gpu in found]
        for index in sorted({gpu.index for gpu in found}):
            rows.append([host, index, *_of_gpu([gpu for gpu in found if gpu.index == index])])
    if not sampled:
        return ""
    head = ["host", "GPU", "name", "power, mean and highest, W", "of its limit", "deg C, mean and highest", "busy", "memory, highest, GiB", "SM clock, mean, MHz", "throttled samples", "why"]  # fmt: skip
    return "\n".join([filled_table(head, rows), table(["what", "value"], _facts(data, sampled))])


def total_kwh(data: RunData) -> float | None:
    """Of all GPUs, hosts and attempts; None where nobody sampled, or one of them told no energy."""
    joules = [energy_of(gpu).best_j() for path in data.run.all_gpu_samples() for gpu in read_gpus(path)]
    known = [value for value in joules if value is not None]
    return kwh(sum(known)) if known and len(known) == len(joules) else None


def _of_gpu(attempts: list[GpuSeries]) -> list[Any]:
    told = {name: [v for gpu in attempts for v in gpu.told(name)] for name in attempts[0].numbers}
    reasons = sum((gpu.reasons for gpu in attempts), Counter[str]())
    held = Counter({words: count for words, count in reasons.items() if is_throttled(words)})
    return [
        attempts[-1].name,
        _mean_and_highest(told["power_w"]),
        _mean(told["power_pct"], " %"),
        _mean_and_highest(told["temp_c"]),
        _mean(told["util_pct"], " %"),
        number(max(told["mem_used_gib"], default=None)),
        _mean(told["sm_clock_mhz"]),
        percent(held.total() / reasons.total()) if reasons else None,
        ", ".join(f"{words} {percent(count / reasons.total())}" for words, count in held.most_common()) or None,
    ]


def _mean(values: list[float], unit: str = "") -> str | None:
    return f"{statistics.fmean(values):,.1f}{unit}" if values else None


def _mean_and_highest(values: list[float]) -> str | None:
    return f"{statistics.fmean(values):,.1f}, {max(values):,.1f}" if values else None


def _facts(data: RunData, sampled: list[tuple[GpuSeries, EnergyMeter]]) -> list[list[Any]]:
    rates = sorted({f"{rate:.3g}" for gpu, _ in sampled if (rate := _rate_hz(gpu)) is not None}, key=float)
    wanted = (data.recipe.get("monitor") or {}).get("gpu_hz")
    facts: list[list[Any]] = []
    if rates:
        reached = rates[0] if len(rates) == 1 else f"{rates[0]} to {rates[-1]}"
        facts.append(["samples of a GPU per second, reached", reached + (f", {wanted:g} asked for" if wanted else "")])
    hours = sum(gpu.times[-1] - gpu.times[0] for gpu, _ in sampled) / 3600
    facts.append(["GPU hours between first and last sample, all attempts", f"{hours:.4g}"])
    known = [(meter, joules) for _, meter in sampled if (joules := meter.best_j()) is not None]
    if len(known) < len(sampled):
        facts.append(["energy", f"not known: {len(sampled) - len(known)} of {len(sampled)} records have no power"])
    else:
        facts += _energy(data, [meter for meter, _ in known], sum(joules for _, joules in known))
    price = (data.recipe.get("run") or {}).get("gpu_hour_cost")
    if price is not None:
        facts.append(["cost at run.gpu_hour_cost", f"{price * hours:,.2f}"])
    return facts


def _energy(data: RunData, meters: list[EnergyMeter], joules: float) -> list[list[Any]]:
    counted = sum(meter.counted_j is not None for meter in meters)
    how = {0: "trapezoids over the sampled power", len(meters): "the GPUs' own counters"}.get(
        counted, "counters where there are, else trapezoids"
    )
    facts: list[list[Any]] = [["energy of the GPUs, all attempts", f"{kwh(joules):.4g} kWh, from {how}"]]
    both = [(meter.joules, meter.counted_j) for meter in meters if meter.counted_j and meter.covered_s]
    if both:
        integral, told = (sum(column) for column in zip(*both, strict=True))
        difference = f"{100 * (integral / told - 1):+.2f} %"
        facts.append(["trapezoids over the sampled power, against the counters", difference])
    gaps = sum(meter.gaps for meter in meters)
    if gaps:
        seconds = sum(meter.gap_s for meter in meters)
        facts.append(["gaps in the sampling, not bridged by trapezoids", f"{gaps}, {seconds:,.0f} s in all"])
    if data.tokens():
        facts.append(
            ["energy per token, start-up, evaluations and lost steps included", f"{number(joules / data.tokens())} J"]
        )
    while_training = [value for _, value in data.series("perf/energy_j_per_token")]
    if while_training:
        facts.append(["energy per token in steps, median", f"{number(statistics.median(while_training))} J"])
    return facts


def _rate_hz(gpu: GpuSeries) -> float | None:
    """Mean, in one attempt; the usual distance says nothing of samples that came late."""
    if usual_period_s(gpu.times) is None:
        return None
    return (len(gpu.times) - 1) / max(gpu.times[-1] - gpu.times[0], 1e-9)
