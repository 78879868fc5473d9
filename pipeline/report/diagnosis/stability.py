"""Rules on stability: spikes, gradient norm, clipping, numbers that are not finite."""

import numpy as np

from pipeline.report.diagnosis.figures import Figures, Series
from pipeline.report.diagnosis.finding import Rule, Verdict, graded, rule
from pipeline.report.diagnosis.robust import median, windows
from pipeline.training.recent import DEVIATIONS, ENOUGH, WINDOW, RecentValues

MANY_SPIKES, SPIKES_SHARE = 3, 0.001
EARLY = 1.5  # times the values around it: before ENOUGH values a loss falls so fast that only a single value tells
HIGH_NORM = 2.0  # times the usual one: lower ones, which clipping bounds, harm nothing
GROWTH_NOTE, GROWTH_TROUBLE, GRADIENT_COLLAPSE = 2.5, 4.0, 100.0
NORM_WINDOWS = 10  # of 8 values at least
CLIPPED_OFTEN, CLIPPED_LOGGED = 0.5, 10
SKIPPED_SHARE = 0.01
SEARCHED = 20_000  # last values of an imported run that are searched for spikes: a second


def spikes(figures: Figures, name: str, series: Series) -> list[int]:
    """Steps of values far above their last ones. Of our own runs the alarm said so; of imported ones it is done here."""
    if figures.is_watched():
        return sorted({row["step"] for row in figures.data.events("spike") if row.get("name") == name})
    recent, found = RecentValues(), []
    for step, value in zip(series.steps[-SEARCHED:].tolist(), series.values[-SEARCHED:].tolist(), strict=True):
        highest = recent.highest_usual()
        if highest is not None and value > highest:
            found.append(int(step))
        recent.append(value)
    return found


def early_spikes(series: Series) -> list[int]:
    """Return the steps of the first values, of which the alarm says nothing, that stand far above the values on both sides."""
    values = series.values
    return [
        int(series.steps[i])
        for i in range(1, min(ENOUGH, len(series) - 1))
        if values[i] > EARLY * max(median(values[max(i - 3, 0) : i]), median(values[i + 1 : i + 4]))
    ]


def _spiked(figures: Figures, name: str, series: Series, *, of: str, early: bool = False, high: float = 0.0) -> Verdict | None:  # fmt: skip
    """high: times the usual value that a spike must reach to be of the many that are trouble."""
    if len(series) <= ENOUGH:
        return None
    steps = sorted({*spikes(figures, name, series), *(early_spikes(series) if early else [])})
    if not steps:
        return Verdict("healthy", f"no {of} spiked", f"0 of {len(series)} logged values")
    listed = ", ".join(map(str, steps[:8])) + (" ..." if len(steps) > 8 else "")
    evidence = f"{len(steps)} of {len(series)} logged values: step {listed}"
    harmful = [step for step in steps if _height(series, step) >= high]
    if len(harmful) < len(steps):
        evidence += f"; {len(harmful)} of them at {high:g} times the usual or more"
    many = len(harmful) >= MANY_SPIKES and len(harmful) >= SPIKES_SHARE * len(series)
    return Verdict("trouble" if many else "note", f"the {of} spikes", evidence)


def _height(series: Series, step: int) -> float:
    """Return the value at that step / the median of the values that the alarm compared it with."""
    at = int(np.searchsorted(series.steps, step))
    before = series.values[max(at - WINDOW, 0) : at]
    usual = median(before) if before.size else 0.0
    return float(series.values[min(at, len(series) - 1)]) / usual if usual > 0 else np.inf


SPIKE_THRESHOLD = (
    f"no value above the median of the last {WINDOW} by {DEVIATIONS:.0f} robust standard deviations and a tenth; "
    f"trouble from {MANY_SPIKES} such values on that are {SPIKES_SHARE:.1%} of all"
)
SPIKE_REASON = "noise does not reach six standard deviations; one bad batch may, three are no accident. The same alarm speaks while a run trains"


@rule(
    "loss does not spike",
    needs=f"more than {ENOUGH} logged train/loss",
    threshold=f"{SPIKE_THRESHOLD}; nor one of the first {ENOUGH} above {EARLY:g} times the values on both sides",
    reason=SPIKE_REASON,
    advice="Look at the rows of those steps; lower the rate or the clipping limit; monitor.on_spike: skip leaves such updates out.",
)
def loss_spikes(figures: Figures) -> Verdict | None:
    return _spiked(figures, "train/loss", figures.loss(), of="loss", early=True)


@rule(
    "gradient norm does not spike",
    needs=f"more than {ENOUGH} logged optim/grad_norm",
    threshold=f"{SPIKE_THRESHOLD} and reach {HIGH_NORM:g} times the usual norm",
    reason=f"{SPIKE_REASON}; a norm that stays below twice the usual one moves the weights hardly more than any other",
    advice="Clip at about the usual norm (train.max_grad_norm); a norm that spikes before the loss does is an early warning.",
)
def gradient_spikes(figures: Figures) -> Verdict | None:
    return _spiked(figures, "optim/grad_norm", figures.series("optim/grad_norm"), of="gradient norm", high=HIGH_NORM)


