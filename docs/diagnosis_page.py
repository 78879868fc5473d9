"""Write docs/diagnosis.md from the rules: `python docs/diagnosis_page.py`."""

import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parent / "diagnosis.md"
sys.path.insert(0, str(PAGE.parents[1]))

from pipeline.report.diagnosis_rules import RULES  # noqa: E402
from pipeline.report.markdown import table  # noqa: E402

HEAD = """# Diagnosis

<!-- Written by `python docs/diagnosis_page.py`; change pipeline/report/diagnosis_rules.py, then run it again. -->

`tandem report RUN` reads the run by rule, in the order in which a run is best read: the run itself, its learning rate, losses and
gradients, validation, data, then the machine. Each rule gives one finding:

- **healthy**: the sign was looked for and not found.
- **note**: worth knowing; a run with notes only is healthy.
- **trouble**: a reason to look, not a proof. The finding has the numbers and steps behind it, the threshold, and what to try.
- **unknown**: the numbers that the rule needs were not logged, or are too few to judge. Nothing is guessed.

The thresholds were fixed before they were tried on runs made sick on purpose, but for one (a loss that rises at its end), which was set on
real runs ([log](log.md)). Levels are medians, and noise is measured from the differences of neighbouring values, so a few wild values move
neither. The first logged value of a start holds compilation and is in no time. The rules read `metrics.jsonl`, recipe, manifest and
checkpoints; logs of other programs may lack any of these. Whether a run's numbers agree with one another says
`python -m faults.audit RUN`, in a clone of the repository.

"""  # noqa: E501


def page() -> str:
    rows = [[rule.name, rule.needs, rule.threshold, rule.reason, rule.advice] for rule in RULES]
    return HEAD + table(["healthy sign", "needs", "threshold", "why there", "what to try"], rows)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
