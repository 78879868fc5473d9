"""Rules on held-out text: validation beside training."""

from typing import NamedTuple

import numpy as np

from pipeline.data.validation import ENOUGH_BYTES
from pipeline.metrics import VAL_BPB, VALIDATION
from pipeline.process.commands import program
from pipeline.report.diagnosis.finding import Figures, Rule, Series, Verdict, error_of_difference, graded, median, rule
from pipeline.report.diagnosis.learning import loss_below_start, loss_does_not_rise, loss_falls

EVALUATIONS = 3  # two differ by chance and by the fall of the loss between them
RISE_NOTE, RISE_TROUBLE = 0.005, 0.02
GAP_NOTE, GAP_TROUBLE = 0.05, 0.15
SETTLED = 0.25  # of the run: before it the loss falls so fast that training, logged a moment earlier, lies above
BESIDE, BESIDE_SHARE = 3, 1 / 40  # training losses before an evaluation that are compared with it; of the logged ones
BELOW_NOTE, BELOW_TROUBLE = 0.05, 0.10
NO_GAP, PASSES = 0.02, 4
LOWEST_BPB = 0.5
FEW_BYTES = 10_000
OVERLAP_TROUBLE = 0.01  # of the validation documents that were looked for


class Pairs(NamedTuple):
    """Validation and training loss at the evaluations after SETTLED of the run; nats."""

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
    """val/loss and the median of the training losses logged just before it."""
    validation, training = figures.series("val/loss"), figures.loss()
    length, settled, pairs = beside(training), SETTLED * figures.step(), []
    for step, value in zip(validation.steps, validation.values, strict=True):
        end = int(np.searchsorted(training.steps, step, side="right"))
        before = training.values[max(end - length, 0) : end]
        if step >= settled and before.size == length:
            pairs.append((step, value, median(before)))
    return Pairs(*np.array(pairs, dtype=np.float64).reshape(-1, 3).T)


