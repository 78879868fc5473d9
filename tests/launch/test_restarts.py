"""MAX_RESTARTS: which ends are worth another start, and what counts as progress. The run is a stand-in that saves and ends."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.launch.launch import rendezvous
from pipeline.process.errors import RecipeError
from pipeline.run_dir.checkpoints import take_lock

ROOT = Path(__file__).parents[2]
# Each start takes the next line of `plan`: the step of the checkpoint that it leaves, and the status that it ends with.
ENTRY = """
import os, signal, sys, time
from pathlib import Path
from pipeline.run_dir.failures import leave, record_failures_in
from pipeline.run_dir.checkpoints import by_step, step_of
from pipeline.run_dir.rows import append_row
from pipeline.run_dir.run_directory import RunDirectory

folder = Path(sys.argv[1])
(step, end), *later = [line.split() for line in (folder / "plan").read_text().splitlines()]
(folder / "plan").write_text("".join(f"{a} {b}\\n" for a, b in later))
if end == "early":
    os._exit(1)
run = RunDirectory(folder / "run")
run.checkpoints.mkdir(parents=True, exist_ok=True)
saved = by_step(run.checkpoints)
append_row(run.metrics, {"event": "attempt", "step": step_of(saved[-1]) if saved else 0})
record_failures_in(run)
run.checkpoint(int(step)).mkdir(exist_ok=True)
if end == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if end == "waits":
    signal.signal(signal.SIGTERM, lambda *_: leave(1))
    (folder / "waits").touch()
    time.sleep(60)
leave(int(end))
"""
LAUNCH = f"""
import sys
sys.path.insert(0, {str(ROOT / "pipeline" / "launch")!r})
import launch
sys.exit(launch.run([sys.executable, *sys.argv[2:]], dict(launch.os.environ), processes=1, restarts=int(sys.argv[1])))
"""


def start(folder: Path, plan: str, restarts: int) -> subprocess.Popen:
    (folder / "plan").write_text(plan.replace(", ", "\n"))
    (folder / "entry.py").write_text(ENTRY)
    command = [sys.executable, "-c", LAUNCH, str(restarts), str(folder / "entry.py"), str(folder)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("plan", "restarts", "status", "starts"),
    [
        ("5 1, 10 70, 15 kill, 20 0", 3, 0, 4),
        ("5 1, 10 1, 15 1", 1, 1, 2),  # at most n times
        ("5 1, 5 1, 10 0", 5, 1, 2),  # the second start came no further
        ("0 early, 5 0", 5, 1, 1),  # it never opened a run
        *((f"5 {status}, 10 0", 5, status, 1) for status in (64, 65, 66, 69, 71, 73, 74, 75, 76, 130, 143)),
        ("5 1, 10 0", 0, 1, 1),
    ],
)
def test_a_crash_restarts_only_when_that_can_help_and_progress_was_made(tmp_path, plan, restarts, status, starts):
    process = start(tmp_path, plan, restarts)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == status, errors
    assert len((tmp_path / "plan").read_text().splitlines()) == len(plan.split(",")) - starts
    assert errors.count("starting it again") == starts - 1
    assert errors.count("not started again") == (status == 1 and starts <= restarts)


def test_the_line_says_from_which_step_to_which_the_run_came(tmp_path):
    _, errors = start(tmp_path, "5 1, 20 0", 2).communicate(timeout=60)
    assert "status 1, but the run came from step 0 to checkpoint-5: starting it again (1 of MAX_RESTARTS=2)" in errors


def test_a_run_that_crashes_on_a_signal_is_not_started_again(tmp_path):
    process = start(tmp_path, "5 waits, 10 0", 3)
    ends = time.monotonic() + 60
    while not (tmp_path / "waits").exists():
        assert time.monotonic() < ends
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "again (" not in errors


def test_a_signal_between_two_starts_is_answered(tmp_path):
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    lock = take_lock(checkpoints)  # as of a checkpoint that the crashed run was still writing
    process = start(tmp_path, "5 1, 10 0", 3)
    ends = time.monotonic() + 60
    while not (checkpoints / "checkpoint-5").exists():
        assert time.monotonic() < ends
        time.sleep(0.02)
    time.sleep(1.0)  # until the crashed run has ended, and the next start waits
    process.send_signal(signal.SIGTERM)
    lock.release()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    assert "again (" not in errors


@pytest.mark.parametrize("restarts", ["many", "-1", ""])
def test_an_impossible_number_of_restarts_is_refused_in_a_sentence(restarts):
    command = [sys.executable, str(ROOT / "pipeline" / "launch" / "launch.py"), "entry.py", "recipe.yaml"]
    done = subprocess.run(command, env={**os.environ, "MAX_RESTARTS": restarts}, capture_output=True, text=True)
    assert done.returncode == 64
    assert done.stderr.startswith(f"MAX_RESTARTS is {restarts!r}; it must be a whole number, 0 or more.")


@pytest.mark.parametrize("lacking", ["NODE_RANK", "MASTER_ADDR"])
def test_a_machine_that_does_not_know_its_place_is_told_so(lacking):
    nodes = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "here"}
    del nodes[lacking]
    command = [sys.executable, str(ROOT / "pipeline" / "launch" / "launch.py"), "entry.py", "recipe.yaml"]
    done = subprocess.run(command, env={**os.environ, **nodes}, capture_output=True, text=True)
    assert done.returncode == 64
    assert "Set NODE_RANK (0 to 1) and MASTER_ADDR" in done.stderr


def test_a_node_rank_beyond_the_number_of_hosts_is_refused():
    nodes = {"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "here"}
    with pytest.raises(RecipeError, match="NODE_RANK is 2, and NNODES is 2"):
        rendezvous(nodes)


def test_a_host_that_does_not_come_ends_the_start_with_status_70(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environ = {**os.environ, **nodes, "RDZV_TIMEOUT": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(ROOT / "pipeline" / "launch" / "launch.py"), "entry.py", "recipe.yaml"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 70, done.stderr
    assert "the machines of the job did not meet" in done.stderr
