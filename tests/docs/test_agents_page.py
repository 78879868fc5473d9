"""AGENTS.md, whose commands run, and llms.txt, whose links lead somewhere."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = re.search(r"^```\n(.*?)^```$", (ROOT / "AGENTS.md").read_text(), re.S | re.M)[1].splitlines()
PYTHON, RUFF = ".venv/bin/python", ".venv/bin/ruff"


@pytest.mark.full
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_agents_page_runs(command):
    words = shlex.split(command)
    started = {PYTHON: [sys.executable], RUFF: [sys.executable, "-m", "ruff"]}[words[0]]
    done = subprocess.run([*started, *words[1:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", ["AGENTS.md", "llms.txt"])
def test_links_of_the_pages_for_machines_lead_somewhere(page):
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / page).read_text())
    assert len(links) >= 3
    assert not [link for link in links if not (ROOT / link).exists()]


def test_the_readme_is_read_in_a_minute():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
