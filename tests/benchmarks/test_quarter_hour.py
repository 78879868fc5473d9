"""What a GPU is to show in a quarter of an hour runs whole on a CPU at toy sizes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "quarter_hour.py"
NOT_ON_A_CPU = {"CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "depth 2, float8", "nanochat"}


def started(folder, *arguments):
    command = [sys.executable, str(SCRIPT), "--toy", "--out", str(folder / "found.json"), *arguments]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "TANDEM_CACHE": str(folder / "cache")}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads((folder / "found.json").read_text()), ended.stdout


@pytest.mark.full
def test_every_part_runs_at_toy_sizes(tmp_path):
    found, table = started(tmp_path, "--budget", "1500")
    parts = {letter: {row["name"]: row for row in part["rows"]} for letter, part in found["parts"].items()}
    assert list(parts) == ["", *"abcdefghij"]
    outcomes = {
        name: row["outcome"] for rows in parts.values() for name, row in rows.items() if name not in NOT_ON_A_CPU
    }
    wrong = {name: outcome for name, outcome in outcomes.items() if outcome not in ("ran", "killed", "equal")}
    assert not wrong
    assert parts["a"]["nanochat"]["outcome"].startswith("not compared")
    assert parts[""]["ceilings"]["product_tflops"] > 0
    assert parts["c"]["4 rows"]["tok_per_s"] > 0
    assert parts["g"]["bitwise"]["weights_equal"]
    assert parts["e"]["depth 2"]["operators"]
    assert "| bitwise | equal |" in table
    assert (tmp_path / "found.md").read_text() == table


@pytest.mark.full
def test_a_part_that_the_budget_is_too_short_for_is_skipped_and_says_so(tmp_path):
    found, table = started(tmp_path, "--budget", "0", "--parts", "c,b")
    assert list(found["parts"]) == ["", "c", "b"]
    for letter in "cb":
        assert found["parts"][letter]["skipped"].startswith("skipped: ")
        assert found["parts"][letter]["skipped"] in table
