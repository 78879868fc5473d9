"""The diagnosis as a section of the report: trouble first, then notes, what is healthy, and what is not known."""

from pipeline.report.diagnosis_rules import RULES, Result, Rule, diagnose
from pipeline.report.markdown import cell, joined, table, titled
from pipeline.report.run_data import RunData


def diagnosis_text(data: RunData) -> str:
    """Return Markdown without its heading; "" when no rule can say anything."""
    results = diagnose(data)
    by_level: dict[str, list[Rule]] = {"trouble": [], "note": [], "healthy": [], "unknown": []}
    for rule in RULES:
        by_level[results[rule.name].level].append(rule)
    if len(by_level["unknown"]) == len(RULES):
        return ""
    healthy = [[results[rule.name].title, results[rule.name].evidence] for rule in by_level["healthy"]]
    signs = table(["sign", "evidence"], healthy)
    unknown = "; ".join(f"{rule.name} ({rule.needs})" for rule in by_level["unknown"])
    return joined(
        verdict(results) + "\n",
        _listed("Trouble", by_level["trouble"], results),
        _listed("Notes", by_level["note"], results),
        titled("Healthy", signs),
        f"Unknown, for want of numbers: {unknown}.\n" if unknown else "",
    )


def verdict(results: dict[str, Result]) -> str:
    """Return the whole diagnosis in a sentence."""
    levels = [result.level for result in results.values()]
    judged = f"{len(levels) - levels.count('unknown')} of {len(levels)} signs could be judged"
    notes = f", {levels.count('note')} worth knowing" if "note" in levels else ""
    troubles = [result.title for result in results.values() if result.level == "trouble"]
    if not troubles:
        return f"**Healthy**: {judged}, none of them is one of trouble{notes}."
    signs = "1 sign" if len(troubles) == 1 else f"{len(troubles)} signs"
    return f"**{signs} of trouble** ({'; '.join(troubles)}){notes}; {judged}. A sign is a reason to look, not a proof."


def _listed(title: str, rules: list[Rule], results: dict[str, Result]) -> str:
    lines = []
    for rule in rules:
        result = results[rule.name]
        lines.append(f"- **{cell(result.title)}**: {cell(result.evidence)}\n")
        lines.append(f"  - What to try: {cell(rule.advice)}\n")
        lines.append(f"  - Healthy is: {cell(f'{rule.name}: {rule.threshold}')}\n")
    return titled(title, "".join(lines))
