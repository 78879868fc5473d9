"""Run the findings and write their pages: `python findings [NAME ...]`, `python findings --page`.

A finding is a script of this folder, `NAME.sh`, whose head says what surprises (README.md has the form). Only the
standard library is needed: each script installs what it shows into a folder of its own.
"""

import argparse
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
PAGE = FOLDER.parent / "docs" / "surprises.md"
README = FOLDER / "README.md"
FIELDS = ("Title", "Packages", "Guess", "Seen", "Costs", "Tandem")
BEGIN, END = "<!-- table: written by `python findings --page` -->", "<!-- end of the table -->"
NOT_INSTALLED = 3  # the status of a script whose packages could not be installed
LIMIT_S = 1800

INTRODUCTION = """\
# What this stack does that you would not expect

Each entry is behaviour of a public library, tool or format that somebody who knows it would guess wrong. None is a
fault of Tandem. The script under an entry shows it: `bash findings/NAME.sh` installs the versions that its head names
in a temporary folder and fails if they behave otherwise. The head also says what one would guess and what was seen,
with figures. Other versions may differ.

`make findings` runs all of them ([findings](../findings/README.md)); `python findings --page` writes this page from the
heads. Which trainers continue where they stopped is measured by another program: [conformance](conformance.md).
"""


@dataclass(frozen=True)
class Finding:
    """What the head of a script says."""

    name: str
    title: str
    packages: str
    guess: str
    seen: str
    costs: str
    tandem: str

    @property
    def library(self) -> str:
        """Return the first package, whose section of the page this is."""
        return self.packages.split()[0].split("==")[0]


def read_head(script: Path) -> Finding:
    """Return what a script's head says; ValueError names what is missing."""
    fields: dict[str, str] = {}
    field = ""
    for line in script.read_text().splitlines()[1:]:
        if not line.startswith("#"):
            break
        begun = re.match(r"# (\w+): (.*)", line)
        if begun and begun[1] in FIELDS:
            field = begun[1]
            fields[field] = begun[2].strip()
        elif field:
            fields[field] += " " + line.lstrip("#").strip()
    missing = [name for name in FIELDS if not fields.get(name)]
    if missing:
        raise ValueError(f"{script.name}: its head lacks {', '.join(missing)}. See findings/README.md.")
    return Finding(script.stem, *(fields[name] for name in FIELDS))


def all_findings() -> list[Finding]:
    """Return the findings of the folder by name."""
    return [read_head(script) for script in sorted(FOLDER.glob("*.sh"))]


def run(name: str) -> tuple[str, float, str]:
    """Run a script. Returns (holds | no longer holds | not installed | over the time, seconds, its output)."""
    began = time.monotonic()
    try:
        done = subprocess.run(
            ["bash", f"{name}.sh"],
            cwd=FOLDER,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired as late:
        return "over the time", time.monotonic() - began, str(late.output or "")
    words = {0: "holds", NOT_INSTALLED: "not installed"}
    return words.get(done.returncode, "no longer holds"), time.monotonic() - began, done.stdout


def run_all(names: list[str]) -> int:
    """Run the scripts one after another and print what holds. Returns 1 if one does not."""
    failed = []
    for name in names:
        word, seconds, output = run(name)
        print(f"{word:16} {seconds:5.0f} s  {name}", flush=True)
        if word != "holds":
            failed.append(name)
            print("".join(f"    {line}\n" for line in output.splitlines()[-15:]), flush=True)
    print(f"{len(names) - len(failed)} of {len(names)} hold")
    return 1 if failed else 0


def table(findings: list[Finding]) -> str:
    """Return the README's table."""
    rows = ["| finding | packages | what happens | what it costs | Tandem |", "|---|---|---|---|---|"]
    for finding in findings:
        cells = [
            f"[{finding.name}]({finding.name}.sh)",
            finding.packages,
            finding.title,
            finding.costs,
            finding.tandem,
        ]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def page(findings: list[Finding]) -> str:
    """Return docs/surprises.md, a section for each library; what was guessed and seen stays in the scripts' heads."""
    lines = [INTRODUCTION]
    for library in sorted({finding.library for finding in findings}):
        lines.append(f"## {library}\n")
        for finding in findings:
            if finding.library == library:
                lines += [
                    f"### {finding.title}\n",
                    f"**Costs:** {finding.costs}\n",
                    f"**Tandem:** {finding.tandem}\n",
                    f"[findings/{finding.name}.sh](../findings/{finding.name}.sh)\n",
                ]
    return "\n".join(lines)


def readme(findings: list[Finding], *, text: str) -> str:
    """Return the README's text with the table of these findings."""
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n{table(findings)}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python findings", description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*", help="findings to run; all if none is named")
    parser.add_argument("--page", action="store_true", help="write docs/surprises.md and the README's table instead")
    options = parser.parse_args()
    findings = all_findings()
    if options.page:
        PAGE.write_text(page(findings))
        README.write_text(readme(findings, text=README.read_text()))
        return 0
    names = [finding.name for finding in findings]
    wanted = [name.removesuffix(".sh") for name in options.names]
    unknown = [name for name in wanted if name not in names]
    if unknown:
        parser.error(f"no finding of that name: {', '.join(unknown)}. Those there are: {', '.join(names)}.")
    return run_all(wanted or names)


if __name__ == "__main__":
    sys.exit(main())
