"""docs/diagnosis.md, made from the table of rules."""

from pipeline.report.diagnosis.rules import RULES
from pipeline.report.tables import table

HEAD = """# Diagnosis

<!-- Written by `python -m pipeline.report.diagnosis`; change the rules in pipeline/report/diagnosis/, then run it again. -->

`python -m pipeline.report RUN` reads the run for you, by rule, in the order in which a run is best read: whether its numbers
agree with one another, the run itself, its learning rate, losses, gradient norms, then the system. Each rule gives one finding:

- **healthy**: the sign was looked for and is not there.
- **note**: worth knowing; a run with notes only is healthy.
- **trouble**: a reason to look, not a proof. The finding tells the numbers and steps behind it, the threshold, and what to try.
- **contradiction**: two numbers that follow from one another do not agree, so that one of them is wrong. It stands first: whatever
  rests on these numbers cannot be relied on.
- **unknown**: the numbers that the rule needs were not logged, or are too few to judge. Nothing is guessed.

The thresholds were fixed before the runs that were made sick on purpose to try them, but for three that were set on what real runs
show (a growing gradient norm, bits per byte against the loss, a loss that rises at its end); `docs/log.md` tells what came out. Levels
are medians, and noise is measured from the differences of neighbouring values, so that a few wild values move neither. The
first logged value of a start, which holds compilation, is in no time. The rules read the series of `metrics.jsonl`, recipe,
manifest and checkpoints; imported runs may lack any of these.

The same section of a report tells how to read the numbers that are mistaken for one another: samples and tokens; allocated,
peak, reserved and device memory; the two MFUs; utilisation.

"""


def page() -> str:
    rows = [[rule.name, rule.needs, rule.threshold, rule.reason, rule.advice] for rule in RULES]
    return HEAD + table(["healthy sign", "needs", "threshold", "why there", "what to try"], rows)
