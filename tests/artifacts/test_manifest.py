"""run_manifest.json is documented to the last key, and read only when it is what was written."""

import json
import re
from pathlib import Path

import pytest

from pipeline.process.errors import DataError
from pipeline.run_dir.run_directory import KEYS, TYPES, RunDirectory, manifest_problems, unknown_keys

PAGE = (Path(__file__).parents[2] / "docs" / "manifest.md").read_text()


def manifest_table() -> str:
    """Return the keys as the Markdown table of docs/manifest.md."""
    lines = ["| key | type | unit | written | by | what it holds |", "| --- | --- | --- | --- | --- | --- |"]
    lines += [
        f"| `{key.name}` | {key.type} | {key.unit or '-'} | {key.written} | `{key.by}` | {key.meaning} |"
        for key in KEYS
    ]
    return "\n".join(lines) + "\n"


def test_the_page_holds_the_table_of_the_schema():
    assert manifest_table() in PAGE, f"put this table into docs/manifest.md:\n{manifest_table()}"


def test_every_key_says_type_writer_time_and_meaning_and_counts_have_units():
    names = [key.name for key in KEYS]
    assert len(names) == len(set(names))
    for key in KEYS:
        assert key.type.removesuffix("?") in TYPES, key
        assert min(len(key.written), len(key.by), len(key.meaning)) > 3, key
        assert key.unit or key.type not in ("number", "integer", "number?", "integer?"), f"{key.name} has no unit"
        parent = key.name.rpartition(".")[0]
        assert not parent or parent in names, f"{key.name} stands under nothing"


def test_the_writers_that_are_named_exist():
    root = Path(__file__).parents[2] / "pipeline"
    for by in {name for key in KEYS for name in key.by.split(", ")}:
        assert (root / by).exists(), by


def test_values_of_another_type_are_reported_by_their_full_names():
    manifest = {
        "name": 3,
        "attempts": True,
        "git": None,
        "host": None,
        "inputs": {"sources": [{"name": "a"}, "b"], "max_steps": "many"},
        "results": {"val/bpb": 1.5, "val/loss": None},
        "must_match": {"train.max_steps": None, "data.sources": [{}]},
    }
    assert manifest_problems(manifest) == [
        "name is 3, not of type text",
        "attempts is True, not of type integer",
        "host is None, not of type object",
        "inputs.sources[1] is 'b', not of type object",
        "inputs.max_steps is 'many', not of type integer",
        "results.val/loss is None, not of type number",
    ]
    assert manifest_problems([]) == ["it is no object of keys"]


def test_keys_that_nobody_documented_are_no_problem_but_known_as_such():
    manifest = {"name": "a", "mine": 1, "plan": {"parameters": 3, "wishes": 2}}
    assert manifest_problems(manifest) == []
    assert unknown_keys(manifest) == ["mine", "plan.wishes"]


@pytest.mark.parametrize(
    ("text", "said"), [('{"name":', "it is no JSON"), ('{"attempts": "two"}', "attempts is 'two'")]
)
def test_a_manifest_that_no_run_wrote_is_refused_with_what_is_wrong(tmp_path, text, said):
    run = RunDirectory(tmp_path)
    run.manifest.write_text(text)
    with pytest.raises(DataError, match=rf"run_manifest\.json: is not what a run writes[^\n]*\n  {re.escape(said)}"):
        run.read_manifest()


def test_a_key_that_is_not_documented_is_written_with_a_warning(tmp_path):
    run = RunDirectory(tmp_path)
    with pytest.warns(UserWarning, match=r"run_manifest\.json: not as documented: mine"):
        run.update_manifest(mine=1)
    assert json.loads(run.manifest.read_text()) == {"mine": 1}
