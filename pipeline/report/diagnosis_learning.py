"""Rules on what a run learns: loss, gradients, rates, stability, and validation beside training."""

from typing import Any, NamedTuple

import numpy as np

from pipeline.data.losses import ENOUGH_BYTES
from pipeline.metrics import (
    AROUND,
    DEVIATIONS,
    EARLY,
    ENOUGH,
    HIGH_NORM,
    SFT_BPB,
    VAL_BPB,
    VALIDATION,
    WINDOW,
    RecentValues,
)
from pipeline.process.commands import program
from pipeline.report.diagnosis_finding import (
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

# Rules on learning: learning rate and loss.

LOGGED, STEPS = 12, 50  # of a loss before its fall is judged: three values at either end, and more than a first look
FALL_FROM_SCRATCH = 0.05
WINDOWS = 10
RISE = 0.05
RISES_NOTE, RISES_TROUBLE, RISES_ERRORS = 0.01, 0.02, 3  # of windows' medians, and beyond that many standard errors
LONG_WARMUP = 0.2


# ---- learning rate ----


@rule(
    "run goes on beyond its warm-up",
    needs="warm-up steps in the recipe, or 10 logged learning rates",
    threshold=(
        "the last step, while the run trains the last planned one, lies behind the warm-up; a warm-up of more "
        f"than {LONG_WARMUP:.0%} of the steps is a note; without warm-up in the recipe: the last logged rate is "
        "not the highest of a rising last half"
    ),
    reason=(
        "a run that ends inside its warm-up never saw its peak rate, so it says nothing of a whole run; the "
        "recipe's own default is at most a fifth"
    ),
    advice=(
        "Lower warmup_steps to a tenth of the steps that will be made, or train longer; compare such runs only "
        "with each other."
    ),
)
def beyond_warmup(figures: Figures) -> Verdict | None:
    step, planned, warmup = figures.step(), figures.data.max_steps(), figures.warmup_steps()
    rate = figures.rate()
    if warmup is not None and step:
        evidence = f"{step:,} steps made, {warmup:,} of warm-up"
        if figures.is_warming_up() and warmup < (planned or 0):
            return Verdict("healthy", "the warm-up goes on", evidence)
        if step <= warmup and warmup > 0:
            return Verdict(
                "trouble",
                "the run ends inside its warm-up",
                f"{evidence}: {step / warmup:.0%} of the way to the peak rate",
            )
        if warmup > LONG_WARMUP * max(step, planned or 0):
            return Verdict(
                "note", "the warm-up is long", f"{evidence}, {warmup / max(step, planned or 0):.0%} of the run"
            )
        return Verdict("healthy", "the warm-up is over", evidence)
    if len(rate) < 10:
        return None
    last_half = rate.values[len(rate) // 2 :]
    evidence = (
        f"last rate {rate.values[-1]:.3g} at step {rate.steps[-1]:.0f}, highest {rate.values.max():.3g} at step "
        f"{rate.steps[rate.values.argmax()]:.0f}"
    )
    if rate.values[-1] >= rate.values.max() and (np.diff(last_half) > 0).all():
        return Verdict("trouble", "the run ends while its learning rate still rises", evidence)
    return Verdict("healthy", "the rate had stopped rising", evidence)


# ---- loss ----


@rule(
    "loss falls",
    needs=f"{LOGGED} logged train/loss over {STEPS} steps; of a run that trains, the end of its warm-up",
    threshold=(
        f"the median of the last tenth is at least {FALL_FROM_SCRATCH:.0%} below that of the first tenth; with "
        "weights that were trained before: below it by two standard errors"
    ),
    reason=(
        "from new weights the loss starts near ln(vocabulary) and word frequencies alone take more than a tenth "
        "off it within a hundred steps; trained weights may have little left to learn"
    ),
    advice=(
        "Check that the rate is not near 0 and that parameters require gradients; overfit a single batch; raise "
        "the rate tenfold in a short run."
    ),
)
def loss_falls(figures: Figures) -> Verdict | None:
    loss = figures.loss()
    if len(loss) < LOGGED or loss.steps[-1] - loss.steps[0] < STEPS - 1 or figures.is_warming_up():
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
    reason=(
        "at its start a model guesses evenly; worse than that for longer than one value means updates that are "
        "too large"
    ),
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
        return Verdict(
            "trouble",
            "the loss climbed above where it started",
            f"{evidence}; {int((loss.values > limit).sum())} of {len(loss)} logged values above {limit:.4g}",
        )
    return Verdict("healthy", "the loss never climbed above its start", evidence)


@rule(
    "loss does not rise",
    needs="15 logged train/loss",
    threshold=(
        f"the median of the last of {WINDOWS} windows is less than {RISES_NOTE:.0%} (note) or "
        f"{RISES_TROUBLE:.0%} (trouble), or {RISES_ERRORS} standard errors, above the lowest window"
    ),
    reason=(
        "single logged losses of a sound run wander by 5 % around their trend; medians of windows wander far "
        "less, and a sound run ends at its lowest"
    ),
    advice=(
        "Look at rate, data order and source shares around the lowest window; go back to a checkpoint before it "
        "(run.fork_from) with a lower rate."
    ),
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


# Rules on held-out text: validation beside training.

FEWEST_EVALUATIONS = 3  # two differ by chance and by the fall of the loss between them
RISE_NOTE, RISE_TROUBLE = 0.005, 0.02
GAP_NOTE, GAP_TROUBLE = 0.05, 0.15
# Of the whole run: before it the loss falls so fast that training, logged a moment earlier, lies above.
VALIDATION_SETTLED = 0.25
BESIDE, BESIDE_SHARE = 3, 1 / 40  # training losses before an evaluation that are compared with it; of the logged ones
BELOW_NOTE, BELOW_TROUBLE = 0.05, 0.10
LOWEST_BPB = 0.5
FEW_BYTES = 10_000
OVERLAP_TROUBLE = 0.01  # of the validation documents that were looked for


class Pairs(NamedTuple):
    """Validation and training at the evaluations after VALIDATION_SETTLED of the run; names: of the two numbers.

    In bits per byte, where the run has both: a token of other text, or of rows that are packed in another way, is
    another one.
    """

    names: tuple[str, str]
    steps: np.ndarray
    validation: np.ndarray
    training: np.ndarray


def held_out(figures: Figures) -> tuple[str, Series] | None:
    """Return the validation number that was measured most often, and its values."""
    found = [(name, figures.series(name)) for name in VALIDATION if len(figures.series(name))]
    return max(found, key=lambda pair: len(pair[1])) if found else None


def beside(training: Series) -> int:
    """Return how many logged losses before an evaluation stand for the training there: few are noisy, many are old."""
    return max(BESIDE, int(BESIDE_SHARE * len(training)))


def beside_training(figures: Figures) -> Pairs:
    """Return the validation numbers, each with the median of the training numbers logged just before it."""
    nats = ("val/loss", figures.data.loss_name())
    of_bytes = ((VAL_BPB, "train/bpb"), (SFT_BPB, "train/assistant_bpb"))
    names = next((names for names in of_bytes if all(len(figures.series(name)) for name in names)), nats)
    validation, training = map(figures.series, names)
    length, first_step, pairs = beside(training), VALIDATION_SETTLED * figures.whole_steps(), []
    for step, value in zip(validation.steps, validation.values, strict=True):
        end = int(np.searchsorted(training.steps, step, side="right"))
        before = training.values[max(end - length, 0) : end]
        if step >= first_step and before.size == length:
            pairs.append((step, value, median(before)))
    return Pairs(names, *np.array(pairs, dtype=np.float64).reshape(-1, 3).T)


@rule(
    "something is held out",
    needs="a logged step",
    threshold=(
        f"at least one validation number after step 0, of the run or of {program('evals')}, or its first "
        "evaluation is to come"
    ),
    reason="training loss alone cannot tell learning from memorising, nor one run from another",
    advice=f"Set data.validation and train.eval_steps, or score the checkpoints now: {program('evals')} RUN bpb.",
)
def is_validated(figures: Figures) -> Verdict | None:
    if not figures.step():
        return None
    after = {name: int((figures.series(name).steps > 0).sum()) for name in VALIDATION}
    measured = {name: count for name, count in after.items() if count}
    later = len(figures.data.scores()) - sum(len(figures.series(name)) for name in VALIDATION[1:])
    if measured or later > 0:
        parts = [f"{name} {count} times" for name, count in measured.items()]
        return Verdict(
            "healthy", "validation was measured", ", ".join(parts + ([f"{later} later scores"] if later > 0 else []))
        )
    first = max(figures.recipe("train.eval_steps") or 0, figures.recipe("train.eval_delay") or 0)
    if not first or figures.recipe("train.eval_strategy") == "no":
        first = figures.whole_steps()  # the last step always is evaluated
    if figures.data.is_training and figures.step() <= first:
        return Verdict(
            "healthy", "the first validation is to come", f"due at step {first:,.0f}; step {figures.step():,}"
        )
    return Verdict("trouble", "no validation at all", f"0 evaluations in {figures.step():,} steps")


@rule(
    "validation is large enough",
    needs="inputs.validation_bytes in the manifest",
    threshold=(
        f"one of the validation numbers is over at least {ENOUGH_BYTES:,} bytes (note) or {FEW_BYTES:,} bytes "
        "(trouble) of text"
    ),
    reason=(
        "documents differ by a tenth or more in bits per byte: over a few of them two runs or steps differ by "
        "chance, and a subject that is missing there is never looked at"
    ),
    advice=(
        "Name more text in data.validation (or in the files, of which a part is held out); where "
        "evals.bpb.tokens is what limits it, raise that."
    ),
)
def is_large_enough(figures: Figures) -> Verdict | None:
    scored = figures.manifest("inputs.validation_bytes")
    if not scored:
        return None
    evidence = ", ".join(f"{name} is over {count:,} bytes" for name, count in scored.items())
    if (most := max(scored.values())) < ENOUGH_BYTES:
        return Verdict("trouble" if most < FEW_BYTES else "note", "validation is small", evidence)
    return Verdict("healthy", "validation is large enough", evidence)


@rule(
    "validation keeps falling",
    needs=f"{FEWEST_EVALUATIONS} evaluations",
    threshold=f"the last value is less than {RISE_NOTE:.1%} (note) or {RISE_TROUBLE:.0%} (trouble) above the lowest",
    reason="the same text is scored each time, so that differences of half a percent are no noise of the sample",
    advice=(
        "The run memorises: stop at the lowest value (that checkpoint is kept), use more text, fewer passes, a "
        "smaller model or dropout."
    ),
)
def validation_falls(figures: Figures) -> Verdict | None:
    found = held_out(figures)
    if found is None or len(found[1]) < FEWEST_EVALUATIONS:
        return None
    name, (steps, values) = found[0], (found[1].steps, found[1].values)
    lowest = int(values.argmin())
    rise = (values[-1] - values[lowest]) / abs(values[lowest]) if values[lowest] else 0.0
    return graded(
        rise,
        note=RISE_NOTE,
        trouble=RISE_TROUBLE,
        titles=("validation falls to its end", "validation rises again"),
        evidence=(
            f"{name} lowest {values[lowest]:.4g} at step {steps[lowest]:.0f}, last {values[-1]:.4g} at step "
            f"{steps[-1]:.0f} ({rise:+.1%})"
        ),
    )


@rule(
    "validation stays beside training",
    needs=(
        f"{FEWEST_EVALUATIONS} evaluations in the last three quarters of the run: val/bpb with train/bpb (SFT: "
        "assistant_bpb of both), else val/loss with train/loss"
    ),
    threshold=(
        f"validation - training (median of the last {BESIDE_SHARE:.1%} of the logged ones, {BESIDE} at least) "
        f"widened by less than {GAP_NOTE:.0%} (note) or, where validation is {RISE_NOTE:.1%} above its lowest, "
        f"{GAP_TROUBLE:.0%} (trouble) of validation since it was smallest, or by less than three standard errors"
    ),
    reason=(
        "a gap that stays is the difference of two texts; one that widens is memory, which harms as soon as "
        "validation falls no more. Means of the texts differ by a percent or two between evaluations"
    ),
    advice=(
        "More or other text, fewer passes over it, dropout or a smaller model; check that validation is of the "
        "same kind as training."
    ),
)
def gap_stays(figures: Figures) -> Verdict | None:
    pairs = beside_training(figures)
    if pairs.steps.size < FEWEST_EVALUATIONS:
        return None
    gap = pairs.validation - pairs.training
    least = int(gap.argmin())
    widened = (gap[-1] - gap[least]) / abs(pairs.validation[-1])
    held_out_values, training = (figures.series(name) for name in pairs.names)
    certain = gap[-1] - gap[least] > 3 * error_of_difference(training.values, beside(training))
    falls = pairs.validation[-1] < (1 + RISE_NOTE) * held_out_values.values.min()
    return graded(
        widened if certain else 0.0,
        note=GAP_NOTE,
        trouble=np.inf if falls else GAP_TROUBLE,
        titles=("validation follows training", "validation moves away from training"),
        evidence=(
            f"val - train {gap[least]:+.3g} at step {pairs.steps[least]:.0f}, {gap[-1]:+.3g} at step "
            f"{pairs.steps[-1]:.0f} ({pairs.names[1]} {pairs.training[-1]:.4g}, {pairs.names[0]} "
            f"{pairs.validation[-1]:.4g})"
        ),
    )


@rule(
    "validation text is not trained on",
    needs="val/bpb, or val/loss with train/loss, or inputs.overlap in the manifest",
    threshold=(
        f"none of: validation documents in the training text (note; trouble from {OVERLAP_TROUBLE:.0%} of those "
        f"looked for on); val/bpb ever below {LOWEST_BPB} where train/bpb of the first pass never was; beside a "
        "train/loss that falls and does not climb again: validation (bits per byte, in nats where the run has not "
        f"both) at the last two evaluations more than {BELOW_NOTE:.0%} (note) or {BELOW_TROUBLE:.0%} (trouble) below "
        f"training, of fewer than {ENOUGH_BYTES:,} bytes by the square root more"
    ),
    reason=(
        "documents known by heart take up to their share from val/bpb, and two runs often differ by no more than 1 %; "
        "the largest published models need 0.6 to 0.7 bits per byte of unseen prose; and unseen text is not easier "
        "than learnt text"
    ),
    advice=(
        "Search the training files for validation documents (duplicates, a glob that matches both) and hold out "
        "other text. Source code and templates may honestly be this predictable."
    ),
)
def is_no_leak(figures: Figures) -> Verdict | None:
    scores, pairs = figures.series(VAL_BPB).values, beside_training(figures)
    bpb = float(scores.min()) if scores.size else None  # it was reached, whatever came after
    looked, found = figures.manifest("inputs.overlap.documents"), figures.manifest("inputs.overlap.found", 0)
    if bpb is None and not pairs.steps.size and not looked:
        return None
    suspicions: list[tuple[str, str]] = []
    if looked and found:
        level = "trouble" if found >= OVERLAP_TROUBLE * looked else "note"
        place = figures.manifest("inputs.overlap.place")
        suspicions.append(
            (
                level,
                f"{found:,} of the first {looked:,} validation documents stand in the training text (such as {place})",
            )
        )
    if bpb is not None and bpb < LOWEST_BPB and not _is_predictable(figures):
        suspicions.append(("trouble", f"val/bpb reached {bpb:.4g}"))
    sick = [loss_below_start.finding(figures), loss_does_not_rise.finding(figures), loss_falls.finding(figures)]
    # A loss that climbed or never fell lies above any other: no sign of text that is known by heart.
    is_sound = all(finding.level != "trouble" for finding in sick)
    if pairs.steps.size >= 2 and is_sound:
        below = float(((pairs.training - pairs.validation) / pairs.training)[-2:].min())
        wider = _sample_factor(figures)
        if below > BELOW_NOTE * wider:
            level = "trouble" if below > BELOW_TROUBLE * wider else "note"
            suspicions.append(
                (
                    level,
                    (
                        f"{pairs.names[0]} {pairs.validation[-1]:.4g} is {below:.0%} below {pairs.names[1]} "
                        f"{pairs.training[-1]:.4g}"
                    ),
                )
            )
    if not suspicions:
        return Verdict("healthy", "nothing says that validation text was trained on", _beside(bpb, pairs, looked))
    is_trouble = any(level == "trouble" for level, _ in suspicions)
    return Verdict(
        "trouble" if is_trouble else "note",
        "validation text seems to be trained on" if is_trouble else "validation is suspiciously near to training",
        "; ".join(text for _, text in suspicions),
    )


def _is_predictable(figures: Figures) -> bool:
    """Return whether training text that was read for the first time, and is known by heart by no model, was as
    easy."""
    training, epoch = figures.series("train/bpb"), figures.passes()
    if not len(epoch):
        return False
    again = epoch.steps[epoch.values >= 1]
    first = training.values[training.steps < again[0]] if again.size else training.values
    return first.size >= BESIDE and bool(np.sort(first)[BESIDE - 1] < LOWEST_BPB)


def _sample_factor(figures: Figures) -> float:
    """Return how many times as much a small validation differs by chance than one of ENOUGH_BYTES."""
    scored = figures.manifest("inputs.validation_bytes")
    return max(1.0, (ENOUGH_BYTES / max(scored.values())) ** 0.5) if scored else 1.0


def _beside(bpb: float | None, pairs: Pairs, looked: int | None) -> str:
    parts = [f"lowest val/bpb {bpb:.4g}"] if bpb is not None else []
    if pairs.steps.size:
        parts.append(f"{pairs.names[0]} {pairs.validation[-1]:.4g} beside {pairs.names[1]} {pairs.training[-1]:.4g}")
    if looked:
        parts.append(
            f"none of the first {looked:,} validation documents found in the training text that was looked through"
        )
    return ", ".join(parts)


# Rules on stability: spikes, gradient norm, clipping, numbers that are not finite.

MANY_SPIKES, SPIKES_SHARE = 3, 0.001
GROWTH_NOTE, GROWTH_TROUBLE, GRADIENT_COLLAPSE = 2.5, 4.0, 100.0
NORM_WINDOWS = 10  # of 8 values at least
CLIPPED_OFTEN, CLIPPED_STEPS = 0.5, 10
SKIPPED_SHARE = 0.01
SEARCHED = 20_000  # last values of an imported run that are searched for spikes: a second


def spikes(figures: Figures, name: str, series: Series) -> dict[int, float]:
    """Return steps of values far above their last ones, and how many times the usual value each is.

    In our own runs the alarm recorded them; in imported ones they are found here.
    """
    if figures.is_watched():
        events = [row for row in figures.data.events("spike") if row.get("name") == name]
        return {row["step"]: _height(series, row) for row in events}
    recent, found = RecentValues(), {}
    for step, value in zip(series.steps[-SEARCHED:].tolist(), series.values[-SEARCHED:].tolist(), strict=True):
        highest = recent.highest_usual()
        if highest is not None and value > highest:
            found[int(step)] = _height(series, {"step": step})
        recent.append(value)
    return found


def early_spikes(series: Series) -> list[int]:
    """Return the steps of the first values that are far above those on both sides."""
    first = RecentValues(series.values[: ENOUGH + AROUND].tolist())
    return [int(series.steps[len(first) - 1 - ago]) for ago, _ in first.early_spikes()]


def _spiked(
    figures: Figures, name: str, series: Series, *, of: str, early: bool = False, high: float = 0.0
) -> Verdict | None:
    """Return the verdict on spikes. high: times the usual value that a spike must reach to be of the many that are
    trouble."""
    if not len(series):
        return None
    by_step = figures.by_step(series)
    count = int(np.where(by_step, series.intervals(), 1).sum())
    if count <= ENOUGH:
        return None
    found = spikes(figures, name, series)
    if early:  # of steps that were looked at one by one the alarm recorded them
        found |= dict.fromkeys(early_spikes(series.where(~by_step)), np.inf)
    of_all = f"of {count:,} {'steps' if by_step.any() else 'logged values'}"
    if not found:
        return Verdict("healthy", f"no {of} spiked", f"0 {of_all}")
    listed = ", ".join(map(str, sorted(found)[:8])) + (" ..." if len(found) > 8 else "")
    evidence = f"{len(found)} {of_all}: step {listed}"
    harmful = sum(height >= high for height in found.values())
    if harmful < len(found):
        evidence += f"; {harmful} of them at {high:g} times the usual or more"
    many = harmful >= max(MANY_SPIKES, SPIKES_SHARE * count)
    return Verdict("trouble" if many else "note", f"the {of} spikes", evidence)


def _height(series: Series, spike: dict[str, Any]) -> float:
    """Return how many times the median of the values before it a spike is."""
    value, usual = spike.get("value"), spike.get("usual")
    if not (isinstance(value, (int, float)) and isinstance(usual, (int, float))):  # as of earlier versions
        at = int(np.searchsorted(series.steps, spike["step"]))
        before = series.values[max(at - WINDOW, 0) : at]
        value, usual = series.values[min(at, len(series) - 1)], median(before) if before.size else 0.0
    return float(value) / usual if usual > 0 else np.inf


SPIKE_THRESHOLD = (
    f"no value above the median of the last {WINDOW} by {DEVIATIONS:.0f} robust standard deviations and a tenth; "
    f"trouble from {MANY_SPIKES} such values on that are {SPIKES_SHARE:.1%} of all"
)
SPIKE_REASON = (
    "noise does not reach six standard deviations; one bad batch may, three are no accident. The same alarm speaks "
    "while a run trains"
)


@rule(
    "loss does not spike",
    needs=f"train/loss of more than {ENOUGH} steps (of other programs and earlier versions: logged values)",
    threshold=f"{SPIKE_THRESHOLD}; nor one of the first {ENOUGH} above {EARLY:g} times the values on both sides",
    reason=SPIKE_REASON,
    advice=(
        "Look at the rows of those steps; lower the rate or the clipping limit; monitor.on_spike: skip leaves "
        "such updates out."
    ),
)
def loss_spikes(figures: Figures) -> Verdict | None:
    return _spiked(figures, "train/loss", figures.loss(), of="loss", early=True)


@rule(
    "gradient norm does not spike",
    needs=f"optim/grad_norm of more than {ENOUGH} steps (of other programs and earlier versions: logged values)",
    threshold=(
        f"{SPIKE_THRESHOLD} and reach {HIGH_NORM:g} times the usual norm; a note where every step's loss was "
        f"looked at and none behind the first {ENOUGH} spiked"
    ),
    reason=(
        f"{SPIKE_REASON}; a norm that stays below twice the usual one moves the weights hardly more than any "
        "other, and what harms shows in the loss"
    ),
    advice=(
        "Clip at about the usual norm (train.max_grad_norm); a norm that spikes before the loss does is an early "
        "warning."
    ),
)
def gradient_spikes(figures: Figures) -> Verdict | None:
    norm = figures.series("optim/grad_norm")
    found = _spiked(figures, "optim/grad_norm", norm, of="gradient norm", high=HIGH_NORM)
    if found is None or found.level != "trouble" or not figures.by_step(norm).all():
        return found
    if any(step > ENOUGH for step in spikes(figures, "train/loss", figures.loss())):
        return found
    return Verdict("note", found.title, f"{found.evidence}; no step's loss spiked")


@rule(
    "gradient norm stays bounded",
    needs="16 logged optim/grad_norm",
    threshold=(
        f"the median of the last tenth is less than {GROWTH_NOTE:g} (note) or {GROWTH_TROUBLE:g} times (trouble) "
        f"the lowest of {NORM_WINDOWS} windows after the warm-up; that of the last quarter more than "
        f"1/{GRADIENT_COLLAPSE:.0f} of the second's"
    ),
    reason=(
        "norms of sound runs fall through the warm-up (5 times in the NeMo runs this page was made for) and "
        "hardly grow after it (1.5 times at most in the 23 runs that were looked at); four times more explodes, "
        "a hundred times less has stopped learning"
    ),
    advice=(
        "Grown: lower the rate, clip. Collapsed: look for saturated or frozen parts, an underflow of fp16, or "
        "text that is already known by heart."
    ),
)
def gradient_bounded(figures: Figures) -> Verdict | None:
    norm, highest = figures.usual_norm(), figures.series("optim/grad_norm").values.max(initial=0)
    if len(norm) < 16:
        return None
    quarters, end = windows(norm.values, 4), median(norm.values[-max(3, len(norm) // 10) :])
    warm = norm.values[norm.steps > (figures.warmup_steps() or 0)]
    warm = warm if warm.size >= 16 else norm.values
    second, last = quarters[1], quarters[3]
    least = windows(warm, min(warm.size // 8, NORM_WINDOWS)).min()
    evidence = (
        f"median {second:.3g} in the second quarter, {last:.3g} in the last; {least:.3g} in the lowest window, "
        f"{end:.3g} in the last tenth; highest {highest:.3g}"
    )
    if not last:
        return Verdict("trouble", "the gradient norm is 0", evidence)
    if end >= GROWTH_NOTE * least:
        return graded(
            end / max(least, 1e-30),
            note=GROWTH_NOTE,
            trouble=GROWTH_TROUBLE,
            titles=("", "the gradient norm grows"),
            evidence=evidence,
        )
    if last <= second / GRADIENT_COLLAPSE:
        return Verdict("trouble", "the gradient norm collapses", evidence)
    return Verdict("healthy", "the gradient norm stays bounded", evidence)


@rule(
    "clipping acts now and then",
    needs=f"optim/clip_frac, or optim/grad_norm with train.max_grad_norm: of {CLIPPED_STEPS} steps",
    threshold=f"clipped in more than none and fewer than {CLIPPED_OFTEN:.0%} of the steps; a note otherwise",
    reason=(
        "a limit that is never reached protects from nothing that was seen; one that always acts sets the step "
        "size instead of the learning rate"
    ),
    advice=(
        "Never: lower train.max_grad_norm to about twice the usual norm, or accept that it is a safety net. "
        "Often: raise it, or lower the rate."
    ),
)
def clipping(figures: Figures) -> Verdict | None:
    norm, limit = figures.series("optim/grad_norm"), figures.recipe("train.max_grad_norm")
    share = figures.clipped()
    if limit is not None and limit <= 0:
        return Verdict("healthy", "clipping is off by recipe", f"train.max_grad_norm {limit}")
    steps = share.intervals()
    if steps.sum() < CLIPPED_STEPS:
        return None
    clipped = float(np.average(share.values, weights=steps))
    evidence = f"{clipped:.1%} of {steps.sum():,.0f} steps"
    if len(norm):
        evidence += f"; norm: median {median(figures.usual_norm().values):.3g}, highest {norm.values.max():.3g}" + (
            f", limit {limit:g}" if limit else ""
        )
    if clipped == 0:
        return Verdict("note", "clipping was never active", evidence)
    if clipped > CLIPPED_OFTEN:
        return Verdict("note", "clipping is nearly always active", evidence)
    return Verdict("healthy", "clipping acts now and then", evidence)


@rule(
    "every number is finite",
    needs="train/loss",
    threshold=(
        "no loss, gradient norm or parameter is NaN or infinite; steps left out for it are a note up to "
        f"{SKIPPED_SHARE:.0%} of the steps"
    ),
    reason=(
        "one NaN in the weights ends a run for good; fp16's loss scaler skips a few steps while it finds its "
        "scale, and a few bad rows pass"
    ),
    advice=(
        "Look at the tensor and the rows that the record names; lower the rate, prefer bf16 to fp16; "
        "monitor.on_nonfinite: skip leaves single bad steps out."
    ),
)
def everything_finite(figures: Figures) -> Verdict | None:
    failure, made = figures.data.failure or {}, figures.step()
    events = [row for row in figures.data.events("nonfinite") if row.get("action") != "warn"]
    not_skipped = [row for row in events if row.get("action") != "skip"]
    wild = figures.wild("train/loss") + figures.wild("train/loss_ema") + figures.wild("optim/grad_norm")
    steps = sorted({int(row["step"]) for row in events} | set(wild))
    skipped = max(figures.last("optim/skipped_steps") or 0, figures.last("optim/nonfinite_steps") or 0)
    parts = [f"first at step {steps[0]}"] if steps else []
    if not_skipped or wild or (failure.get("status") == 76 and not figures.data.events("spike")):
        parts += [str(row["tensor"]) for row in not_skipped[:1] if row.get("tensor")]
        if not parts:
            parts = [str(failure.get("message", ""))]
        return Verdict("trouble", "a number is NaN or infinite", ", ".join(parts))
    if skipped:
        evidence = ", ".join([f"{skipped:.0f} of {made:,} steps", *parts])
        share = skipped / max(made, 1)
        return graded(share, note=0, trouble=SKIPPED_SHARE, titles=("", "steps were left out"), evidence=evidence)
    if not len(figures.loss()):
        return None
    return Verdict("healthy", "every logged number is finite", f"{len(figures.loss())} logged losses")
