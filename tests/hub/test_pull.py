"""What a run without a checkpoint finds on the Hub, and what a push leaves there; no training, the files of a run are enough."""

import json
import subprocess
import sys

import pytest

from faults.services import environment
from pipeline.process.storage import write_json, write_text
from pipeline.run_dir.checkpoints import by_step, problems, whole_folder
from pipeline.run_dir.rows import append_row
from pipeline.run_dir.run_directory import RunDirectory
from tests.hub.hub_stand_in import hub_stand_in
from tests.runner import ROOT

REPO = "somebody/quick"
RESTORE = """
import json, sys
from types import SimpleNamespace as Names
import pipeline.hub.client as retries
from pipeline.run_dir.failures import exit_with_status
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.hub.pull import restore_from_hub
retries.FIRST_WAIT_S = 0.01
def main(argv):
    hub = Names(**json.loads(argv[1]))
    restore_from_hub(hub, RunDirectory(argv[0]))
    return 0
exit_with_status(main)
"""


@pytest.fixture
def hub():
    with hub_stand_in() as state:
        yield state


def a_run(tmp_path, name="quick", **hub_keys):
    run = RunDirectory(tmp_path / "runs" / name)
    write_text(run.recipe, json.dumps({"hub": {"id": REPO, "private": True, "strategy": "checkpoint", **hub_keys}}))
    run.update_manifest(name=name, stage="pretrain", status="running")
    return run


def save(run, step):
    with whole_folder(run.checkpoint(step), step=step, run=run.name) as folder:
        write_json(folder / "config.json", {"model_type": "gpt2"})
        for name in ("model.safetensors", "optimizer.safetensors", "trainer_state.json", "rng-0.safetensors"):
            (folder / name).write_bytes(b"%s of step %d" % (name.encode(), step))
    append_row(run.metrics, {"step": step, "attempt": 1, "time": 0.0, "tokens": step, "train/loss": 1.0})


def python(hub, tmp_path, *arguments):
    variables = environment(hub.url, tmp_path / "hf", PYTHONPATH=str(ROOT), PATH="")
    return subprocess.run([sys.executable, *map(str, arguments)], env=variables, capture_output=True, text=True)


def push(hub, tmp_path, run):
    done = python(hub, tmp_path, "-m", "pipeline.hub", "push", run.path)
    assert done.returncode == 0, done.stderr


def restore(hub, tmp_path, run, **keys):
    keys = {"id": REPO, "strategy": "checkpoint", "revision": None, **keys}
    return python(hub, tmp_path, "-c", RESTORE, run.path, json.dumps(keys))


def test_the_newest_checkpoint_comes_with_the_rows_of_the_run(hub, tmp_path):
    run = a_run(tmp_path)
    for step in (5, 10):
        save(run, step)
        push(hub, tmp_path, run)
    elsewhere = RunDirectory(tmp_path / "elsewhere" / "quick")
    assert "checkpoint-10 was restored" in restore(hub, tmp_path, elsewhere).stdout
    assert problems(elsewhere.checkpoint(10)) == []
    assert elsewhere.metrics.read_bytes() == run.metrics.read_bytes()
    assert elsewhere.recipe.read_bytes() == run.recipe.read_bytes()
    hub.repos[REPO].commits[-1][1]["last-checkpoint/optimizer.safetensors"] = b"other bytes"
    third = RunDirectory(tmp_path / "third" / "quick")
    done = restore(hub, tmp_path, third)
    assert done.returncode == 69
    assert "optimizer.safetensors has" in done.stderr
    assert by_step(third.checkpoints) == []


def test_only_a_start_that_has_a_checkpoint_works_without_asking_the_hub(hub, tmp_path):
    run = RunDirectory(tmp_path / "runs" / "quick")
    with hub.away():
        done = restore(hub, tmp_path, run)
        assert done.returncode == 69, done.stderr
        assert "run.resume=never" in done.stderr
        assert not run.path.exists()
        save(run, 5)
        assert restore(hub, tmp_path, run).returncode == 0
    assert hub.calls == []


def test_a_hub_without_the_repository_or_its_branch_lets_the_run_begin(hub, tmp_path):
    run, new = a_run(tmp_path), RunDirectory(tmp_path / "elsewhere" / "quick")
    assert restore(hub, tmp_path, new).returncode == 0
    save(run, 5)
    push(hub, tmp_path, run)
    assert restore(hub, tmp_path, new, revision="{run}").returncode == 0
    assert not new.path.exists()


def test_another_runs_checkpoint_is_not_taken_and_branches_keep_runs_apart(hub, tmp_path):
    first, second = (a_run(tmp_path, name, revision="runs/{run}") for name in ("first", "second"))
    for run in (first, second):
        save(run, 5)
        push(hub, tmp_path, run)
    assert set(hub.repos[REPO].branches) == {"main", "runs/first", "runs/second"}
    elsewhere = RunDirectory(tmp_path / "elsewhere" / "second")
    done = restore(hub, tmp_path, elsewhere, revision="runs/first")
    assert "holds a checkpoint of the run first, and this run is second" in done.stdout
    assert not elsewhere.path.exists()
    assert "checkpoint-5 was restored" in restore(hub, tmp_path, elsewhere, revision="runs/{run}").stdout


def test_leftovers_of_an_earlier_run_go_and_files_of_others_stay(hub, tmp_path):
    first, second = a_run(tmp_path, "first"), a_run(tmp_path, "second")
    write_text(first.samples, "{}\n")
    save(first, 5)
    push(hub, tmp_path, first)
    files = hub.repos[REPO].commits[-1][1]
    assert {"samples.jsonl", "metrics.jsonl", "last-checkpoint/MANIFEST.json"} <= set(files)
    files["notes.txt"] = b"mine"
    save(second, 5)
    push(hub, tmp_path, second)
    files = hub.repos[REPO].commits[-1][1]
    assert files["notes.txt"] == b"mine"
    assert "samples.jsonl" not in files
    assert json.loads(files["run_manifest.json"])["name"] == "second"
