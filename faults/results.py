"""Results of the campaigns: one JSON line per trial, and the figures of docs/reliability.md between markers."""

import datetime
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from pipeline.hardware.processor import cpu_name, usable_cores
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "reliability.md"


class Results:
    """The trials of one campaign that have been made; a campaign started again makes the others."""

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def rows(self) -> list[dict]:
        return list({row["trial"]: row for row in self._all()}.values())  # one that was made again replaces

    def made_again(self) -> list[str]:
        """Trials that failed once and were made again since."""
        last = {row["trial"]: row["ok"] for row in self._all()}
        return [
            trial for trial, ok in last.items() if ok and any(r["trial"] == trial and not r["ok"] for r in self._all())
        ]

    def _all(self) -> list[dict]:
        return list(map(json.loads, self.path.read_text().splitlines())) if self.path.exists() else []

    def add(self, row: dict) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def hardware() -> str:
    return f"{cpu_name()}, {usable_cores()} cores"


def summary(what: str, figure: str, rows: list[dict], command: str, made_again: Sequence[str] = ()) -> str:
    """The lines of one campaign on the page. made_again: trials that had failed before."""
    failed = [row["trial"] for row in rows if not row["ok"]]
    days = sorted({row["date"] for row in rows})
    lines = [
        f"**{what}.** {figure}.",
        "",
        f"`{command}` - trials {_range([row['trial'] for row in rows])}; {days[0]}"
        + (f" to {days[-1]}" if len(days) > 1 else "")
        + f"; {hardware()}.",
    ]
    if failed:
        lines += ["", f"Failed: {', '.join(failed)}."]
    if made_again:
        lines += ["", f"Failed before, and made again after a change that log.md tells: {', '.join(made_again)}."]
    return "\n".join(lines)


def _range(keys: list[str]) -> str:
    if all(key.isdecimal() for key in keys):
        numbers = sorted(map(int, keys))
        whole = numbers == list(range(numbers[0], numbers[-1] + 1))
        return f"{numbers[0]}..{numbers[-1]}" if whole else ", ".join(map(str, numbers))
    return f"{len(keys)} cells"


def write_to_page(name: str, text: str, page: Path = PAGE) -> None:
    """Replace what stands between the campaign's markers."""
    before = page.read_text()
    pattern = re.compile(rf"(<!-- {name}: begin -->\n).*?(<!-- {name}: end -->)", re.DOTALL)
    after, found = pattern.subn(lambda match: f"{match[1]}{text}\n{match[2]}", before)
    if not found:
        raise SystemExit(f"{page}: the markers of {name} are missing")
    page.write_text(after)
