"""The rules of the diagnosis: fifteen signs of health or trouble in a run, one function each, in one table."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pipeline.data.losses import ENOUGH_BYTES, fit_text
from pipeline.metrics import ENOUGH, SFT_BPB, VAL_BPB, VALIDATION, RecentValues
from pipeline.process.commands import program
from pipeline.report.run_data import RunData
from pipeline.report.run_metrics import RunMetrics, Series, error_of_difference, median, noise, windows

Level = Literal["healthy", "note", "trouble", "unknown"]


@dataclass(frozen=True)
class Result:
    """What a rule says of a run.

    level: trouble asks for an investigation, a note is worth knowing. evidence: numbers and steps.
    """

    level: Level
    title: str
    evidence: str = ""


@dataclass(frozen=True)
class Rule:
    """One sign. judge returns None when its numbers are missing or too few.

    name: the healthy state. threshold, reason, advice: as docs/diagnosis.md prints them.
    """

    name: str
    judge: Callable[[RunMetrics], Result | None]
    needs: str
    threshold: str
    reason: str
    advice: str


def diagnose(data: RunData) -> dict[str, Result]:
    """Return the result of each rule by its name, in the order of the table."""
    run = RunMetrics(data)
    return {rule.name: rule.judge(run) or Result("unknown", rule.needs) for rule in RULES}


def graded(value: float, note: float, trouble: float, titles: tuple[str, str], evidence: str) -> Result:
    """Return the result for a number that is better when it is small. titles: below both limits, and above."""
    if value >= trouble:
        return Result("trouble", titles[1], evidence)
    if value >= note:
        return Result("note", titles[1], evidence)
    return Result("healthy", titles[0], evidence)


# ---- the run as a whole ----

SKIPPED_SHARE = 0.01


def everything_finite(run: RunMetrics) -> Result | None:
    failure = run.data.failure or {}
    events = [row for row in run.data.events("nonfinite") if row.get("action") != "warn"]
    fatal = [row for row in events if row.get("action") != "skip"]
    logged: list[int] = []
    for name in ("train/loss", "train/loss_ema", "optim/grad_norm"):
        logged += run.nonfinite_steps(name)
    steps = sorted({int(row["step"]) for row in events} | set(logged))
    parts = [f"first at step {steps[0]}"] if steps else []
    if fatal or logged or (failure.get("status") == 76 and not run.data.events("spike")):
        parts += [str(row["tensor"]) for row in fatal[:1] if row.get("tensor")]
        return Result("trouble", "a number is NaN or infinite", ", ".join(parts) or str(failure.get("message", "")))
    skipped = max(run.last("optim/skipped_steps") or 0, run.last("optim/nonfinite_steps") or 0)
    if skipped:
        made = run.step()
        evidence = ", ".join([f"{skipped:.0f} of {made:,} steps", *parts])
        return graded(skipped / max(made, 1), 0, SKIPPED_SHARE, ("", "steps were left out"), evidence)
    if not len(run.loss()):
        return None
    return Result("healthy", "every logged number is finite", f"{len(run.loss())} logged losses")


def reached_its_end(run: RunMetrics) -> Result | None:
    data, step, planned = run.data, run.step(), run.data.max_steps()
    evidence = f"step {step:,}" + (f" of {planned:,} ({step / planned:.1%})" if planned else "")
    saved = [at for at, _, whole in data.checkpoints if whole]
    # What a resumed run would start from.
    if saved:
        resume = f"newest whole checkpoint at step {max(saved):,}"
    elif data.run.model.is_dir():
        resume = "the finished model exists"
    else:
        resume = "no checkpoint to resume from"
    if data.failure:
        status = data.failure.get("status")
        evidence += f": status {status}, {data.failure.get('class')}; {resume}"
        if status in (75, 130) and saved:
            return Result("note", "the run was interrupted and can be resumed", evidence)
        return Result("trouble", "the run was stopped by a failure", evidence)
    if data.manifest.get("status") == "finished" or (planned and step >= planned):
        return Result("healthy", "the run reached its end", evidence)
    if data.is_training:
        return Result("healthy", "the run is training", evidence)
    if planned:
        return Result("trouble", "the run is unfinished", f"{evidence}; {resume}")
    return None


PASSES_NOTE, PASSES_TROUBLE = 4, 16


def few_passes(run: RunMetrics) -> Result | None:
    before = run.passes().values
    if not before.size:
        return None
    passes = float(before.max())
    titles = ("the text was not repeated often", "the text was repeated often")
    return graded(passes, PASSES_NOTE, PASSES_TROUBLE, titles, f"{passes:.0f} whole passes")


LOST = ("too long", "cut", "no target")
LOST_NOTE, LOST_TROUBLE = 0.01, 0.10


def conversations_fit(run: RunMetrics) -> Result | None:
    shares = run.manifest("shares") or {}
    shares = {name: share for name, share in shares.items() if "too long" in (share.get("lost") or {})}
    if not shares:
        return None
    lines, too_long, row_tokens = [], 0.0, run.recipe("data.row_tokens")
    for name, share in shares.items():
        lost = {what: share["lost"].get(what, 0.0) for what in LOST}
        too_long = max(too_long, lost["too long"])
        if max(lost.values()) < LOST_NOTE:
            continue
        text = ", ".join(f"{what} {100 * part:.2f} %" for what, part in lost.items())
        if share.get("conversations") and row_tokens:
            text = fit_text(share["conversations"], row_tokens)
        lines.append(f"{name}: {text}")
    if not lines:
        return Result("healthy", "conversations fit the rows", f"lost of each source: below {LOST_NOTE:.0%}")
    level: Level = "trouble" if too_long >= LOST_TROUBLE else "note"
    return Result(level, "conversations are left out or cut", "; ".join(lines))


# ---- learning rate, loss, gradients ----

LONG_WARMUP = 0.2


def beyond_warmup(run: RunMetrics) -> Result | None:
    step, planned, warmup = run.step(), run.data.max_steps(), run.warmup_steps()
    if warmup is not None and step:
        steps = max(step, planned or 0)
        evidence = f"{step:,} steps made, {warmup:,} of warm-up"
        if run.is_warming_up() and warmup < (planned or 0):
            return Result("healthy", "the warm-up has not ended yet", evidence)
        if warmup > 0 and step <= warmup:
            return Result("trouble", "the run ends inside its warm-up", f"{evidence}: {step / warmup:.0%} of it")
        if warmup > LONG_WARMUP * steps:
            return Result("note", "the warm-up is long", f"{evidence}, {warmup / steps:.0%} of the run")
        return Result("healthy", "the warm-up is over", evidence)
    # Without a recipe the logged rates tell: in a warm-up they rise to the end.
    rate = run.rate()
    if len(rate) < 10:
        return None
    last_half = rate.values[len(rate) // 2 :]
    evidence = f"last rate {rate.values[-1]:.3g} at step {rate.steps[-1]:.0f}, highest {rate.values.max():.3g}"
    if rate.values[-1] >= rate.values.max() and (np.diff(last_half) > 0).all():
        return Result("trouble", "the run ends while its learning rate still rises", evidence)
    return Result("healthy", "the rate had stopped rising", evidence)


LOGGED, STEPS = 12, 50  # of a loss before its fall is judged: three values at either end
FALL_FROM_SCRATCH = 0.05


def loss_falls(run: RunMetrics) -> Result | None:
    loss = run.loss()
    if len(loss) < LOGGED or loss.steps[-1] - loss.steps[0] < STEPS - 1 or run.is_warming_up():
        return None
    # Medians of a tenth of the values at either end: single losses wander by several percent.
    length = max(3, len(loss) // 10)
    early, late = median(loss.values[:length]), median(loss.values[-length:])
    evidence = f"{early:.4g} -> {late:.4g} (medians of the first and last {length} logged values)"
    # Trained weights gain little: there any fall beyond chance counts.
    if run.starts_trained():
        if early - late >= 2 * error_of_difference(loss.values, length):
            return Result("healthy", "the loss falls", evidence)
        return Result("note", "the loss of weights that were trained before does not fall", evidence)
    if early - late >= FALL_FROM_SCRATCH * abs(early):
        return Result("healthy", "the loss falls", evidence)
    return Result("trouble", "the loss is flat", evidence)


WINDOWS = 10
ABOVE_START = 0.05
RISES_NOTE, RISES_TROUBLE, RISES_ERRORS = 0.01, 0.02, 3  # of windows' medians, and beyond that many standard errors


def loss_does_not_rise(run: RunMetrics) -> Result | None:
    loss = run.loss()
    if len(loss) < 15:
        return None
    # 1. Above its start: an untrained model guesses evenly, worse than that means updates that are too large.
    first = loss.values[0]
    limit = first + max(ABOVE_START * abs(first), 4 * noise(loss.values))
    pairs = np.minimum(loss.values[:-1], loss.values[1:])
    if pairs.max() > limit:
        highest = int(loss.values.argmax())
        evidence = f"first {first:.4g}, highest {loss.values[highest]:.4g} at step {loss.steps[highest]:.0f}"
        return Result("trouble", "the loss climbed above where it started", evidence)
    # 2. Above its lowest level, at the end.
    count = min(WINDOWS, len(loss) // 3)
    level, length = windows(loss.values, count), len(loss) // count
    lowest = int(level.argmin())
    rise = level[-1] - level[lowest]
    is_chance = rise <= RISES_ERRORS * error_of_difference(loss.values, length)
    step = np.array_split(loss.steps, count)[lowest][-1]
    evidence = f"lowest window {level[lowest]:.4g} (to step {step:.0f}), last window {level[-1]:.4g}"
    share = 0.0 if is_chance else rise / abs(level[lowest])
    return graded(share, RISES_NOTE, RISES_TROUBLE, ("the loss does not rise", "the loss rises"), evidence)


MANY_SPIKES, SPIKES_SHARE = 3, 0.001
SEARCHED = 20_000  # last values of a log of another program that are searched for spikes: a second


def loss_spikes(run: RunMetrics) -> Result | None:
    loss = run.loss()
    is_watched = bool(run.data.events("attempt")) and not run.data.is_imported
    count = int(loss.intervals().sum()) if is_watched else len(loss)
    if count <= ENOUGH:
        return None
    # Our own alarm sees the loss of every step and records its spikes; logs of other programs are searched here.
    if is_watched:
        steps = [row["step"] for row in run.data.events("spike") if row.get("name") == "train/loss"]
    else:
        steps = spikes_of(loss)
    of_all = f"of {count:,} {'steps' if is_watched else 'logged values'}"
    if not steps:
        return Result("healthy", "no loss spiked", f"0 {of_all}")
    listed = ", ".join(map(str, sorted(steps)[:8])) + (" ..." if len(steps) > 8 else "")
    level: Level = "trouble" if len(steps) >= max(MANY_SPIKES, SPIKES_SHARE * count) else "note"
    return Result(level, "the loss spikes", f"{len(steps)} {of_all}: step {listed}")


def spikes_of(series: Series) -> list[int]:
    """Return the steps of values far above the values before them, or at the beginning above those on both sides."""
    recent, found = RecentValues(), []
    for place, (step, value) in enumerate(zip(series.steps[-SEARCHED:], series.values[-SEARCHED:], strict=True)):
        highest = recent.highest_usual()
        if highest is not None and value > highest:
            found.append(int(step))
        recent.append(float(value))
        if place + 1 == 2 * ENOUGH:
            found += [int(series.steps[place - ago]) for ago, _ in recent.early_spikes()]
    return sorted(set(found))


CLIPPED_OFTEN, CLIPPED_STEPS = 0.5, 10


def clipping(run: RunMetrics) -> Result | None:
    norm, limit, share = run.series("optim/grad_norm"), run.recipe("train.max_grad_norm"), run.clipped()
    if limit is not None and limit <= 0:
        return Result("healthy", "clipping is off by recipe", f"train.max_grad_norm {limit}")
    steps = share.intervals()
    if steps.sum() < CLIPPED_STEPS:
        return None
    clipped = float(np.average(share.values, weights=steps))
    evidence = f"{clipped:.1%} of {steps.sum():,.0f} steps"
    if len(norm):
        evidence += f"; norm: median {median(norm.values):.3g}, highest {norm.values.max():.3g}"
    if clipped == 0:
        return Result("note", "clipping was never active", evidence)
    if clipped > CLIPPED_OFTEN:
        return Result("note", "clipping is nearly always active", evidence)
    return Result("healthy", "clipping acts now and then", evidence)


# ---- held-out text ----

FEWEST_EVALUATIONS = 3  # two differ by chance and by the fall of the loss between them
RISE_NOTE, RISE_TROUBLE = 0.005, 0.02
# Of the whole run: before it the loss falls so fast that training, logged a moment earlier, lies above.
VALIDATION_SETTLED = 0.25
BEFORE, BEFORE_SHARE = 3, 1 / 40  # training losses before an evaluation that are compared with it; of the logged ones
BELOW_TRAINING = 0.10
LOWEST_BPB = 0.5
OVERLAP_TROUBLE = 0.01  # of the validation documents that were looked for


def is_validated(run: RunMetrics) -> Result | None:
    step = run.step()
    if not step:
        return None
    measured = []
    for name in VALIDATION:
        count = int((run.series(name).steps > 0).sum())  # step 0 says nothing of what was trained
        if count:
            measured.append(f"{name} {count} times")
    during = sum(len(run.series(name)) for name in VALIDATION[1:])
    later = len(run.data.scores()) - during
    if later > 0:
        measured.append(f"{later} later scores")
    if measured:
        return Result("healthy", "validation was measured", ", ".join(measured))
    # None yet: is the first one still to come?
    first = max(run.recipe("train.eval_steps") or 0, run.recipe("train.eval_delay") or 0)
    if not first or run.recipe("train.eval_strategy") == "no":
        first = run.whole_steps()  # the last step is always evaluated
    if run.data.is_training and step <= first:
        return Result("healthy", "the first validation is to come", f"due at step {first:,.0f}; step {step:,}")
    return Result("trouble", "no validation at all", f"0 evaluations in {step:,} steps")


def validation_falls(run: RunMetrics) -> Result | None:
    name = max(VALIDATION, key=lambda name: len(run.series(name)))  # measured most often
    steps, values = run.series(name).steps, run.series(name).values
    if values.size < FEWEST_EVALUATIONS:
        return None
    lowest = int(values.argmin())
    rise = (values[-1] - values[lowest]) / abs(values[lowest]) if values[lowest] else 0.0
    evidence = (
        f"{name} lowest {values[lowest]:.4g} at step {steps[lowest]:.0f}, last {values[-1]:.4g} at step "
        f"{steps[-1]:.0f} ({rise:+.1%})"
    )
    titles = ("validation falls to its end", "validation rises again")
    return graded(rise, RISE_NOTE, RISE_TROUBLE, titles, evidence)


def no_leak(run: RunMetrics) -> Result | None:
    scores = run.series(VAL_BPB).values
    names, shares = below_training(run)
    looked, found = run.manifest("inputs.overlap.documents"), run.manifest("inputs.overlap.found", 0)
    if not scores.size and not shares.size and not looked:
        return None
    level: Level = "note"
    signs = []
    # 1. The documents themselves, looked up in the training text before step 1.
    if looked and found:
        place = run.manifest("inputs.overlap.place")
        signs.append(f"{found:,} of the first {looked:,} validation documents are in the training text ({place})")
        if found >= OVERLAP_TROUBLE * looked:
            level = "trouble"
    # 2. A score below what unseen prose allows, unless the training text was as easy when it was new.
    if scores.size and scores.min() < LOWEST_BPB and not is_predictable(run):
        signs.append(f"{VAL_BPB} reached {scores.min():.4g}")
        level = "trouble"
    # 3. Validation below training at the last two evaluations, by more than a small sample's chance.
    if shares.size >= 2 and shares[-2:].min() > BELOW_TRAINING * chance_factor(run) and loss_is_sound(run):
        signs.append(f"{names[0]} is {shares[-2:].min():.0%} below {names[1]}")
        level = "trouble"
    if signs:
        return Result(level, "validation text seems to be trained on", "; ".join(signs))
    evidence = [f"lowest {VAL_BPB} {scores.min():.4g}"] if scores.size else []
    if shares.size:
        evidence.append(f"{names[0]} against {names[1]} {-shares[-1]:+.1%}")
    if looked:
        evidence.append(f"none of the first {looked:,} validation documents found in the training text")
    return Result("healthy", "no sign that validation text was trained on", ", ".join(evidence))


def below_training(run: RunMetrics) -> tuple[tuple[str, str], np.ndarray]:
    """Return which numbers are compared, and at each evaluation the share by which validation is below training.

    In bits per byte where the run has both: a token of other text, or of rows that are packed in another way, is
    another measure. Training is the median of the values logged just before.
    """
    names = ("val/loss", run.data.loss_name())
    for pair in ((VAL_BPB, "train/bpb"), (SFT_BPB, "train/assistant_bpb")):
        if len(run.series(pair[0])) and len(run.series(pair[1])):
            names = pair
            break
    validation, training = run.series(names[0]), run.series(names[1])
    length = max(BEFORE, int(BEFORE_SHARE * len(training)))
    shares = []
    for step, value in zip(validation.steps, validation.values, strict=True):
        end = int(np.searchsorted(training.steps, step, side="right"))
        before = training.values[max(end - length, 0) : end]
        if step >= VALIDATION_SETTLED * run.whole_steps() and before.size == length:
            shares.append(1 - value / median(before))
    return names, np.array(shares)


def is_predictable(run: RunMetrics) -> bool:
    """Return whether text that was trained on for the first time, which no model knows by heart, was as easy."""
    training, epoch = run.series("train/bpb"), run.passes()
    if not len(epoch):
        return False
    again = epoch.steps[epoch.values >= 1]
    first = training.values[training.steps < again[0]] if again.size else training.values
    return first.size >= BEFORE and bool(np.sort(first)[BEFORE - 1] < LOWEST_BPB)


def chance_factor(run: RunMetrics) -> float:
    """Return how many times as much a small validation differs by chance than one of ENOUGH_BYTES."""
    scored = run.manifest("inputs.validation_bytes")
    return max(1.0, (ENOUGH_BYTES / max(scored.values())) ** 0.5) if scored else 1.0


def loss_is_sound(run: RunMetrics) -> bool:
    """Return whether the loss fell and stayed down: one that did not lies above any validation."""
    results = (loss_does_not_rise(run), loss_falls(run))
    return all(result is None or result.level != "trouble" for result in results)


# ---- the machine ----

TIMED = 15  # logged step times: five for each third
DRIFT_NOTE, DRIFT_TROUBLE, DRIFT_WINDOWS = 0.10, 0.25, 5
UTIL_NOTE, UTIL_TROUBLE = 90.0, 50.0
MFU_NOTE, MFU_TROUBLE = 30.0, 10.0
WAIT_NOTE, WAIT_TROUBLE = 0.03, 0.10


def step_time_stays(run: RunMetrics) -> Result | None:
    times = run.timed("perf/step_s").values
    times = times[times > 0]  # another program rounded a short one to 0
    if times.size < TIMED:
        return None
    first, middle, last = windows(times, 3)
    fast = [float(np.quantile(part, 0.1)) for part in np.array_split(times, 3)]
    # Neighbours on a shared machine leave some steps as fast as ever; what leaks slows every step.
    growth = min(last / first, fast[2] / fast[0]) - 1
    is_certain = first < middle < last and last - first > 3 * error_of_difference(times, times.size // 3)
    is_steady = bool((np.diff(windows(times, DRIFT_WINDOWS)) > 0).all())
    evidence = f"medians of the thirds {first:.3g}, {middle:.3g}, {last:.3g} s ({last / first - 1:+.0%})"
    titles = ("the step time does not drift", "the step time drifts upward")
    trouble = DRIFT_TROUBLE if is_steady else np.inf
    return graded(growth if is_certain else 0.0, DRIFT_NOTE, trouble, titles, evidence)


def accelerator_is_used(run: RunMetrics) -> Result | None:
    name = "perf/mfu_pct" if len(run.series("perf/mfu_pct")) else "perf/bf16_mfu_pct"
    used, mfu = run.timed("gpu/util_pct").values, run.timed(name).values
    levels, parts = [], []
    for values, note, trouble, called in (
        (used, UTIL_NOTE, UTIL_TROUBLE, "utilisation"),
        (mfu, MFU_NOTE, MFU_TROUBLE, "MFU"),
    ):
        if values.size < 5:
            continue
        middle = median(values)
        parts.append(f"median {called} {middle:.1f} %")
        levels.append(int(middle < note) + int(middle < trouble))  # 0 healthy, 1 a note, 2 trouble
    if not levels:
        return None
    if max(levels) == 2:
        return Result("trouble", "the accelerator is mostly idle or badly used", ", ".join(parts))
    if max(levels) == 1:
        return Result("note", "the accelerator could do more", ", ".join(parts))
    return Result("healthy", "the accelerator is used", ", ".join(parts))


def data_does_not_stall(run: RunMetrics) -> Result | None:
    waits = run.timed("data/wait_frac")
    if len(waits) < 5:
        return None
    share = float(np.average(waits.values, weights=np.diff(run.series("data/wait_frac").steps)[-len(waits) :]))
    worst = int(waits.values.argmax())
    evidence = f"{share:.1%} of the time in steps; worst {waits.values[worst]:.0%} at step {waits.steps[worst]:.0f}"
    titles = ("the steps do not wait for data", "the steps wait for data")
    return graded(share, WAIT_NOTE, WAIT_TROUBLE, titles, evidence)


# In the order in which a run is read.
RULES = [
    Rule(
        "every number is finite",
        everything_finite,
        needs="train/loss",
        threshold=f"no loss or gradient norm is NaN or infinite; skipped steps are a note up to {SKIPPED_SHARE:.0%}",
        reason="one NaN in the weights ends a run for good; fp16's loss scaler skips a few steps",
        advice="Look at the tensor and the rows that the record names; lower the rate, prefer bf16 to fp16; "
        "monitor.on_nonfinite: skip leaves single bad steps out.",
    ),
    Rule(
        "run reached its end",
        reached_its_end,
        needs="a status in the manifest, or the number of planned steps",
        threshold="the status is finished, the last planned step was made, or a process is training it",
        reason="an unfinished run has not seen the low rates of its end, where much of the loss falls",
        advice="Run the same command again: it resumes from the newest whole checkpoint. Without one it starts anew: "
        "set train.save_steps so that a crash costs minutes.",
    ),
    Rule(
        "run goes on beyond its warm-up",
        beyond_warmup,
        needs="warm-up steps in the recipe, or 10 logged learning rates",
        threshold=f"the run is longer than its warm-up; a warm-up above {LONG_WARMUP:.0%} of the steps is a note",
        reason="a run that ends inside its warm-up never saw its peak rate, so it says nothing about a whole run",
        advice="Lower warmup_steps to a tenth of the steps, or train longer; compare such runs only with each other.",
    ),
    Rule(
        "loss falls",
        loss_falls,
        needs=f"{LOGGED} logged train/loss over {STEPS} steps, after the warm-up",
        threshold=f"the median of the last tenth is {FALL_FROM_SCRATCH:.0%} below that of the first tenth; with "
        "trained weights, two standard errors below it",
        reason="from new weights word frequencies alone take more than a tenth off the loss within a hundred steps",
        advice="Check that the rate is not near 0 and that parameters require gradients; overfit a single batch; "
        "raise the rate tenfold in a short run.",
    ),
    Rule(
        "loss does not rise",
        loss_does_not_rise,
        needs="15 logged train/loss",
        threshold=f"no two values in a row are {ABOVE_START:.0%} above the first one; the last of {WINDOWS} windows "
        f"is less than {RISES_NOTE:.0%} (note) or {RISES_TROUBLE:.0%} (trouble) above the lowest",
        reason="single losses of a sound run wander by 5 % around their trend, medians of windows far less",
        advice="The rate is too high or the warm-up too short: try a third of the rate, from a checkpoint before the "
        "rise (run.fork_from). Look at the data around the lowest window.",
    ),
    Rule(
        "loss does not spike",
        loss_spikes,
        needs=f"train/loss of more than {ENOUGH} steps (of other programs: logged values)",
        threshold=f"the alarm recorded no spike; trouble from {MANY_SPIKES} on that are {SPIKES_SHARE:.1%} of all",
        reason="noise does not reach six standard deviations; one bad batch may, three are no accident",
        advice="Look at the rows of those steps; lower the rate or the clipping limit; monitor.on_spike: skip leaves "
        "such updates out.",
    ),
    Rule(
        "clipping acts now and then",
        clipping,
        needs=f"optim/clip_frac, or optim/grad_norm with train.max_grad_norm: of {CLIPPED_STEPS} steps",
        threshold=f"clipped in more than none and fewer than {CLIPPED_OFTEN:.0%} of the steps; a note otherwise",
        reason="a limit that always acts sets the step size instead of the learning rate",
        advice="Never: lower train.max_grad_norm to about twice the usual norm, or leave it as a safety net. Often: "
        "raise it, or lower the rate.",
    ),
    Rule(
        "something is held out",
        is_validated,
        needs="a logged step",
        threshold="at least one validation number after step 0, or its first evaluation is to come",
        reason="training loss alone cannot tell learning from memorising, nor one run from another",
        advice=f"Set data.validation and train.eval_steps, or score the checkpoints now: {program('evals')} RUN bpb.",
    ),
    Rule(
        "validation keeps falling",
        validation_falls,
        needs=f"{FEWEST_EVALUATIONS} evaluations",
        threshold=f"the last value is less than {RISE_NOTE:.1%} (note) or {RISE_TROUBLE:.0%} (trouble) above the "
        "lowest",
        reason="the same text is scored each time, so half a percent is no noise of the sample",
        advice="The run memorises: stop at the lowest value (that checkpoint is kept), use more text, fewer passes, a "
        "smaller model or dropout.",
    ),
    Rule(
        "validation text is not trained on",
        no_leak,
        needs="val/bpb, or val/loss with train/loss, or inputs.overlap in the manifest",
        threshold=f"no validation document in the training text (trouble from {OVERLAP_TROUBLE:.0%} of them); val/bpb "
        f"never below {LOWEST_BPB} where train/bpb of the first pass was not; validation less than "
        f"{BELOW_TRAINING:.0%} below training",
        reason="the largest published models need 0.6 to 0.7 bits per byte of unseen prose, and unseen text is not "
        "easier than text that was trained on",
        advice="Search the training files for validation documents (duplicates, a glob that matches both) and hold "
        "out other text. Source code and templates may be this predictable.",
    ),
    Rule(
        "text is not repeated too often",
        few_passes,
        needs="data/epoch",
        threshold=f"fewer than {PASSES_NOTE} (note) or {PASSES_TROUBLE} (trouble) whole passes over a source",
        reason="up to four passes teach nearly as much as new text, after about sixteen another one teaches nothing "
        "(Muennighoff et al. 2023)",
        advice="More text, a shorter run, or a smaller share for the small source (data.sources weight or epochs); "
        "watch validation.",
    ),
    Rule(
        "conversations fit their rows",
        conversations_fit,
        needs="shares of conversations in the manifest",
        threshold=f"conversations that are too long, cut or without an answer below {LOST_NOTE:.0%} of a source; "
        f"trouble where {LOST_TROUBLE:.0%} are too long",
        reason="long answers go first, and the model learns to be short",
        advice="Longer rows (data.row_tokens), as the evidence says, or conversations split in the files.",
    ),
    Rule(
        "step time stays the same",
        step_time_stays,
        needs=f"{TIMED} logged perf/step_s",
        threshold=f"from the first to the last third the median grows by less than {DRIFT_NOTE:.0%} (note) or "
        f"{DRIFT_TROUBLE:.0%} (trouble, where {DRIFT_WINDOWS} windows grow one after the other), and so do the "
        "fastest steps",
        reason="a GPU run keeps its step time to 1 or 2 %; what leaks grows and slows every step",
        advice="Look for what grows: a list that a callback keeps, open files, a fragmenting allocator, heat "
        "(gpu/sm_clock_mhz). Profile an early and a late step (monitor.profile_steps).",
    ),
    Rule(
        "the accelerator is used",
        accelerator_is_used,
        needs="gpu/util_pct, perf/mfu_pct or perf/bf16_mfu_pct: 5 logged values",
        threshold=f"median utilisation at least {UTIL_NOTE:.0f} % (below {UTIL_TROUBLE:.0f} % trouble) and median MFU "
        f"at least {MFU_NOTE:.0f} % (below {MFU_TROUBLE:.0f} % trouble)",
        reason="utilisation below 100 % is a GPU without work; published pretraining reaches 30 to 60 % of the peak",
        advice="Larger micro-batches, train.torch_compile, bf16, a faster attention; where utilisation is low too, "
        "data and host are the bottleneck.",
    ),
    Rule(
        "data does not stall the steps",
        data_does_not_stall,
        needs="data/wait_frac: 5 logged values",
        threshold=f"the steps waited for rows for less than {WAIT_NOTE:.0%} (note) or {WAIT_TROUBLE:.0%} (trouble) of "
        "their time, the first logged value left out",
        reason="rows are prepared ahead, so a sound run waits for under 1 %",
        advice=f"Prepare the data before the run ({program('data')} RECIPE), copy it to a local disk, more "
        "data.num_proc, a cheaper format function.",
    ),
]
