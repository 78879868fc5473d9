"""Rules on learning: learning rate and loss."""

import numpy as np

from pipeline.report.diagnosis.figures import Figures
from pipeline.report.diagnosis.finding import Rule, Verdict, graded, rule
from pipeline.report.diagnosis.robust import error_of_difference, median, noise, windows
from pipeline.training.schedules import learning_rate_multiplier

LOGGED, STEPS = 12, 50  # of a loss before its fall is judged: three values at either end, and more than a first look
FALL_FROM_SCRATCH = 0.05
WINDOWS = 10
RISE = 0.05
RISES_NOTE, RISES_TROUBLE, RISES_ERRORS = 0.01, 0.02, 3  # of windows' medians, and beyond that many standard errors
STALLED_FALL, STALL_STEPS, STALL_LOGGED = 0.01, 200, 30
HIGH_RATE = 0.5  # of the peak: a loss that stands while the rate is still high has no schedule to explain it
RATE_TOLERANCE = 0.006  # imported lines round the multiplier to two decimals
RATE_RISES_AGAIN = 0.05
LONG_WARMUP = 0.2
COMPARED = 10_000  # logged multipliers of a long run: a moment


# ---- learning rate ----


@rule(
    "learning rate follows its schedule",
    needs="optim/lrm with optimizer.schedule in the recipe, or optim/lr: 5 logged values",
    threshold=f"the multiplier is within {RATE_TOLERANCE} of the schedule's at every logged step (of a long run at {COMPARED:,}); without a schedule in the recipe: the rate does not rise by {RATE_RISES_AGAIN:.0%} of its peak after it fell",
    reason="the schedule is a pure function of the step, so any difference is a mistake; imported lines give two decimals",
    advice="Look for a resume that restarted the schedule, or a callback that sets rates.",
)
def learning_rate_follows(figures: Figures) -> Verdict | None:
    multiplier, rate, steps = figures.series("optim/lrm"), figures.rate(), figures.data.max_steps()
    schedule = figures.schedule()
    if len(multiplier) >= 5 and schedule and steps:
        compared = np.linspace(0, len(multiplier) - 1, min(len(multiplier), COMPARED)).round().astype(int)
        multiplier = multiplier.where(compared)
        wanted = np.array([learning_rate_multiplier(schedule, int(step) - 1, steps) for step in multiplier.steps])
        away = np.abs(multiplier.values - wanted)
        worst = int(away.argmax())
        evidence = f"largest difference of the multiplier {away[worst]:.3g} (step {multiplier.steps[worst]:.0f}: {multiplier.values[worst]:.4g} where the schedule has {wanted[worst]:.4g})"
        # What skipped steps hold back is the optimizer's count of updates, not a mistake.
        if away[worst] <= RATE_TOLERANCE or figures.last("optim/skipped_steps"):
            return Verdict("healthy", "the rate follows the recipe's schedule", evidence)
        return Verdict("contradiction", "the learning rate is not the schedule's", evidence)
    if len(rate) < 5 or rate.values.max() <= 0:
        return None
    # The lowest so far, from the first peak on: what stands above it has risen again.
    after = rate.where(np.arange(len(rate)) >= int(rate.values.argmax()))
    again = after.values - np.minimum.accumulate(after.values)
    worst = int(again.argmax())
    evidence = f"peak {rate.values.max():.3g} at step {rate.steps[rate.values.argmax()]:.0f}, last {rate.values[-1]:.3g}; the recipe's schedule is not known, only the shape was judged"
    if again[worst] > RATE_RISES_AGAIN * rate.values.max():
        return Verdict("note", "the learning rate rises again", f"{evidence}; it rises again up to step {after.steps[worst]:.0f}")  # fmt: skip
    return Verdict("healthy", "the rate rises once and falls once", evidence)


