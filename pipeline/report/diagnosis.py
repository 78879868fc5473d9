"""The diagnosis as a section of the report: trouble first, then notes, what is healthy, and what is not known."""

from pathlib import Path

from pipeline.report import diagnosis_learning, diagnosis_machine, diagnosis_run
from pipeline.report.diagnosis_finding import Figures, Finding, Rule, median
from pipeline.report.run_data import RunData, cell, joined, number, table

# The table of rules, in the order in which they are written: that in which a run is read.
RULES: list[Rule] = [
    rule
    for module in (diagnosis_run, diagnosis_learning, diagnosis_machine)
    for rule in vars(module).values()
    if isinstance(rule, Rule)
]


def diagnose(data: RunData) -> list[Finding]:
    """Return one finding a rule, in the order of the table. Reads series, manifest, recipe and checkpoints; any may be
    missing."""
    figures = Figures(data)
    return [rule.finding(figures) for rule in RULES]


# How to read these numbers: what the names mean that are mistaken for one another, with the run's own figures.

# Narrow to wide: each level holds the one before it.
MEMORY = (
    (
        "mem/allocated_gib",
        "allocated",
        "tensors alive at the moment of logging, between two steps: weights, optimizer state, gradients",
    ),
    (
        "mem/peak_allocated_gib",
        "peak allocated",
        "the most that was alive at any moment since the last log: activations and other tensors of a step are in it",
    ),
    (
        "mem/reserved_gib",
        "reserved",
        "what torch holds of the device, free pieces that it keeps for the next step included",
    ),
    (
        "mem/device_used_gib",
        "used on the device",
        "what the driver sees: reserved memory, CUDA's context, communication buffers, other processes",
    ),
)


def reading_text(data: RunData) -> str:
    """Return a list in Markdown, "" when the run has none of these numbers."""
    figures = Figures(data)
    lines = [_samples(figures), _memory(figures), _mfu(figures), _utilisation(figures), _memory_busy(figures)]
    return "".join(f"- {line}\n" for line in lines if line)


def _samples(figures: Figures) -> str | None:
    """Return the line that says what a sample is: a row, of so many positions and targets."""
    samples, row, step = figures.last("data/samples"), figures.recipe("data.row_tokens"), figures.step()
    batch = figures.manifest("inputs.batch_tokens") or figures.recipe("data.batch_tokens")
    if not samples or not row:
        return None
    text = (
        f"**A sample is a row of {row:,} positions, not a token.** {samples:,.0f} samples x {row:,} positions = "
        f"{samples * row:,.0f} tokens"
    )
    if step and batch:
        text += f", which is {step:,} steps x {batch:,} positions a step"
    targets = figures.last("data/tokens")
    if targets and targets < samples * row:
        text += (
            f"; {targets:,.0f} of them were trained on (padding and, in SFT, what the assistant did not write are no "
            "targets)"
        )
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
        text += (
            ". The peak does not show in the allocated memory because that is looked at between two steps: "
            f"{peak - allocated:.2f} GiB came and went within a step"
        )
    return f"{text}. What decides whether a larger batch fits is the peak against the device's memory."


def _mfu(figures: Figures) -> str | None:
    exact, nanochat = figures.timed("perf/mfu_pct").values, figures.timed("perf/bf16_mfu_pct").values
    rate = figures.timed("perf/tflops_per_gpu").values
    if not exact.size and not nanochat.size:
        return None
    device, dtype = figures.manifest("shape.device"), figures.manifest("shape.dtype")
    text = "**MFU** is the model's FLOP/s over the dense peak (without sparsity) of the device"
    if exact.size:
        text += (
            f"; perf/mfu_pct, median {median(exact):.1f} %: exact matmuls, causal attention counted once, over the "
            f"peak of {dtype or 'the compute dtype'}"
        )
        if rate.size and median(exact) > 0:
            peak = 100 * median(rate) / median(exact)
            text += f" ({median(rate):.3g} of {number(round(peak, 1))} TFLOP/s" + (f", {device})" if device else ")")
    if nanochat.size:
        text += (
            f"; perf/bf16_mfu_pct, median {median(nanochat):.1f} %: nanochat's formula, attention not halved, always "
            "over the bf16 peak"
        )
    return (
        f"{text}. Two MFUs compare only with the same formula and the same peak: an fp8 run over its own peak has a "
        "lower one and may still be faster."
    )


