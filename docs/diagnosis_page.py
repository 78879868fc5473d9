"""Write docs/diagnosis.md from the rules: `python docs/diagnosis_page.py`."""

import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parent / "diagnosis.md"
sys.path.insert(0, str(PAGE.parents[1]))

from pipeline.report.diagnosis_rules import RULES  # noqa: E402
from pipeline.report.markdown import table  # noqa: E402

HEAD = """# Diagnosis

<!-- Written by `python docs/diagnosis_page.py`; change pipeline/report/diagnosis_rules.py, then run it again. -->

`python -m pipeline.report RUN` reads the run for you, by rule, in the order in which a run is best read: the run
itself, its learning rate, losses and gradients, validation, data, then the machine. Each rule gives one finding:

- **healthy**: the sign was looked for and not found.
- **note**: worth knowing; a run with notes only is healthy.
- **trouble**: a reason to look, not a proof. The finding tells the numbers and steps behind it, the threshold, and what to try.
- **unknown**: the numbers that the rule needs were not logged, or are too few to judge. Nothing is guessed.

The thresholds were fixed before the runs that were made sick on purpose to try them, but for one that was set on what real runs
show (a loss that rises at its end); `docs/log.md` has the results. Levels are medians, and noise
is measured from the differences of neighbouring values, so that a few wild values move neither. The first logged value of a start,
which holds compilation, is in no time. The rules read the series of `metrics.jsonl`, recipe, manifest and checkpoints; logs of other
programs may lack any of these. Whether a run's numbers agree with one another is another question: `python -m faults.audit RUN`, in
a clone of the repository.

"""  # noqa: E501


def page() -> str:
    rows = [[rule.name, rule.needs, rule.threshold, rule.reason, rule.advice] for rule in RULES]
    return HEAD + table(["healthy sign", "needs", "threshold", "why there", "what to try"], rows)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
