"""findings/ and docs/surprises.md, which is written from the heads of its scripts."""

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "findings").glob("*.sh"))
SPEC = importlib.util.spec_from_file_location("findings_main", ROOT / "findings" / "__main__.py")
findings = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(findings)

HEAD = """#!/usr/bin/env bash
# Title: A reader forgets its place.
# Packages: reader==1.0
# Guess: It remembers
#   its place.
# Seen: It begins anew.
# Costs: Rows are read twice.
# Tandem: Does not use it.
exit {status}
"""


def test_the_page_and_the_table_are_those_of_the_heads():
    heads = findings.all_findings()
    assert findings.PAGE.read_text() == findings.page(heads), "python findings --page"
    text = findings.README.read_text()
    assert text == findings.readme(heads, text=text), "python findings --page"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_finding_pins_its_packages_and_is_valid_bash(script):
    head = findings.read_head(script)
    assert all("==" in package for package in head.packages.split()), head.packages
    assert len(head.title) <= 120, head.title
    assert head.title.endswith("."), head.title
    assert os.access(script, os.X_OK), f"chmod +x {script.name}"
    subprocess.run(["bash", "-n", script], check=True)


@pytest.mark.parametrize(("status", "word"), [(0, "holds"), (1, "no longer holds"), (3, "not installed")])
def test_a_script_s_status_says_whether_it_holds(tmp_path, monkeypatch, status, word):
    (tmp_path / "reader_forgets.sh").write_text(HEAD.format(status=status))
    monkeypatch.setattr(findings, "FOLDER", tmp_path)
    assert findings.run("reader_forgets")[0] == word
    assert findings.run_all(["reader_forgets"]) == (1 if status else 0)


def test_a_head_is_read_with_its_continued_lines(tmp_path):
    script = tmp_path / "reader_forgets.sh"
    script.write_text(HEAD.format(status=0))
    head = findings.read_head(script)
    assert (head.guess, head.library) == ("It remembers its place.", "reader")


def test_a_head_that_lacks_a_field_is_refused_by_its_name(tmp_path):
    script = tmp_path / "reader_forgets.sh"
    script.write_text(HEAD.format(status=0).replace("# Costs: Rows are read twice.\n", ""))
    with pytest.raises(ValueError, match=r"reader_forgets\.sh: its head lacks Costs"):
        findings.read_head(script)
