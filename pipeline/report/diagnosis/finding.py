"""What a rule is, and what it finds."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pipeline.report.diagnosis.figures import Figures

LONG_ENOUGH_S = 600.0  # shorter runs: start-up, saves and evaluations are a large share of any, and cost little
Level = Literal["healthy", "note", "trouble", "contradiction", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one rule says of one run.

    level: contradiction: two numbers cannot both be right; trouble asks for an investigation, a note is worth knowing,
    unknown: the numbers that the rule needs are not there. evidence: numbers and steps, "" when unknown.
    """

    rule: str
    level: Level
    title: str
    evidence: str
    threshold: str
    advice: str


@dataclass(frozen=True)
class Verdict:
    """A rule's judgement. advice: instead of the rule's own."""

    level: Level
    title: str
    evidence: str
    advice: str | None = None


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One sign of health or trouble. judge gives None when the numbers it needs are not there or are too few.

    name: the healthy state. threshold, reason: as docs/diagnosis.md prints them.
    """

    name: str
    judge: Callable[[Figures], Verdict | None]
    needs: str
    threshold: str
    reason: str
    advice: str

    def finding(self, figures: Figures) -> Finding:
        verdict = self.judge(figures) or Verdict("unknown", self.needs, "")
        return Finding(
            rule=self.name,
            level=verdict.level,
            title=verdict.title,
            evidence=verdict.evidence,
            threshold=self.threshold,
            advice=verdict.advice or self.advice,
        )


def rule(
    name: str, *, needs: str, threshold: str, reason: str, advice: str
) -> Callable[[Callable[[Figures], Verdict | None]], Rule]:
    """Makes the function below it the judge of a rule of that name."""
    return lambda judge: Rule(name=name, judge=judge, needs=needs, threshold=threshold, reason=reason, advice=advice)


def graded(
    value: float, *, note: float, trouble: float, titles: tuple[str, str], evidence: str, advice: str | None = None
) -> Verdict:
    """A verdict on a number that is better when it is small. titles: when it is below both limits, and else."""
    level: Level = "trouble" if value >= trouble else "note" if value >= note else "healthy"
    return Verdict(level, titles[level != "healthy"], evidence, advice)
