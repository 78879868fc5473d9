"""Trackers hold the same numbers under the same names as metrics.jsonl, over a kill and a restart too."""

import importlib.util
import json

import numpy as np
import pytest

from faults.services import HF_TOKEN, WANDB_API_KEY
from pipeline.run_dir.rows import counts, read_rows
from tests.callbacks.tracker_files import tensorboard_scalars, tensorboard_texts, trackio_rows, wandb_history
from tests.faults.test_no_secret_written import files_with
from tests.runner import WarmRunner

HAS_TRACKIO = importlib.util.find_spec("trackio") is not None
TRACKERS = ["tensorboard", "wandb", *(["trackio"] if HAS_TRACKIO else [])]
STAMP = {"step", "attempt", "time", "tokens"}


def offline_runs(directory):
    return sorted((directory / "wandb").glob("offline-run-*"))


def have_step_12(directory):
    """Whether W&B, which takes its rows a moment later, has them all."""
    wandb = [
        row["step"]
        for folder in offline_runs(directory)
        if list(folder.glob("*.wandb"))
        for row in wandb_history(folder)
    ]
    return 12 in wandb


@pytest.fixture(scope="module")
def tracked(tmp_path_factory, cache, text_files, chat_files, warm):
    """A run with all trackers, killed behind step 12 with a checkpoint of step 10, and run to its end at step 20."""
    runner = WarmRunner(tmp_path_factory.mktemp("tracked"), cache, text_files, chat_files, warm)
    recipe = runner.recipe(
        "tracked",
        "gpt2",
        monitor={"trackers": TRACKERS},
        samples={"prompts": ["The path", "A <b>file</b>"], "max_new_tokens": 4, "every_steps": 6},
    )
    environment = {"WANDB_MODE": "offline", "WANDB_API_KEY": WANDB_API_KEY, "HF_TOKEN": HF_TOKEN}
    directory = runner.kill(recipe, name="tracked", after_step=12, ready=have_step_12, **environment)
    first_id = json.loads((directory / "run_manifest.json").read_text())["wandb_id"]
    return runner.train(recipe, **environment), first_id


def rows_that_count(run):
    return [row for row in run.rows() if "event" not in row]


def samples_that_count(run):
    attempts = [row for row in read_rows(run.directory / "metrics.jsonl") if row.get("event") == "attempt"]
    tables: dict = {}
    for row in read_rows(run.directory / "samples.jsonl"):
        if counts(row, attempts):
            tables.setdefault(row["step"], []).append([row["prompt"], row["text"]])
    return tables


def test_tensorboard_holds_what_counts_as_float32(tracked):
    run, _ = tracked
    rows, tags = rows_that_count(run), tensorboard_scalars(run.directory / "tensorboard")
    assert set(tags) == {name for row in rows for name in row} - STAMP
    for name, values in tags.items():
        assert values == [(row["step"], np.float32(row[name])) for row in rows if name in row], name
    tables = tensorboard_texts(run.directory / "tensorboard", "samples/text_summary")
    assert "<pre>A &lt;b&gt;file&lt;/b&gt;</pre>" in tables[18]
    assert set(tables) >= set(samples_that_count(run)) == {6, 12, 18}


@pytest.mark.full
def test_wandb_continues_under_its_id_and_holds_rows_of_every_attempt(tracked):
    run, first_id = tracked
    assert json.loads((run.directory / "run_manifest.json").read_text())["wandb_id"] == first_id
    folders = offline_runs(run.directory)
    assert [folder.name.rsplit("-", 1)[1] for folder in folders] == [first_id] * 2
    history = [row for folder in folders for row in wandb_history(folder)]
    numbers = [{k: v for k, v in row.items() if k[0] != "_"} for row in history if "samples/_type" not in row]
    logged = [row for row in read_rows(run.directory / "metrics.jsonl") if "event" not in row]
    assert numbers == [{k: v for k, v in row.items() if k != "time"} for row in logged]
    # As docs/metrics.md says to read it: without what a later attempt went back behind.
    attempts = [row for row in read_rows(run.directory / "metrics.jsonl") if row.get("event") == "attempt"]
    assert len([row for row in numbers if counts(row, attempts)]) == len(rows_that_count(run)) < len(numbers)
    tables = [json.loads(path.read_text()) for path in sorted(folders[1].rglob("*.table.json"))]
    assert all(table["columns"] == ["step", "prompt", "text"] for table in tables)
    counting = samples_that_count(run)
    assert {t["data"][0][0]: [row[1:] for row in t["data"]] for t in tables} == {s: counting[s] for s in (12, 18)}


@pytest.mark.full
@pytest.mark.skipif(not HAS_TRACKIO, reason="trackio is not installed (the extra trackio)")
def test_trackio_holds_what_counts_in_one_run(tracked):
    run, _ = tracked
    found = trackio_rows(run.directory / "trackio")
    numbers = [row for row in found if "samples" not in row]
    assert numbers == [
        {"run": "tracked", **row, "time": pytest.approx(row["time"], abs=1.0)} for row in rows_that_count(run)
    ]
    tables = {
        row["step"]: [list(cells.values()) for cells in row["samples"]["_value"]] for row in found if "samples" in row
    }
    assert tables == samples_that_count(run)


@pytest.mark.full
def test_no_tracker_keeps_a_secret_of_the_machine(tracked):
    run, _ = tracked
    assert not [
        warning
        for warning in ("Trackio stopped", "W&B stopped", "W&B could not", "TensorBoard stopped")
        if warning in run.output
    ]
    assert files_with((HF_TOKEN, WANDB_API_KEY), run.directory) == []
