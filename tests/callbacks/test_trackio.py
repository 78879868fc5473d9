"""Trackio's database is a copy of what counts of a run's files, made beside the training, which no failure of it stops."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from faults.services import HF_TOKEN, WANDB_API_KEY
from pipeline.callbacks import trackers as trackio_run
from pipeline.callbacks import trackio_writer
from pipeline.callbacks.trackers import TrackioRun
from pipeline.run_dir.rows import append_row, last_attempts, read_rows
from pipeline.run_dir.run_directory import RunDirectory
from tests.callbacks.tracker_files import trackio_rows
from tests.hub.hub_stand_in import hub_stand_in
from tests.runner import ROOT

pytest.importorskip("trackio")

RECIPE = "monitor:\n  project: small models\nrun:\n  note: a note\n"


@pytest.fixture
def run(tmp_path):
    run = RunDirectory(tmp_path / "runs" / "first")
    run.path.mkdir(parents=True)
    run.recipe.write_text(RECIPE)
    run.update_manifest(name="first")
    return run


def begin_attempt(run, attempt, *, step):
    append_row(run.metrics, {"event": "attempt", "attempt": attempt, "step": step, "time": time.time()})


def log_steps(run, attempt, steps):
    with open(run.metrics, "ab") as file:
        for step in steps:
            stamp = {"step": step, "attempt": attempt, "time": time.time(), "tokens": 512 * step}
            row = stamp | {"train/loss": 1 / (step + attempt), "perf/total_s": 1e9 / 7 + step}
            file.write(json.dumps(row).encode() + b"\n")


def sample(run, attempt, step, texts):
    for prompt, text in texts.items():
        stamp = {"step": step, "attempt": attempt, "time": time.time(), "tokens": 512 * step}
        append_row(run.samples, stamp | {"prompt": prompt, "text": text, "chat": False})


def write(run):
    done = subprocess.run([sys.executable, trackio_writer.__file__, str(run.path)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def expected(run):
    """The rows that count, as Trackio is to hold them; its times are exact to the microsecond."""
    rows = [{"run": "first", **row} for row in last_attempts(read_rows(run.metrics)) if "event" not in row]
    return [row | {"time": pytest.approx(row["time"], abs=1e-6)} for row in rows]


def numbers_of(run):
    return [row for row in trackio_rows(run.trackio) if "samples" not in row]


def tables_of(run):
    return {row["step"]: row["samples"]["_value"] for row in trackio_rows(run.trackio) if "samples" in row}


def state(step=0):
    return SimpleNamespace(is_world_process_zero=True, global_step=step, max_steps=10)


def wait_for(condition):
    ends = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < ends, "waited too long"
        time.sleep(0.05)


def test_trackio_holds_every_row_that_counts_with_its_own_time_and_none_twice(run):
    begin_attempt(run, 1, step=0)
    log_steps(run, 1, range(1, 13))
    sample(run, 1, 10, {"A": "kept", "B": "kept too"})
    sample(run, 1, 12, {"A": "gone back behind"})
    write(run)
    assert numbers_of(run) == expected(run)
    begin_attempt(run, 2, step=10)
    log_steps(run, 2, range(11, 15))
    sample(run, 2, 14, {"A": "new"})
    write(run)
    assert numbers_of(run) == expected(run)
    assert [row["step"] for row in numbers_of(run)] == list(range(1, 15))
    assert tables_of(run) == {
        10: [{"prompt": "A", "text": "kept"}, {"prompt": "B", "text": "kept too"}],
        14: [{"prompt": "A", "text": "new"}],
    }


def test_trackio_itself_lists_the_one_run_with_its_recipe(run):
    begin_attempt(run, 1, step=0)
    log_steps(run, 1, range(1, 4))
    code = (
        "import sys; from pipeline.callbacks.trackio_writer import main; main(sys.argv[1:]); main(sys.argv[1:]); import trackio\n"
        "(run,) = trackio.Api().runs('small models'); print(run.name, run.config['run']['note'])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code, str(run.path)], env=environment, capture_output=True, text=True)
    assert done.stdout == "first a note\n", done.stderr
    assert numbers_of(run) == expected(run)


def test_trackio_follows_a_run_as_it_grows_with_the_samples_of_a_step_in_one_table(run):
    tracker = TrackioRun(run)
    begin_attempt(run, 1, step=0)
    tracker.on_train_begin(None, state(), None)
    log_steps(run, 1, [1, 2])
    wait_for(lambda: len(numbers_of(run)) == 2)
    lines = [json.dumps({"step": s, "attempt": 1, "time": time.time(), "train/loss": 0.5}) + "\n" for s in (3, 4, 5)]
    with open(run.metrics, "a") as file:
        file.write(lines[0] + lines[1][:20])  # in one: who sees row 3 sees half of row 4
    sample(run, 1, 3, {"A": "a"})
    wait_for(lambda: len(numbers_of(run)) == 3)
    sample(run, 1, 3, {"B": "b"})
    with open(run.metrics, "a") as file:
        file.write(lines[1][20:] + "{torn\n" + lines[2])
    tracker.on_train_end(None, state(10), None)
    assert numbers_of(run) == expected(run)
    assert [row["step"] for row in numbers_of(run)] == [1, 2, 3, 4, 5]
    assert tables_of(run) == {3: [{"prompt": "A", "text": "a"}, {"prompt": "B", "text": "b"}]}


def test_trackio_gets_what_was_logged_before_the_training_was_killed(run, tmp_path):
    begin_attempt(run, 1, step=0)
    log_steps(run, 1, range(1, 6))
    if (training := os.fork()) == 0:
        tracker = TrackioRun(run)
        tracker.on_train_begin(None, state(), None)
        (tmp_path / "pid").write_text(str(tracker.process.pid))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(training, 0)
    wait_for(lambda: not psutil.pid_exists(int((tmp_path / "pid").read_text())))
    assert numbers_of(run) == expected(run)


def test_the_process_for_trackio_has_no_secret_asks_nobody_and_writes_into_the_run_only(run, tmp_path, monkeypatch):
    with hub_stand_in() as hub:
        for name, value in {
            "HF_TOKEN": HF_TOKEN,
            "WANDB_API_KEY": WANDB_API_KEY,
            "HF_HOME": str(tmp_path / "home"),
            "HF_ENDPOINT": hub.url,
            "HF_HUB_OFFLINE": "0",
            "TRACKIO_DIR": str(tmp_path / "elsewhere"),
            "TRACKIO_BUCKET_ID": "somebody/bucket",
            "TRACKIO_SPACE_ID": "somebody/space",
        }.items():
            monkeypatch.setenv(name, value)
        trackio_run.known_secrets.cache_clear()
        tracker = TrackioRun(run)
        begin_attempt(run, 1, step=0)
        log_steps(run, 1, [1])
        tracker.on_train_begin(None, state(), None)
        trackio_run.known_secrets.cache_clear()
        process = psutil.Process(tracker.process.pid)
        wait_for(lambda: len(numbers_of(run)) == 1)
        assert process.net_connections() == []
        assert process.children() == []
        assert not [name for name, value in process.environ().items() if value in (HF_TOKEN, WANDB_API_KEY)]
        tracker.on_train_end(None, state(10), None)
        assert hub.received == []
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert all(run.path in path.parents for path in written)
    assert not [p for p in written if any(t.encode() in p.read_bytes() for t in (HF_TOKEN, WANDB_API_KEY))]


def test_trackio_that_cannot_start_is_reported_once(run, capsys):
    run.trackio.write_text("in the way")
    tracker = TrackioRun(run)
    tracker.on_train_begin(None, state(), None)
    tracker.process.wait(timeout=60)
    tracker.on_log(None, state(1), None, logs={"train/loss": 1.0})
    tracker.on_log(None, state(2), None, logs={"train/loss": 1.0})
    tracker.on_train_end(None, state(10), None)
    out = capsys.readouterr().out
    assert out.count("Trackio stopped taking numbers (FileExistsError: ") == 1, out
    assert f"python -m pipeline.callbacks.trackio_writer {run.path}" in out


@pytest.mark.parametrize("how", ["killed", "no more space"])
def test_trackio_that_fails_in_mid_run_is_reported_once_and_can_be_written_afterwards(run, capsys, how):
    tracker = TrackioRun(run)
    begin_attempt(run, 1, step=0)
    log_steps(run, 1, [1])
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if how == "no more space":  # what the process inherits: a file may not grow beyond this
            resource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, limit[1]))
        tracker.on_train_begin(None, state(), None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    wait_for(lambda: len(numbers_of(run)) == 1)
    if how == "killed":
        tracker.process.kill()
    log_steps(run, 1, range(2, 20_000))
    wait_for(lambda: tracker.process.poll() is not None)
    for step in (2, 3):
        tracker.on_log(None, state(step), None, logs={"train/loss": 1.0})
    tracker.on_train_end(None, state(10), None)
    assert capsys.readouterr().out.count("Trackio stopped taking numbers") == 1
    write(run)
    assert len(numbers_of(run)) == len(expected(run)) == 19_999