@rule(
    "run goes on beyond its warm-up",
    needs="warm-up steps in the recipe, or 10 logged learning rates",
    threshold=f"the last step lies behind the warm-up; a warm-up of more than {LONG_WARMUP:.0%} of the steps is a note; without warm-up in the recipe: the last logged rate is not the highest of a rising last half",
    reason="a run that ends inside its warm-up never saw its peak rate, so it says nothing of a whole run; the recipe's own default is at most a fifth",
    advice="Lower warmup_steps to a tenth of the steps that will be made, or train longer; compare such runs only with each other.",
)
def beyond_warmup(figures: Figures) -> Verdict | None:
    step, planned, warmup = figures.step(), figures.data.max_steps(), figures.warmup_steps()
    rate = figures.rate()
    if warmup is not None and step:
        evidence = f"{step:,} steps made, {warmup:,} of warm-up"
        if step <= warmup and warmup > 0:
            return Verdict("trouble", "the run ends inside its warm-up", f"{evidence}: {step / warmup:.0%} of the way to the peak rate")  # fmt: skip
        if warmup > LONG_WARMUP * max(step, planned or 0):
            return Verdict("note", "the warm-up is long", f"{evidence}, {warmup / max(step, planned or 0):.0%} of the run")  # fmt: skip
        return Verdict("healthy", "the warm-up is over", evidence)
    if len(rate) < 10:
        return None
    last_half = rate.values[len(rate) // 2 :]
    evidence = f"last rate {rate.values[-1]:.3g} at step {rate.steps[-1]:.0f}, highest {rate.values.max():.3g} at step {rate.steps[rate.values.argmax()]:.0f}"
    if rate.values[-1] >= rate.values.max() and (np.diff(last_half) > 0).all():
        return Verdict("trouble", "the run ends while its learning rate still rises", evidence)
    return Verdict("healthy", "the rate had stopped rising", evidence)


# ---- loss ----


@rule(
    "loss falls",
    needs=f"{LOGGED} logged train/loss over {STEPS} steps",
    threshold=f"the median of the last tenth is at least {FALL_FROM_SCRATCH:.0%} below that of the first tenth; with weights that were trained before: below it by two standard errors",
    reason="from new weights the loss starts near ln(vocabulary) and word frequencies alone take more than a tenth off it within a hundred steps; trained weights may have little left to learn",
    advice="Check that the rate is not near 0 and that parameters require gradients; overfit a single batch; raise the rate tenfold in a short run.",
)
def loss_falls(figures: Figures) -> Verdict | None:
    loss = figures.loss()
    if len(loss) < LOGGED or loss.steps[-1] - loss.steps[0] < STEPS - 1:
        return None
    length = max(3, len(loss) // 10)
    early, late = median(loss.values[:length]), median(loss.values[-length:])
    evidence = f"{early:.4g} -> {late:.4g} (medians of the first and last {length} logged values)"
    if figures.starts_trained():
        if early - late >= 2 * error_of_difference(loss.values, length):
            return Verdict("healthy", "the loss falls", evidence)
        return Verdict("note", "the loss of weights that were trained before does not fall", evidence)
    if early - late >= FALL_FROM_SCRATCH * abs(early):
        return Verdict("healthy", "the loss falls", evidence)
    return Verdict("trouble", "the loss is flat", evidence)


@rule(
    "loss stays below its start",
    needs="5 logged train/loss",
    threshold=f"no two logged values in a row are {RISE:.0%} (and four times the noise) above the first one",
    reason="at its start a model guesses evenly; worse than that for longer than one value means updates that are too large",
    advice="The learning rate is too high or the warm-up too short: try a third of the rate, or a longer warm-up.",
)
def loss_below_start(figures: Figures) -> Verdict | None:
    loss = figures.loss()
    if len(loss) < 5:
        return None
    first = loss.values[0]
    limit = first + max(RISE * abs(first), 4 * noise(loss.values))
    both = np.minimum(loss.values[:-1], loss.values[1:])
    highest = int(loss.values.argmax())
    evidence = f"first {first:.4g}, highest {loss.values[highest]:.4g} at step {loss.steps[highest]:.0f}"
    if both.max() > limit:
        return Verdict("trouble", "the loss climbed above where it started", f"{evidence}; {int((loss.values > limit).sum())} of {len(loss)} logged values above {limit:.4g}")  # fmt: skip
    return Verdict("healthy", "the loss never climbed above its start", evidence)


@rule(
    "loss does not rise",
    needs="15 logged train/loss",
    threshold=f"the median of the last of {WINDOWS} windows is less than {RISES_NOTE:.0%} (note) or {RISES_TROUBLE:.0%} (trouble), or {RISES_ERRORS} standard errors, above the lowest window",
    reason="single logged losses of a sound run wander by 5 % around their trend; medians of windows wander far less, and a sound run ends at its lowest",
    advice="Look at rate, data order and source shares around the lowest window; go back to a checkpoint before it (run.fork_from) with a lower rate.",
)
def loss_does_not_rise(figures: Figures) -> Verdict | None:
    loss = figures.loss()
    if len(loss) < 15:
        return None
    count = min(WINDOWS, len(loss) // 3)
    level, length = windows(loss.values, count), len(loss) // count
    lowest = int(level.argmin())
    rise, chance = level[-1] - level[lowest], RISES_ERRORS * error_of_difference(loss.values, length)
    step = np.array_split(loss.steps, count)[lowest][-1]
    return graded(
        rise / abs(level[lowest]) if rise > chance else 0.0,
        note=RISES_NOTE,
        trouble=RISES_TROUBLE,
        titles=("the loss does not rise", "the loss rises"),
        evidence=f"lowest window {level[lowest]:.4g} (to step {step:.0f}), last window {level[-1]:.4g}",
    )


@rule(
    "loss keeps falling",
    needs=f"{STALL_LOGGED} logged train/loss over {STALL_STEPS} steps",
    threshold=f"between the middle and the end the loss falls by {STALLED_FALL:.0%}; trouble when it does not while the rate is above {HIGH_RATE:.0%} of its peak, else a note",
    reason="sound runs of ten thousand steps still lose 3 to 6 % in their second half; a loss that stands while the rate is high is explained by no schedule",
    advice="If the rate is high, let it fall now or lower it; otherwise the model is as good as its size and data allow.",
)
def loss_keeps_falling(figures: Figures) -> Verdict | None:
    loss = figures.loss()
    if len(loss) < STALL_LOGGED or loss.steps[-1] - loss.steps[0] < STALL_STEPS - 1:
        return None
    level = windows(loss.values, WINDOWS)
    middle, end = level[WINDOWS // 2 - 1], level[-1]
    evidence = f"{middle:.4g} in the middle, {end:.4g} at the end"
    if middle - end >= STALLED_FALL * abs(middle):
        return Verdict("healthy", "the loss still fell in the second half", evidence)
    rate = figures.rate()
    second = rate.values[rate.steps >= loss.steps[len(loss) // 2]]
    if second.size and median(second) > HIGH_RATE * rate.values.max():
        return Verdict("trouble", "the loss stands still while the rate is high", evidence)
    return Verdict("note", "the loss stands still", evidence)


RULES: list[Rule] = [
    learning_rate_follows,
    beyond_warmup,
    loss_falls,
    loss_below_start,
    loss_does_not_rise,
    loss_keeps_falling,
]
