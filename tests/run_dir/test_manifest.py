"""run_manifest.json is documented to the last key."""

import re
from pathlib import Path

import pytest

from pipeline.process.errors import DataError
from pipeline.run_dir.run_directory import RunDirectory
from tests.manifest_page import KEYS, PAGE, unknown_keys

ROWS = re.findall(r"^\| `([^`]+)` \| (\w+\??) \|([^|]+)\| ([^|]+) \|$", PAGE, re.MULTILINE)


def test_every_key_has_a_type_a_meaning_and_counts_a_unit():
    assert len(ROWS) == len(KEYS) > 100
    for name, kind, unit, meaning in ROWS:
        assert len(meaning) > 3, name
        assert unit.strip() or kind.removesuffix("?") not in ("number", "integer"), f"{name} has no unit"
        parent = name.rpartition(".")[0]
        assert not parent or parent in KEYS, f"{name} is under nothing"


def test_the_writers_that_are_named_exist():
    root = Path(__file__).parents[2] / "pipeline"
    named = re.findall(r"`(\w+/[\w.]*)`", " ".join(re.findall(r"^Written by .+", PAGE, re.MULTILINE)))
    assert len(named) >= 6
    assert [by for by in named if not (root / by).exists()] == []


def test_keys_that_nobody_documented_are_found():
    manifest = {"name": "a", "mine": 1, "plan": {"parameters": 3, "wishes": 2}, "inputs": {"sources": [{"x": 1}]}}
    assert unknown_keys(manifest) == ["mine", "plan.wishes"]


def test_a_manifest_that_is_no_json_is_refused(tmp_path):
    run = RunDirectory(tmp_path)
    run.manifest.write_text('{"name":')
    with pytest.raises(DataError, match=r"run_manifest\.json: is no JSON as it was written"):
        run.read_manifest()
