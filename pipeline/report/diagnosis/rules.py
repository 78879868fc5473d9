"""The table of rules, in the order in which a run is read: its input, the run, rates, losses, gradients, then the system."""

from pipeline.report.diagnosis import invariants, learning, run, stability, system, validation
from pipeline.report.diagnosis.figures import Figures
from pipeline.report.diagnosis.finding import Finding, Rule
from pipeline.report.run_data import RunData

RULES: list[Rule] = [*invariants.RULES, *run.RULES, *learning.RULES, *validation.RULES, *stability.RULES, *system.RULES]


def diagnose(data: RunData) -> list[Finding]:
    """Return one finding a rule: contradictions first, then in the order of the table. Reads series, manifest, recipe and
    checkpoints; any of it may be missing."""
    figures = Figures(data)
    return sorted((rule.finding(figures) for rule in RULES), key=lambda finding: finding.level != "contradiction")
