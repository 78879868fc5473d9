"""Trackio's database holds the rows that count of a run's files, and no failure of it stops a run."""

import os
import time
from types import SimpleNamespace

import pytest

from pipeline.callbacks import trackers
from pipeline.callbacks.trackers import TrackioRun
from pipeline.run_dir.rows import append_row, last_attempts, read_rows
from pipeline.run_dir.run_directory import RunDirectory
from tests.callbacks.tracker_files import trackio_rows

pytest.importorskip("trackio")


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))  # as it was, afterwards
    from trackio import sqlite_storage

    # Read from the environment when it is imported, which other tests have done.
    monkeypatch.setattr(sqlite_storage, "TRACKIO_DIR", tmp_path / "runs" / "first" / "trackio")
    run = RunDirectory(tmp_path / "runs" / "first")
    run.path.mkdir(parents=True)
    run.update_manifest(name="first")
    return run


def state(step=0):
    return SimpleNamespace(is_world_process_zero=True, global_step=step, max_steps=20)


def attempt(run, number, *, start, steps, samples=()):
    """Log the steps as a run does: into its files, and to the tracker."""
    append_row(run.metrics, {"event": "attempt", "attempt": number, "step": start, "time": time.time()})
    settings = {"project": "small models", "config": {"run": {"note": "a note"}}, "attempt": number}
    tracker = TrackioRun(run, **settings, tokens_at=lambda step: 512 * step)
    tracker.on_train_begin(None, state(start), None)
    for step in steps:
        stamp = {"step": step, "attempt": number, "time": time.time(), "tokens": 512 * step}
        logs = {"train/loss": 1 / (step + number), "perf/total_s": 1e9 / 7 + step}
        append_row(run.metrics, stamp | logs)
        tracker.on_log(None, state(step), None, logs=logs)
        if step in samples:
            for prompt in ("A", "B"):
                append_row(run.samples, stamp | {"prompt": prompt, "text": f"{prompt} at {step}", "chat": False})
            tracker.add_samples(step, ["A", "B"], [f"A at {step}", f"B at {step}"])
    return tracker


def test_trackio_holds_each_counting_row_once_and_samples_as_tables(run):
    attempt(run, 1, start=0, steps=range(1, 13), samples=(6, 12))  # killed: nothing ends it
    attempt(run, 2, start=10, steps=range(11, 15), samples=(14,)).on_train_end(None, state(14), None)
    found = trackio_rows(run.trackio)
    rows = [{"run": "first", **row} for row in last_attempts(read_rows(run.metrics)) if "event" not in row]
    numbers = sorted((row for row in found if "samples" not in row), key=lambda row: row["step"])
    assert numbers == [row | {"time": pytest.approx(row["time"], abs=1.0)} for row in rows]
    tables = {row["step"]: row["samples"]["_value"] for row in found if "samples" in row}
    assert tables == {
        step: [{"prompt": prompt, "text": f"{prompt} at {step}"} for prompt in ("A", "B")] for step in (6, 14)
    }


def test_trackio_that_fails_is_reported_once(run, capsys, monkeypatch):
    monkeypatch.setattr(trackers, "FLUSH_S", 0.0)
    tracker = attempt(run, 1, start=0, steps=range(1, 3))

    def refuse(**batch):
        raise OSError("the disk is away")

    tracker.storage = SimpleNamespace(bulk_log=refuse)
    for step in range(3, 6):
        tracker.on_log(None, state(step), None, logs={"train/loss": 1.0})
    tracker.on_train_end(None, state(6), None)
    assert capsys.readouterr().out.count("Trackio stopped taking numbers (the disk is away)") == 1
    assert os.environ["TRACKIO_DIR"] == str(run.trackio)