def _utilisation(figures: Figures) -> str | None:
    used, power = figures.series("gpu/util_pct").values, figures.series("gpu/power_pct").values
    if not used.size:
        return None
    mfu = figures.timed("perf/mfu_pct").values
    mfu = mfu if mfu.size else figures.timed("perf/bf16_mfu_pct").values
    beside = f" beside an MFU of {median(mfu):.1f} %" if mfu.size else ""
    watts = f"; power {median(power):.0f} % of its limit" if power.size else ""
    return (
        f"**Utilisation is not efficiency**: {median(used):.0f} %{beside}{watts}. It is the share of time in which "
        "any kernel ran, whatever the kernel did; below 100 % the GPU was without work, at 100 % MFU says how well it "
        "worked."
    )


def _memory_busy(figures: Figures) -> str | None:
    busy = figures.series("gpu/mem_busy_pct").values
    if not busy.size:
        return None
    return (
        f"**gpu/mem_busy_pct**, median {median(busy):.0f} %, is the share of time in which memory was read or "
        "written: not time in which the GPU stood waiting for it."
    )


# docs/diagnosis.md, made from the table of rules.

HEAD = """# Diagnosis

<!-- Written by `python -m pipeline.report.diagnosis`; change the rules in pipeline/report/diagnosis_*.py, then run it again. -->

`python -m pipeline.report RUN` reads the run for you, by rule, in the order in which a run is best read: the run
itself, its learning rate, losses, gradient norms, then the system. Each rule gives one finding:

- **healthy**: the sign was looked for and is not there.
- **note**: worth knowing; a run with notes only is healthy.
- **trouble**: a reason to look, not a proof. The finding tells the numbers and steps behind it, the threshold, and what to try.
- **unknown**: the numbers that the rule needs were not logged, or are too few to judge. Nothing is guessed.

The thresholds were fixed before the runs that were made sick on purpose to try them, but for two that were set on what real runs
show (a growing gradient norm, a loss that rises at its end); `docs/log.md` tells what came out. Levels are medians, and noise
is measured from the differences of neighbouring values, so that a few wild values move neither. The first logged value of a start,
which holds compilation, is in no time. The rules read the series of `metrics.jsonl`, recipe, manifest and checkpoints; imported
runs may lack any of these. Whether a run's numbers agree with one another is another question: `python -m faults.audit RUN`, in
a clone of the repository.

The same section of a report tells how to read the numbers that are mistaken for one another: samples and tokens; allocated,
peak, reserved and device memory; the two MFUs; utilisation.

"""  # noqa: E501


def page() -> str:
    rows = [[rule.name, rule.needs, rule.threshold, rule.reason, rule.advice] for rule in RULES]
    return HEAD + table(["healthy sign", "needs", "threshold", "why there", "what to try"], rows)


def diagnosis_text(data: RunData) -> str:
    """Return Markdown without its heading; "" when no rule can say anything."""
    findings = diagnose(data)
    troubles, notes, healthy, unknown = (
        [finding for finding in findings if finding.level == level]
        for level in ("trouble", "note", "healthy", "unknown")
    )
    if len(unknown) == len(RULES):
        return ""
    signs, reading = table(["sign", "evidence"], [[f.title, f.evidence] for f in healthy]), reading_text(data)
    return joined(
        verdict(findings) + "\n",
        _to_look_at("Trouble", troubles),
        _to_look_at("Notes", notes),
        f"### Healthy\n\n{signs}" if signs else "",
        f"Unknown, for want of numbers: {'; '.join(f'{f.rule} ({f.title})' for f in unknown)}.\n" if unknown else "",
        f"### How to read these numbers\n\n{reading}" if reading else "",
    )


def verdict(findings: list[Finding]) -> str:
    """Return a sentence on the whole."""
    troubles = [finding.title for finding in findings if finding.level == "trouble"]
    notes = sum(finding.level == "note" for finding in findings)
    judged = sum(finding.level != "unknown" for finding in findings)
    beside = f", {notes} worth knowing" if notes else ""
    if not troubles:
        return (
            f"**Healthy**: {judged} of {len(findings)} signs could be judged, none of them is one of trouble{beside}."
        )
    count = "1 sign" if len(troubles) == 1 else f"{len(troubles)} signs"
    return (
        f"**{count} of trouble** ({'; '.join(troubles)}){beside}; {judged} of {len(findings)} signs could be judged. "
        "A sign is a reason to look, not a proof."
    )


def _to_look_at(title: str, findings: list[Finding]) -> str:
    lines = [
        (
            f"- **{cell(f.title)}**: {cell(f.evidence)}\n  - What to try: {cell(f.advice)}\n  - Healthy is: "
            f"{cell(f'{f.rule}: {f.threshold}')}\n"
        )
        for f in findings
    ]
    return f"### {title}\n\n{''.join(lines)}" if lines else ""


if __name__ == "__main__":
    Path("docs/diagnosis.md").write_text(page(), encoding="utf-8")
