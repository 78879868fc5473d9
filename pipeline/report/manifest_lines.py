"""What of a run's manifest is not as documented: of a newer version, or changed by hand."""

from pipeline.artifacts.manifest import unknown_keys
from pipeline.report.run_data import RunData


def manifest_text(data: RunData) -> str:
    """A list of such keys; "" for a manifest that is as documented."""
    lines = [f"- {problem}: left out of this report" for problem in data.manifest_problems]
    unknown = unknown_keys(data.manifest)
    lines += [f"- not documented in this version: {', '.join(unknown)}"] if unknown else []
    return "\n".join(lines) + "\n" if lines else ""
