"""How to read these numbers: what the names mean that are mistaken for one another, with the run's own figures."""

from pipeline.report.diagnosis.figures import Figures
from pipeline.report.diagnosis.robust import median
from pipeline.report.run_data import RunData
from pipeline.report.tables import number

# Narrow to wide: each level holds the one before it.
MEMORY = (
    ("mem/allocated_gib", "allocated", "tensors alive at the moment of logging, between two steps: weights, optimizer state, gradients"),
    ("mem/peak_allocated_gib", "peak allocated", "the most that was alive at any moment since the last log: activations and other tensors of a step are in it"),
    ("mem/reserved_gib", "reserved", "what torch holds of the device, free pieces that it keeps for the next step included"),
    ("mem/device_used_gib", "used on the device", "what the driver sees: reserved memory, CUDA's context, communication buffers, other processes"),
)  # fmt: skip


def reading_text(data: RunData) -> str:
    """A list in Markdown, "" when the run has none of these numbers."""
    figures = Figures(data)
    told = [_samples(figures), _memory(figures), _mfu(figures), _utilisation(figures), _memory_busy(figures)]
    return "".join(f"- {line}\n" for line in told if line)


def _samples(figures: Figures) -> str | None:
    """A sample is a row; how many positions and targets that are."""
    samples, row, step = figures.last("data/samples"), figures.recipe("data.row_tokens"), figures.step()
    batch = figures.manifest("inputs.batch_tokens") or figures.recipe("data.batch_tokens")
    if not samples or not row:
        return None
    text = f"**A sample is a row of {row:,} positions, not a token.** {samples:,.0f} samples x {row:,} positions = {samples * row:,.0f} tokens"
    if step and batch:
        text += f", which is {step:,} steps x {batch:,} positions a step"
    targets = figures.last("data/tokens")
    if targets and targets < samples * row:
        text += f"; {targets:,.0f} of them were trained on (padding and, in SFT, what the assistant did not write are no targets)"
    return f"{text}. A document may fill several rows, and a row may hold several documents."


def _memory(figures: Figures) -> str | None:
    levels = [(name, what, figures.last(key)) for key, name, what in MEMORY]
    known = [(name, what, gib) for name, what, gib in levels if gib is not None]
    if not known:
        return None
    text = "**Memory has four levels**: " + "; ".join(f"{name} {gib:.2f} GiB ({what})" for name, what, gib in known)
    allocated, run_peak = figures.last("mem/allocated_gib"), figures.last("mem/run_peak_allocated_gib")
    peak = figures.last("mem/peak_allocated_gib") or run_peak
    if run_peak is not None:
        text += f"; the highest peak of the run {run_peak:.2f} GiB"
    if allocated is not None and peak is not None:
        text += f". The peak does not show in the allocated memory because that is looked at between two steps: {peak - allocated:.2f} GiB came and went within a step"
    return f"{text}. What decides whether a larger batch fits is the peak against the device's memory."


def _mfu(figures: Figures) -> str | None:
    exact, nanochat = figures.timed("perf/mfu_pct").values, figures.timed("perf/bf16_mfu_pct").values
    rate = figures.timed("perf/tflops_per_gpu").values
    if not exact.size and not nanochat.size:
        return None
    device, dtype = figures.manifest("shape.device"), figures.manifest("shape.dtype")
    text = "**MFU** is the model's FLOP/s over the dense peak (without sparsity) of the device"
    if exact.size:
        text += f"; perf/mfu_pct, median {median(exact):.1f} %: exact matmuls, causal attention counted once, over the peak of {dtype or 'the compute dtype'}"
        if rate.size and median(exact) > 0:
            peak = 100 * median(rate) / median(exact)
            text += f" ({median(rate):.3g} of {number(round(peak, 1))} TFLOP/s" + (f", {device})" if device else ")")
    if nanochat.size:
        text += f"; perf/bf16_mfu_pct, median {median(nanochat):.1f} %: nanochat's formula, attention not halved, always over the bf16 peak"
    return f"{text}. Two MFUs compare only with the same formula and the same peak: an fp8 run over its own peak has a lower one and may still be faster."


def _utilisation(figures: Figures) -> str | None:
    used, power = figures.series("gpu/util_pct").values, figures.series("gpu/power_pct").values
    if not used.size:
        return None
    mfu = figures.timed("perf/mfu_pct").values
    mfu = mfu if mfu.size else figures.timed("perf/bf16_mfu_pct").values
    beside = f" beside an MFU of {median(mfu):.1f} %" if mfu.size else ""
    watts = f"; power {median(power):.0f} % of its limit" if power.size else ""
    return (
        f"**Utilisation is not efficiency**: {median(used):.0f} %{beside}{watts}. It is the share of time in which any kernel ran, "
        "whatever the kernel did; below 100 % the GPU was without work, at 100 % MFU says how well it worked."
    )


def _memory_busy(figures: Figures) -> str | None:
    busy = figures.series("gpu/mem_busy_pct").values
    if not busy.size:
        return None
    return f"**gpu/mem_busy_pct**, median {median(busy):.0f} %, is the share of time in which memory was read or written: not time in which the GPU stood waiting for it."