@rule(
    "something is held out",
    needs="a logged step",
    threshold=f"at least one validation number after step 0, of the run or of {program('evals')}",
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
        return Verdict("healthy", "validation was measured", ", ".join(parts + ([f"{later} later scores"] if later > 0 else [])))  # fmt: skip
    return Verdict("trouble", "no validation at all", f"0 evaluations in {figures.step():,} steps")


@rule(
    "validation is large enough",
    needs="inputs.validation_bytes in the manifest",
    threshold=f"one of the validation numbers is over at least {ENOUGH_BYTES:,} bytes (note) or {FEW_BYTES:,} bytes (trouble) of text",
    reason="documents differ by a tenth or more in bits per byte: over a few of them two runs or steps differ by chance, and a subject that is missing there is never looked at",
    advice="Name more text in data.validation (or in the files, of which a part is held out); where evals.bpb.tokens is what limits it, raise that.",
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
    needs=f"{EVALUATIONS} evaluations",
    threshold=f"the last value is less than {RISE_NOTE:.1%} (note) or {RISE_TROUBLE:.0%} (trouble) above the lowest",
    reason="the same text is scored each time, so that differences of half a percent are no noise of the sample",
    advice="The run memorises: stop at the lowest value (that checkpoint is kept), use more text, fewer passes, a smaller model or dropout.",
)
def validation_falls(figures: Figures) -> Verdict | None:
    found = held_out(figures)
    if found is None or len(found[1]) < EVALUATIONS:
        return None
    name, (steps, values) = found[0], (found[1].steps, found[1].values)
    lowest = int(values.argmin())
    rise = (values[-1] - values[lowest]) / abs(values[lowest]) if values[lowest] else 0.0
    return graded(
        rise,
        note=RISE_NOTE,
        trouble=RISE_TROUBLE,
        titles=("validation falls to its end", "validation rises again"),
        evidence=f"{name} lowest {values[lowest]:.4g} at step {steps[lowest]:.0f}, last {values[-1]:.4g} at step {steps[-1]:.0f} ({rise:+.1%})",
    )


@rule(
    "validation stays beside training",
    needs=f"{EVALUATIONS} val/loss in the last three quarters of the run, with train/loss",
    threshold=f"val/loss - train/loss (median of the last {BESIDE_SHARE:.1%} of the logged ones, {BESIDE} at least) widened by less than {GAP_NOTE:.0%} (note) or, where val/loss is {RISE_NOTE:.1%} above its lowest, {GAP_TROUBLE:.0%} (trouble) of val/loss since it was smallest, or by less than three standard errors",
    reason="a gap that stays is the difference of two texts; one that widens is memory, which harms as soon as validation falls no more. Means of the texts differ by a percent or two between evaluations",
    advice="More or other text, fewer passes over it, dropout or a smaller model; check that validation is of the same kind as training.",
)
def gap_stays(figures: Figures) -> Verdict | None:
    pairs = beside_training(figures)
    if pairs.steps.size < EVALUATIONS:
        return None
    gap = pairs.validation - pairs.training
    least = int(gap.argmin())
    widened = (gap[-1] - gap[least]) / abs(pairs.validation[-1])
    training = figures.loss()
    certain = gap[-1] - gap[least] > 3 * error_of_difference(training.values, beside(training))
    falls = pairs.validation[-1] < (1 + RISE_NOTE) * figures.series("val/loss").values.min()
    return graded(
        widened if certain else 0.0,
        note=GAP_NOTE,
        trouble=np.inf if falls else GAP_TROUBLE,
        titles=("validation follows training", "validation moves away from training"),
        evidence=f"val - train {gap[least]:+.3g} at step {pairs.steps[least]:.0f}, {gap[-1]:+.3g} at step {pairs.steps[-1]:.0f} (train {pairs.training[-1]:.4g}, val {pairs.validation[-1]:.4g})",
    )


@rule(
    "validation text is not trained on",
    needs="val/bpb, or val/loss with train/loss, or inputs.overlap in the manifest",
    threshold=(
        f"none of: validation documents in the training text (note; trouble from {OVERLAP_TROUBLE:.0%} of those looked for on); val/bpb ever below {LOWEST_BPB} where train/bpb of the first pass never was; beside a train/loss that falls and does not climb again: val/loss at the last two evaluations more than {BELOW_NOTE:.0%} (note) or "
        f"{BELOW_TROUBLE:.0%} (trouble) below it, of fewer than {ENOUGH_BYTES:,} bytes by the square root more; after {PASSES} passes over the text val/loss within {NO_GAP:.0%} of a train/loss "
        "that fell on (note; trouble when the model has more parameters than different tokens)"
    ),
    reason=(
        "documents known by heart take up to their share from val/bpb, and two runs often differ by no more than 1 %; "
        "the largest published models need 0.6 to 0.7 bits per byte of unseen prose; unseen text is not easier than learnt text, "
        "and who has read a text four times knows it better than a new one"
    ),
    advice="Search the training files for validation documents (duplicates, a glob that matches both) and hold out other text. Source code and templates may honestly be this predictable.",
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
        suspicions.append((level, f"{found:,} of the first {looked:,} validation documents stand in the training text (such as {place})"))  # fmt: skip
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
            suspicions.append((level, f"val/loss {pairs.validation[-1]:.4g} is {below:.0%} below train/loss {pairs.training[-1]:.4g}"))  # fmt: skip
    if pairs.steps.size and is_sound:
        suspicions += _no_gap_after_passes(figures, pairs)
    if not suspicions:
        return Verdict("healthy", "nothing says that validation text was trained on", _beside(bpb, pairs, looked))
    is_trouble = any(level == "trouble" for level, _ in suspicions)
    return Verdict(
        "trouble" if is_trouble else "note",
        "validation text seems to be trained on" if is_trouble else "validation is suspiciously near to training",
        "; ".join(text for _, text in suspicions),
    )


def _is_predictable(figures: Figures) -> bool:
    """Return whether training text that was read for the first time, and is known by heart by no model, was as easy."""
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


def _no_gap_after_passes(figures: Figures, pairs: Pairs) -> list[tuple[str, str]]:
    before, loss = figures.passes(), figures.loss()
    passes = before.values[-1] if len(before) else 0
    gap = (pairs.validation[-1] - pairs.training[-1]) / pairs.training[-1]
    if passes < PASSES or abs(gap) > NO_GAP:
        return []
    second_pass = loss.values[loss.steps >= before.steps[before.values >= 1][0]]
    if pairs.training[-1] > 0.9 * median(second_pass[: beside(loss)]):
        return []  # nothing was learnt in the repeated passes, by heart or otherwise
    tokens, parameters = figures.data.tokens() / passes, figures.manifest("plan.parameters")
    text = f"val/loss {pairs.validation[-1]:.4g} is within {NO_GAP:.0%} of train/loss {pairs.training[-1]:.4g} after {passes:.0f} passes"
    if isinstance(parameters, (int, float)) and parameters > tokens:
        return [("trouble", f"{text} of {tokens:,.0f} tokens by {parameters:,.0f} parameters")]
    return [("note", text)]


def _beside(bpb: float | None, pairs: Pairs, looked: int | None) -> str:
    parts = [f"lowest val/bpb {bpb:.4g}"] if bpb is not None else []
    if pairs.steps.size:
        parts.append(f"val/loss {pairs.validation[-1]:.4g} beside train/loss {pairs.training[-1]:.4g}")
    if looked:
        parts.append(
            f"none of the first {looked:,} validation documents found in the training text that was looked through"
        )
    return ", ".join(parts)


RULES: list[Rule] = [is_validated, is_large_enough, validation_falls, gap_stays, is_no_leak]
