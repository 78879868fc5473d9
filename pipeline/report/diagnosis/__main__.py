"""python -m pipeline.report.diagnosis: write docs/diagnosis.md from the rules."""

from pathlib import Path

from pipeline.report.diagnosis.section import page

if __name__ == "__main__":
    Path("docs/diagnosis.md").write_text(page(), encoding="utf-8")
