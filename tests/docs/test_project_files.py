"""CITATION.cff, the workflow and the hooks say what pyproject.toml and constraints.txt say."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_citation_has_the_project_s_version_and_license():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert citation["cff-version"] == "1.2.0"
    assert citation["authors"]


def test_the_hooks_use_the_pinned_ruff():
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["rev"] == f"v{pins['ruff']}"


def test_the_workflow_runs_what_must_pass_on_the_oldest_python():
    (job,) = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"].values()
    assert job["steps"][-1]["run"] == "bash .ci/run"
    versions = [step["with"]["python-version"] for step in job["steps"] if "python-version" in step.get("with", {})]
    assert [f">={version}" for version in versions] == [PROJECT["requires-python"]]


def test_the_page_of_the_code_has_a_line_for_each_module():
    text = (ROOT / "docs" / "code.md").read_text()
    written = subprocess.run(
        [sys.executable, "-c", "import code_page; print(code_page.page(), end='')"],
        cwd=ROOT / "docs",
        capture_output=True,
        text=True,
        check=True,
    )
    assert text == written.stdout, "make docs"
    entries = [
        path for path in (ROOT / "pipeline").iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()
    ]
    rooms = {path.name for path in entries} - {"__init__.py"}
    assert rooms == set(re.findall(r"^## (\S+)$", text, re.M))


@pytest.mark.parametrize("name", re.findall(r"`([a-z_]+/[a-z_]+\.py)`", (ROOT / "CONTRIBUTING.md").read_text()))
def test_a_module_that_contributing_names_is_there(name):
    assert (ROOT / "pipeline" / name).is_file() or (ROOT / name).is_file()