@rule(
    "gradient norm stays bounded",
    needs="16 logged optim/grad_norm",
    threshold=f"the median of the last tenth is less than {GROWTH_NOTE:g} (note) or {GROWTH_TROUBLE:g} times (trouble) the lowest of {NORM_WINDOWS} windows after the warm-up; that of the last quarter more than 1/{GRADIENT_COLLAPSE:.0f} of the second's",
    reason="norms of sound runs fall through the warm-up (5 times in the NeMo runs this page was made for) and hardly grow after it (1.5 times at most in the 23 runs that were looked at); four times more explodes, a hundred times less has stopped learning",
    advice="Grown: lower the rate, clip. Collapsed: look for saturated or frozen parts, an underflow of fp16, or text that is already known by heart.",
)
def gradient_bounded(figures: Figures) -> Verdict | None:
    norm = figures.series("optim/grad_norm")
    if len(norm) < 16:
        return None
    quarters, end = windows(norm.values, 4), median(norm.values[-max(3, len(norm) // 10) :])
    warm = norm.values[norm.steps > (figures.warmup_steps() or 0)]
    warm = warm if warm.size >= 16 else norm.values
    second, last = quarters[1], quarters[3]
    least = windows(warm, min(warm.size // 8, NORM_WINDOWS)).min()
    evidence = f"median {second:.3g} in the second quarter, {last:.3g} in the last; {least:.3g} in the lowest window, {end:.3g} in the last tenth; highest {norm.values.max():.3g}"
    if not last:
        return Verdict("trouble", "the gradient norm is 0", evidence)
    if end >= GROWTH_NOTE * least:
        return graded(end / max(least, 1e-30), note=GROWTH_NOTE, trouble=GROWTH_TROUBLE, titles=("", "the gradient norm grows"), evidence=evidence)  # fmt: skip
    if last <= second / GRADIENT_COLLAPSE:
        return Verdict("trouble", "the gradient norm collapses", evidence)
    return Verdict("healthy", "the gradient norm stays bounded", evidence)


@rule(
    "clipping acts now and then",
    needs=f"optim/clip_frac, or optim/grad_norm with train.max_grad_norm: {CLIPPED_LOGGED} logged values",
    threshold=f"clipped in more than none and fewer than {CLIPPED_OFTEN:.0%} of the steps; a note otherwise",
    reason="a limit that is never reached protects from nothing that was seen; one that always acts sets the step size instead of the learning rate",
    advice="Never: lower train.max_grad_norm to about twice the usual norm, or accept that it is a safety net. Often: raise it, or lower the rate.",
)
def clipping(figures: Figures) -> Verdict | None:
    norm, limit = figures.series("optim/grad_norm"), figures.recipe("train.max_grad_norm")
    share = figures.series("optim/clip_frac")
    if limit is not None and limit <= 0:
        return Verdict("healthy", "clipping is off by recipe", f"train.max_grad_norm {limit}")
    if len(share) >= CLIPPED_LOGGED:
        clipped = float(share.values.mean())
    elif len(norm) >= CLIPPED_LOGGED and limit is not None:
        clipped = float((norm.values > limit).mean())
    else:
        return None
    evidence = f"{clipped:.1%} of the logged steps"
    if len(norm):
        evidence += f"; norm: median {median(norm.values):.3g}, highest {norm.values.max():.3g}" + (f", limit {limit:g}" if limit else "")  # fmt: skip
    if clipped == 0:
        return Verdict("note", "clipping was never active", evidence)
    if clipped > CLIPPED_OFTEN:
        return Verdict("note", "clipping is nearly always active", evidence)
    return Verdict("healthy", "clipping acts now and then", evidence)


@rule(
    "every number is finite",
    needs="train/loss",
    threshold=f"no loss, gradient norm or parameter is NaN or infinite; steps left out for it are a note up to {SKIPPED_SHARE:.0%} of the steps",
    reason="one NaN in the weights ends a run for good; fp16's loss scaler skips a few steps while it finds its scale, and a few bad rows pass",
    advice="Look at the tensor and the rows that the record names; lower the rate, prefer bf16 to fp16; monitor.on_nonfinite: skip leaves single bad steps out.",
)
def everything_finite(figures: Figures) -> Verdict | None:
    failure, made = figures.data.failure or {}, figures.step()
    events = [row for row in figures.data.events("nonfinite") if row.get("action") != "warn"]
    not_skipped = [row for row in events if row.get("action") != "skip"]
    wild = figures.wild("train/loss") + figures.wild("train/loss_ema") + figures.wild("optim/grad_norm")
    steps = sorted({int(row["step"]) for row in events} | set(wild))
    skipped = max(figures.last("optim/skipped_steps") or 0, figures.last("optim/nonfinite_steps") or 0)
    told = [f"first at step {steps[0]}"] if steps else []
    if not_skipped or wild or (failure.get("status") == 76 and not figures.data.events("spike")):
        told += [str(row["tensor"]) for row in not_skipped[:1] if row.get("tensor")]
        if not told:
            told = [str(failure.get("message", ""))]
        return Verdict("trouble", "a number is NaN or infinite", ", ".join(told))
    if skipped:
        evidence = ", ".join([f"{skipped:.0f} of {made:,} steps", *told])
        share = skipped / max(made, 1)
        return graded(share, note=0, trouble=SKIPPED_SHARE, titles=("", "steps were left out"), evidence=evidence)
    if not len(figures.loss()):
        return None
    return Verdict("healthy", "every logged number is finite", f"{len(figures.loss())} logged losses")


RULES: list[Rule] = [loss_spikes, gradient_spikes, gradient_bounded, clipping, everything_finite]
