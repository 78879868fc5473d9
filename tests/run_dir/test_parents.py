"""The runs that a run comes from, by what its manifest says and what lies on the disk."""

import pytest

from pipeline.process.storage import read_json
from pipeline.run_dir.checkpoints import SEAL, whole_folder
from pipeline.run_dir.parents import base_run, name_of_model, parents_of
from pipeline.run_dir.run_directory import RunDirectory


def base_in(runs, folder="model"):
    """A run with weights, and what a run that starts from them records."""
    run = RunDirectory(runs / "base")
    run.update_manifest(name="base")
    with whole_folder(run.path / folder, step=5, run="base") as model:
        (model / "model.safetensors").write_bytes(b"weights")
    sha256 = read_json(run.path / folder / SEAL)["files"]["model.safetensors"]["sha256"]
    return run, {"from": str(run.path / folder), "model.safetensors": sha256}


def child_of(runs, start_from=None, **manifest):
    run = RunDirectory(runs / "talk")
    run.update_manifest(name="talk", inputs={"start_from": start_from}, **manifest)
    return run


def names(found):
    runs, absent = found
    return [run.name for run in runs], absent


@pytest.mark.parametrize("folder", ["model", "checkpoints/checkpoint-5"])
def test_a_base_is_found_where_named_and_beside_a_run_that_moved(tmp_path, folder):
    runs = tmp_path / "runs"
    base, start_from = base_in(runs, folder)
    run = child_of(runs, start_from)
    assert base_run(run.path, run.read_manifest()).path == base.path
    runs.rename(tmp_path / "moved")
    run = RunDirectory(tmp_path / "moved" / "talk")
    assert base_run(run.path, run.read_manifest()).path == tmp_path / "moved" / "base"
    assert names(parents_of(run)) == (["base"], [])


def test_a_base_with_other_weights_is_not_the_base(tmp_path):
    _, start_from = base_in(tmp_path)
    run = child_of(tmp_path, start_from | {"model.safetensors": "0" * 64})
    assert base_run(run.path, run.read_manifest()) is None
    assert names(parents_of(run)) == ([], ["base"])


def test_what_does_not_lie_here_is_named(tmp_path):
    hub = {"from": "somebody/base", "commit": "1" * 40}
    assert names(parents_of(child_of(tmp_path, hub))) == ([], ["somebody/base"])
    fork = {"run": "runs/gone", "step": 1, "differences": []}
    assert names(parents_of(child_of(tmp_path, None, forked_from=fork))) == ([], ["gone"])
    assert names(parents_of(child_of(tmp_path / "new", None))) == ([], [])


def test_a_fork_of_a_run_with_a_base_has_two_parents(tmp_path):
    _, start_from = base_in(tmp_path)
    RunDirectory(tmp_path / "first").update_manifest(name="first")
    run = child_of(tmp_path, start_from, forked_from={"run": "first", "step": 1, "differences": []})
    assert names(parents_of(run)) == (["base", "first"], [])


def test_a_model_is_named_by_its_run_else_by_its_folder(tmp_path):
    assert name_of_model(tmp_path / "runs" / "a" / "model") == "a"
    assert name_of_model(tmp_path / "runs" / "a" / "checkpoints" / "checkpoint-5") == "a"
    assert name_of_model(tmp_path / "gpt2") == "gpt2"
