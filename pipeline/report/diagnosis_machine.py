"""Rules on the machine: step time, utilisation, waiting, memory."""

import numpy as np

from pipeline.process.commands import program
from pipeline.report.diagnosis_finding import (
    LONG_ENOUGH_S,
    Figures,
    Series,
    Verdict,
    error_of_difference,
    graded,
    median,
    noise,
    rule,
    windows,
)

TIMED = 15  # logged step times: five for each third
DRIFT_NOTE, DRIFT_TROUBLE, DRIFT_WINDOWS = 0.10, 0.25, 5
UNSTEADY_NOTE, UNSTEADY_TROUBLE = 0.10, 0.30
UTIL_NOTE, UTIL_TROUBLE = 90.0, 50.0
MFU_NOTE, MFU_TROUBLE = 30.0, 10.0
WAIT_NOTE, WAIT_TROUBLE = 0.03, 0.10
SLOW_NOTE, SLOW_TROUBLE = 1.15, 1.5
THROTTLED_NOTE, THROTTLED_TROUBLE = 1.0, 10.0
SAVES_NOTE, SAVES_TROUBLE = 0.05, 0.10
EVALUATIONS_NOTE, EVALUATIONS_TROUBLE = 0.20, 0.50
GROWTH_NOTE, GROWTH_TROUBLE = 0.10, 0.20
MEMORY_SETTLED = 0.2  # of the run: before it memory grows for good reasons


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
    threshold=f"from the first to the last third the median grows by less than {DRIFT_NOTE:.0%} (note) or {DRIFT_TROUBLE:.0%} (trouble, where {DRIFT_WINDOWS} windows grow one after the other); only growth from third to third beyond three standard errors counts, and no more than the fast steps' (the lowest tenth)",
    reason="a GPU run keeps its step time to 1 or 2 %; other programs on a shared machine come and go, and leave some steps as fast as ever; what leaks grows on and slows every step",
    advice="Look for what grows: a list that a callback keeps, open files, a fragmenting allocator, heat (gpu/sm_clock_mhz), a neighbour on the machine. Profile an early and a late step (monitor.profile_steps).",
)
def step_time_stays(figures: Figures) -> Verdict | None:
    times = step_times(figures).values
    if times.size < TIMED:
        return None
    first, middle, last = windows(times, 3)
    fast = [float(np.quantile(part, 0.1)) for part in np.array_split(times, 3)]
    growth = min(last / first, fast[2] / fast[0]) - 1
    grows_on = bool((np.diff(windows(times, DRIFT_WINDOWS)) > 0).all())
    evidence = f"medians of the thirds {first:.3g}, {middle:.3g}, {last:.3g} s ({last / first - 1:+.0%}), of the fast steps {fast[2] / fast[0] - 1:+.0%}"
    certain = first < middle < last and last - first > 3 * error_of_difference(times, times.size // 3)
    return graded(
        growth if certain else 0.0,
        note=DRIFT_NOTE,
        trouble=DRIFT_TROUBLE if grows_on else np.inf,
        titles=("the step time does not drift", "the step time drifts upward"),
        evidence=evidence,
    )


@rule(
    "throughput is stable",
    needs=f"{TIMED} logged perf/step_s",
    threshold=f"the robust standard deviation of step times around their trend is below {UNSTEADY_NOTE:.0%} (note) or {UNSTEADY_TROUBLE:.0%} (trouble) of their median",
    reason="with 10 % from log to log the forecast is good to a few percent after fifty logs; with 30 % it says little",
    advice="Look at what runs beside it, at data/wait_frac, at rows of uneven length, at other jobs on the disk and the network.",
)
def throughput_is_stable(figures: Figures) -> Verdict | None:
    times = step_times(figures).values
    if times.size < TIMED:
        return None
    spread, middle = noise(times) / median(times), median(times)
    slow = int((times > 2 * middle).sum())
    return graded(
        spread,
        note=UNSTEADY_NOTE,
        trouble=UNSTEADY_TROUBLE,
        titles=("throughput is stable enough to trust the forecast", "the step time jumps about"),
        evidence=f"step time median {middle:.3g} s, spread {spread:.1%}; {slow} of {times.size} logged values above twice the median",
    )


@rule(
    "the accelerator is used",
    needs="gpu/util_pct, perf/mfu_pct or perf/bf16_mfu_pct: 5 logged values",
    threshold=f"median utilisation at least {UTIL_NOTE:.0f} % (else a note, below {UTIL_TROUBLE:.0f} % trouble) and median MFU at least {MFU_NOTE:.0f} % (else a note, below {MFU_TROUBLE:.0f} % trouble)",
    reason="utilisation below 100 % is a GPU without work; published pretraining reaches 30 to 60 % of the dense peak, nothing worth its rent below 10 %",
    advice="Larger micro-batches, train.torch_compile, bf16, a faster attention; where utilisation is low too: data and host are the bottleneck.",
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
    threshold=f"the steps waited for rows for less than {WAIT_NOTE:.0%} (note) or {WAIT_TROUBLE:.0%} (trouble) of their time, the first logged value left out",
    reason="rows are prepared ahead, so a sound run waits for under 1 %; a tenth of the time is a tenth of the rent",
    advice=f"Prepare the data before the run ({program('data')} RECIPE), copy it to a local disk, more data.num_proc, a cheaper format function.",
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


@rule(
    "no rank keeps the others waiting",
    needs="perf/slowest_rank (several processes): 5 logged values",
    threshold=f"the slowest rank's own time is in the median less than {SLOW_NOTE} (note) or {SLOW_TROUBLE} (trouble) times the others' mean",
    reason="every rank waits for the slowest; above 1.5 the run itself warns",
    advice="Look at that rank's GPU (clock, temperature), its host's load and its rows.",
)
def no_straggler(figures: Figures) -> Verdict | None:
    ratio = figures.timed("perf/slowest_rank")
    if len(ratio) < 5:
        return None
    ranks = figures.series("perf/slowest_rank_id").values
    often = int(np.bincount(ranks.astype(int)).argmax()) if ranks.size else None
    return graded(
        median(ratio.values),
        note=SLOW_NOTE,
        trouble=SLOW_TROUBLE,
        titles=("the ranks keep step", "a rank keeps the others waiting"),
        evidence=f"slowest / others: median {median(ratio.values):.2f}"
        + ("" if often is None else f", most often rank {often}"),
    )


@rule(
    "the GPU is not throttled",
    needs="gpu/throttled_pct: 5 logged values",
    threshold=f"throttled for less than {THROTTLED_NOTE:.0f} % (note) or {THROTTLED_TROUBLE:.0f} % (trouble) of the time",
    reason="a throttled GPU runs below its clock, and every rank waits for it",
    advice="Look at gpu/temp_c, gpu/power_pct and gpu/sm_clock_mhz: cooling and the power limit are the host's to fix; another machine may be cheaper.",
)
def not_throttled(figures: Figures) -> Verdict | None:
    throttled = figures.timed("gpu/throttled_pct").values
    if throttled.size < 5:
        return None
    hottest = figures.series("gpu/temp_c").values
    return graded(
        float(throttled.mean()),
        note=THROTTLED_NOTE,
        trouble=THROTTLED_TROUBLE,
        titles=("the GPU was not throttled", "the GPU was throttled"),
        evidence=f"{throttled.mean():.1f} % of the time"
        + (f", up to {hottest.max():.0f} deg C" if hottest.size else ""),
    )


def _share_of_time(figures: Figures, names: tuple[str, ...], limits: tuple[float, float], titles: tuple[str, str]) -> Verdict | None:  # fmt: skip
    """Return a verdict on the share of the whole time that these seconds are; in a short run nothing worse than a note."""
    in_steps, spent = figures.seconds(), figures.total(*names)
    count = sum(len(figures.series(name)) for name in names)
    if not in_steps or not count:
        return None
    whole = in_steps + figures.total("ckpt/save_s", "perf/eval_s", "core/eval_s", "chat/eval_s")
    evidence = f"{count} times, {spent:.3g} s in all, {spent / whole:.1%} of {whole:.4g} s"
    times = step_times(figures).values
    if times.size:
        evidence += f"; one takes as long as {spent / count / median(times):.1f} steps"
    trouble = limits[1] if whole >= LONG_ENOUGH_S else float("inf")
    return graded(spent / whole, note=limits[0], trouble=trouble, titles=titles, evidence=evidence)


@rule(
    "saves do not hold the training up",
    needs="ckpt/save_s and the time in steps",
    threshold=f"below {SAVES_NOTE:.0%} (note) or, in runs of {LONG_ENOUGH_S / 60:.0f} minutes and more, {SAVES_TROUBLE:.0%} (trouble) of the whole time",
    reason="checkpoints are copied in memory and written beside the training: a save costs a step or two, not minutes",
    advice="A faster disk for run.directory; a larger train.save_steps, as long as what a crash may cost stays bearable.",
)
def saves_are_cheap(figures: Figures) -> Verdict | None:
    titles = ("saves cost little time", "saves hold the training up")
    return _share_of_time(figures, ("ckpt/save_s",), (SAVES_NOTE, SAVES_TROUBLE), titles)


@rule(
    "evaluations leave time for training",
    needs="perf/eval_s and the time in steps",
    threshold=f"below {EVALUATIONS_NOTE:.0%} (note) or, in runs of {LONG_ENOUGH_S / 60:.0f} minutes and more, {EVALUATIONS_TROUBLE:.0%} (trouble) of the whole time",
    reason="what is measured is not trained; a fifth is already generous, half is a mistake in the cadence",
    advice="A larger train.eval_steps, evals.core.every_steps or evals.chat.every_steps, or smaller evals.bpb.tokens (another protocol).",
)
def evaluations_are_cheap(figures: Figures) -> Verdict | None:
    titles = ("evaluations cost little time", "evaluations take much of the time")
    names = ("perf/eval_s", "core/eval_s", "chat/eval_s")
    return _share_of_time(figures, names, (EVALUATIONS_NOTE, EVALUATIONS_TROUBLE), titles)


@rule(
    "memory does not grow",
    needs=f"mem/allocated_gib or mem/host_rss_gib: {TIMED} logged values",
    threshold=f"after the first fifth the medians of five windows do not all grow, or by less than {GROWTH_NOTE:.0%} (note) or {GROWTH_TROUBLE:.0%} (trouble) in all",
    reason="caches fill and then stand; what grows through five windows goes on until memory is full",
    advice="Look for tensors or texts that are kept from step to step (a callback's list, a loss that was not detached) and for caches without a limit.",
)
def memory_does_not_grow(figures: Figures) -> Verdict | None:
    verdicts = []
    for name in ("mem/allocated_gib", "mem/host_rss_gib"):
        series = figures.timed(name)
        if len(series) < TIMED:
            continue
        level = windows(series.values[int(MEMORY_SETTLED * len(series)) :], 5)
        growth = level[-1] / level[0] - 1 if level[0] > 0 and (np.diff(level) > 0).all() else 0.0
        verdicts.append((growth, f"{name} {level[0]:.3g} -> {level[-1]:.3g} GiB"))
    if not verdicts:
        return None
    return graded(
        max(growth for growth, _ in verdicts),
        note=GROWTH_NOTE,
        trouble=GROWTH_TROUBLE,
        titles=("memory does not grow", "memory grows steadily"),
        evidence=", ".join(text for _, text in verdicts),
    )


@rule(
    "device memory has room",
    needs="mem/alloc_retries",
    threshold="the allocator never had to free its cache and try again",
    reason="each retry waits for the device and hands memory back to the driver; the next step may not fit at all",
    advice="A smaller train.per_device_train_batch_size, gradient_checkpointing, or expandable segments.",
)
def device_memory_has_room(figures: Figures) -> Verdict | None:
    retries = figures.last("mem/alloc_retries")
    if retries is None:
        return None
    evidence = f"{retries:.0f} retries"
    if retries:
        return Verdict("note", "device memory was full at times", evidence)
    return Verdict("healthy", "the allocator never ran out", evidence)
