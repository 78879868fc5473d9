"""Rules on the machine: step time, utilisation, waiting."""

import numpy as np

from pipeline.process.commands import program
from pipeline.report.diagnosis_finding import (
    Figures,
    Series,
    Verdict,
    error_of_difference,
    graded,
    median,
    rule,
    windows,
)

TIMED = 15  # logged step times: five for each third
DRIFT_NOTE, DRIFT_TROUBLE, DRIFT_WINDOWS = 0.10, 0.25, 5
UTIL_NOTE, UTIL_TROUBLE = 90.0, 50.0
MFU_NOTE, MFU_TROUBLE = 30.0, 10.0
WAIT_NOTE, WAIT_TROUBLE = 0.03, 0.10


def step_times(figures: Figures) -> Series:
    """Return seconds of a step without compilation; from tokens a second, in other units, where they are all there is.

    A time that another program rounded to 0 is none.
    """
    times = figures.timed("perf/step_s")
    times = times.where(times.values > 0)
    rates = figures.timed("perf/tok_per_s")
    if len(times) or not (rates.values > 0).all():
        return times
    return Series(rates.steps, 1 / rates.values)


@rule(
    "step time stays the same",
    needs=f"{TIMED} logged perf/step_s",
    threshold=(
        f"from the first to the last third the median grows by less than {DRIFT_NOTE:.0%} (note) or "
        f"{DRIFT_TROUBLE:.0%} (trouble, where {DRIFT_WINDOWS} windows grow one after the other); only growth "
        "from third to third beyond three standard errors counts, and no more than the fast steps' (the lowest "
        "tenth)"
    ),
    reason=(
        "a GPU run keeps its step time to 1 or 2 %; other programs on a shared machine come and go, and leave "
        "some steps as fast as ever; what leaks grows on and slows every step"
    ),
    advice=(
        "Look for what grows: a list that a callback keeps, open files, a fragmenting allocator, heat "
        "(gpu/sm_clock_mhz), a neighbour on the machine. Profile an early and a late step "
        "(monitor.profile_steps)."
    ),
)
def step_time_stays(figures: Figures) -> Verdict | None:
    times = step_times(figures).values
    if times.size < TIMED:
        return None
    first, middle, last = windows(times, 3)
    fast = [float(np.quantile(part, 0.1)) for part in np.array_split(times, 3)]
    growth = min(last / first, fast[2] / fast[0]) - 1
    grows_on = bool((np.diff(windows(times, DRIFT_WINDOWS)) > 0).all())
    evidence = (
        f"medians of the thirds {first:.3g}, {middle:.3g}, {last:.3g} s ({last / first - 1:+.0%}), of the fast steps "
        f"{fast[2] / fast[0] - 1:+.0%}"
    )
    certain = first < middle < last and last - first > 3 * error_of_difference(times, times.size // 3)
    return graded(
        growth if certain else 0.0,
        note=DRIFT_NOTE,
        trouble=DRIFT_TROUBLE if grows_on else np.inf,
        titles=("the step time does not drift", "the step time drifts upward"),
        evidence=evidence,
    )


@rule(
    "the accelerator is used",
    needs="gpu/util_pct, perf/mfu_pct or perf/bf16_mfu_pct: 5 logged values",
    threshold=(
        f"median utilisation at least {UTIL_NOTE:.0f} % (else a note, below {UTIL_TROUBLE:.0f} % trouble) and "
        f"median MFU at least {MFU_NOTE:.0f} % (else a note, below {MFU_TROUBLE:.0f} % trouble)"
    ),
    reason=(
        "utilisation below 100 % is a GPU without work; published pretraining reaches 30 to 60 % of the dense "
        "peak, nothing worth its rent below 10 %"
    ),
    advice=(
        "Larger micro-batches, train.torch_compile, bf16, a faster attention; where utilisation is low too: data "
        "and host are the bottleneck."
    ),
)
def accelerator_is_used(figures: Figures) -> Verdict | None:
    used = figures.timed("gpu/util_pct").values
    exact = figures.timed("perf/mfu_pct").values
    name, mfu = ("MFU", exact) if exact.size else ("bf16 MFU", figures.timed("perf/bf16_mfu_pct").values)
    verdicts = []
    if used.size >= 5:
        verdicts.append((median(used), UTIL_NOTE, UTIL_TROUBLE, f"median utilisation {median(used):.0f} %"))
    if mfu.size >= 5:
        verdicts.append((median(mfu), MFU_NOTE, MFU_TROUBLE, f"median {name} {median(mfu):.1f} %"))
    if not verdicts:
        return None
    evidence = ", ".join(text for *_, text in verdicts)
    if any(value < trouble for value, _, trouble, _ in verdicts):
        return Verdict("trouble", "the accelerator is mostly idle or badly used", evidence)
    if any(value < note for value, note, _, _ in verdicts):
        return Verdict("note", "the accelerator could do more", evidence)
    return Verdict("healthy", "the accelerator is used", evidence)


@rule(
    "data does not stall the steps",
    needs="data/wait_frac: 5 logged values",
    threshold=(
        f"the steps waited for rows for less than {WAIT_NOTE:.0%} (note) or {WAIT_TROUBLE:.0%} (trouble) of "
        "their time, the first logged value left out"
    ),
    reason="rows are prepared ahead, so a sound run waits for under 1 %; a tenth of the time is a tenth of the rent",
    advice=(
        f"Prepare the data before the run ({program('data')} RECIPE), copy it to a local disk, more "
        "data.num_proc, a cheaper format function."
    ),
)
def data_does_not_stall(figures: Figures) -> Verdict | None:
    waits = figures.timed("data/wait_frac")
    if len(waits) < 5:
        return None
    # Each logged value stands for the steps since the one before, however many they were.
    lengths = np.diff(figures.series("data/wait_frac").steps)[-len(waits) :]
    times = figures.timed("perf/step_s")
    weights = lengths * times.values if np.array_equal(times.steps, waits.steps) else lengths
    share = float(np.average(waits.values, weights=weights))
    worst = int(waits.values.argmax())
    return graded(
        share,
        note=WAIT_NOTE,
        trouble=WAIT_TROUBLE,
        titles=("the steps do not wait for data", "the steps wait for data"),
        evidence=f"{share:.1%} of the time in steps; worst {waits.values[worst]:.0%} at step {waits.steps[worst]:.0f}",
    )
