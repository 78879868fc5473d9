"""The table of rules, in the order in which a run is read: the run, its rates, losses, gradients, then the system."""

from pipeline.report.diagnosis import learning, run, stability, system, validation
from pipeline.report.diagnosis.figures import Figures
from pipeline.report.diagnosis.finding import Finding, Rule
from pipeline.report.run_data import RunData

RULES: list[Rule] = [*run.RULES, *learning.RULES, *validation.RULES, *stability.RULES, *system.RULES]


def diagnose(data: RunData) -> list[Finding]:
    """One finding a rule, in the order of the table. Reads series, manifest, recipe and checkpoints; any of it may be missing."""
    figures = Figures(data)
    return [rule.finding(figures) for rule in RULES]
