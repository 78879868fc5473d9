"""The diagnosis as a section of the report: contradictions first, then trouble, notes, what is healthy, and what is not known."""

from pipeline.report.diagnosis.finding import Finding
from pipeline.report.diagnosis.reading import reading_text
from pipeline.report.diagnosis.rules import RULES, diagnose
from pipeline.report.run_data import RunData
from pipeline.report.tables import table


def diagnosis_text(data: RunData) -> str:
    """Markdown without its heading; "" when no rule can say anything."""
    findings = diagnose(data)
    by_level = {
        level: [finding for finding in findings if finding.level == level]
        for level in ("contradiction", "trouble", "note", "healthy", "unknown")
    }
    if len(by_level["unknown"]) == len(RULES):
        return ""
    reading = reading_text(data)
    parts = [
        verdict(findings) + "\n",
        _to_look_at("Contradictions", by_level["contradiction"]),
        _to_look_at("Trouble", by_level["trouble"]),
        _to_look_at("Notes", by_level["note"]),
        _healthy(by_level["healthy"]),
        _unknown(by_level["unknown"]),
        f"### How to read these numbers\n\n{reading}" if reading else "",
    ]
    return "\n".join(part for part in parts if part)


def verdict(findings: list[Finding]) -> str:
    """Return a sentence on the whole; before it one on numbers that contradict one another."""
    wrong = [finding.title for finding in findings if finding.level == "contradiction"]
    first = f"**The numbers contradict one another** ({'; '.join(wrong)}): until that is explained, nothing that rests on them can be relied on. " if wrong else ""  # fmt: skip
    troubles = [finding.title for finding in findings if finding.level == "trouble"]
    notes = sum(finding.level == "note" for finding in findings)
    judged = sum(finding.level != "unknown" for finding in findings)
    beside = f", {notes} worth knowing" if notes else ""
    if not troubles and wrong:
        return f"{first}{judged} of {len(findings)} signs could be judged, none of them is one of trouble{beside}."
    if not troubles:
        return (
            f"**Healthy**: {judged} of {len(findings)} signs could be judged, none of them is one of trouble{beside}."
        )
    count = "1 sign" if len(troubles) == 1 else f"{len(troubles)} signs"
    return f"{first}**{count} of trouble** ({'; '.join(troubles)}){beside}; {judged} of {len(findings)} signs could be judged. A sign is a reason to look, not a proof."


def _to_look_at(title: str, findings: list[Finding]) -> str:
    rows = [[f.title, f.evidence, f"{f.rule}: {f.threshold}", f.advice] for f in findings]
    return f"### {title}\n\n{table(['sign', 'evidence', 'healthy is', 'what to try'], rows)}" if rows else ""


def _healthy(findings: list[Finding]) -> str:
    rows = [[finding.title, finding.evidence] for finding in findings]
    return f"### Healthy\n\n{table(['sign', 'evidence'], rows)}" if rows else ""


def _unknown(findings: list[Finding]) -> str:
    if not findings:
        return ""
    return "Unknown, for want of numbers: " + "; ".join(f"{f.rule} ({f.title})" for f in findings) + ".\n"
