"""A rank that stands still or is lost: found, named and ended, and the same command goes on."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pipeline.run_dir.checkpoints import by_step, problems
from pipeline.run_dir.rows import read_rows
from tests.runner import WarmRunner

ROOT = Path(__file__).parents[2]

# A callback of the user's that makes one rank sleep once, in the stage that $HANG names, at step 3.
HANG = """
import ctypes, os, time
import psutil
from transformers import TrainerCallback
from pipeline.process import commands

WHERE, RANK = os.environ.get("HANG", " ").split(" ")


def sleep_once(function, when, sleep=time.sleep):
    def sleeping(*args, **kwargs):
        if when():
            sleep(1000)
        return function(*args, **kwargs)

    return sleeping


def suspend_writer(start, when):
    def starting(*arguments, **popen):
        process = start(*arguments, **popen)
        if when() and str(arguments[0]).endswith("run_dir/checkpoints.py"):
            psutil.Process(process.pid).suspend()  # before it has its job: a moment later it may be done
            open("writer", "w").write(str(process.pid))
        return process

    return starting


class Hangs(TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, processing_class=None, train_dataloader=None, **kwargs):
        if os.environ.get("RANK", "0") != RANK or state.global_step != 2:
            return
        if WHERE == "data":
            rows = train_dataloader.rows
            rows.micro_batch = sleep_once(rows.micro_batch, lambda: state.global_step == 3)
        if WHERE == "foreign":
            rows = train_dataloader.rows
            rows.micro_batch = sleep_once(rows.micro_batch, lambda: state.global_step == 3, ctypes.PyDLL(None).sleep)
        if WHERE == "save":
            processing_class.save_pretrained = sleep_once(processing_class.save_pretrained, lambda: True)
        if WHERE == "evaluation":
            model.per_token_nll = sleep_once(model.per_token_nll, lambda: True)
        if WHERE == "writer":
            commands.start = suspend_writer(commands.start, lambda: state.global_step == state.max_steps)

    def on_step_end(self, args, state, control, **kwargs):
        if os.environ.get("RANK", "0") == RANK and state.global_step == 3 and WHERE == "collective":
            time.sleep(1000)
"""


@pytest.fixture
def runner(tmp_path, cache, text_files, chat_files, warm):
    others = set(psutil.Process().children(recursive=True))  # the interpreter that other tests fork from
    yield WarmRunner(tmp_path, cache, text_files, chat_files, warm)
    for process in set(psutil.Process().children(recursive=True)) - others:  # of a test that failed half-way
        process.kill()


def script(runner, recipe, *overrides, processes, **environment) -> subprocess.Popen:
    """`bash run_pretrain.sh` in the environment that these tests run in."""
    environ = {name: value for name, value in os.environ.items() if name != "CONDA_PREFIX"}
    environ |= {"VIRTUAL_ENV": sys.prefix, "CUDA_VISIBLE_DEVICES": "", "NPROC": str(processes), **environment}
    environ["OMP_WAIT_POLICY"] = "passive"  # threads that spin would starve other tests
    command = ["bash", str(ROOT / "run_pretrain.sh"), str(recipe), *overrides]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, **pipes, env=environ, cwd=runner.folder, start_new_session=True)


def hang(runner, where, rank, processes, *, cold=False) -> tuple[str, Path]:
    """Return output and directory of a run in which a rank sleeps. cold: by the script of a user."""
    (runner.folder / "mine.py").write_text(HANG)
    train = {"max_steps": 6, "save_steps": 3, "eval_steps": 3, "per_device_train_batch_size": 4, "logging_steps": 1}
    recipe = runner.recipe("hang", "gpt2", train=train, run={"callbacks": ["mine:Hangs"], "hang_timeout": 3})
    if cold:
        process = script(runner, recipe, processes=processes, HANG=f"{where} {rank}")
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 70, output[-3000:]
    else:
        output = runner.train(recipe, ranks=processes, status=70, HANG=f"{where} {rank}").output
    assert "Traceback" not in output
    directory = runner.folder / "runs" / "hang"
    # From the last progress to the end: the timeout, and at most 10 s in which a rank that hangs in foreign code may answer.
    silent = re.search(r"no progress for (\d+) s", output)
    assert silent, output[-3000:]
    assert 3 <= int(silent[1]) <= 3 + 12
    return output, directory


@pytest.mark.full_except("data-0-1")
@pytest.mark.parametrize(
    ("where", "rank", "processes"),
    [
        ("data", 0, 1),
        ("collective", 1, 2),
        ("save", 0, 2),
        ("evaluation", 1, 2),
        pytest.param("evaluation", 0, 1, marks=pytest.mark.slow),
        pytest.param("data", 1, 2, marks=pytest.mark.slow),
    ],
)
def test_a_sleeping_rank_is_named_with_its_stage_and_all_stacks_written(runner, where, rank, processes):
    output, directory = hang(runner, where, rank, processes, cold=where == "collective")
    failure = json.loads((directory / "failure.json").read_text())
    assert (failure["status"], failure["class"]) == (70, "HangError")
    stage = "step" if where == "collective" else where
    assert re.search(
        rf"waits for rank {rank} \(process \d+ on \S+\) at step 3 in {stage}, mine.py:\d+", failure["message"]
    )
    assert failure["message"] in output
    for number in range(processes):
        text = (directory / "stacks" / "attempt-1" / f"rank-{number}.txt").read_text()
        assert "Thread" in text
        assert "hang_watch.py" in text
        assert ("mine.py" in text) == (number == rank)


@pytest.mark.full
def test_a_disk_that_hangs_at_the_last_save_ends_the_run_too(runner):
    output, directory = hang(runner, "writer", 0, 1)
    writer = psutil.Process(int((runner.folder / "writer").read_text()))
    assert "run_dir/checkpoints.py" in " ".join(writer.cmdline())
    writer.kill()
    assert re.search(r"waits for rank 0 \(process \d+ on \S+\) at step 6 in save, ", output), output
    assert not (directory / "model").exists()


@pytest.mark.slow  # torch's launcher gives a rank that does not answer 30 s before it kills it
def test_a_rank_holding_the_python_lock_is_named_and_its_stack_written(runner):
    output, directory = hang(runner, "foreign", 1, 2, cold=True)
    assert "rank 1 gave no answer within 10 s" in output
    assert "mine.py" in (directory / "stacks" / "attempt-1" / "rank-1.txt").read_text()


def trained(directory: Path, step: int) -> bool:
    return any(row.get("step", 0) >= step and "event" not in row for row in read_rows(directory / "metrics.jsonl"))


def ranks_of(process: subprocess.Popen, entry: str = "pretrain.py") -> dict[int, psutil.Process]:
    """The processes that train, by rank."""
    found = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            words, environ = child.cmdline(), child.environ()
        except psutil.NoSuchProcess:
            continue
        if "LOCAL_RANK" in environ and any(word.endswith(entry) for word in words[1:3]):
            found[int(environ["RANK"])] = child
    return found


WORKS = """
import os, time
from pipeline.monitor.heartbeat import beat
from transformers import TrainerCallback


class Works(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        for _ in range(80 * (os.environ["RANK"] == "0" and state.global_step == 3)):
            beat()
            time.sleep(0.1)
"""


@pytest.mark.full
def test_a_rank_waiting_for_one_that_works_does_not_report_a_hang(runner):
    (runner.folder / "mine.py").write_text(WORKS)
    train = {"max_steps": 4, "save_steps": 100, "per_device_train_batch_size": 4}
    run = {"callbacks": ["mine:Works"], "hang_timeout": 3}
    runner.train(runner.recipe("works", "gpt2", train=train, run=run), ranks=2)


@pytest.mark.full
@pytest.mark.parametrize(
    ("launcher", "rank"),
    [("run_pretrain.sh", 1), ("torchrun", 0), pytest.param("accelerate", 1, marks=pytest.mark.slow)],
)
def test_a_killed_rank_ends_the_others_and_the_same_command_goes_on(runner, launcher, rank):
    train = {"max_steps": 4000, "save_steps": 5, "per_device_train_batch_size": 4, "logging_steps": 1}
    recipe = runner.recipe("lost", "gpt2", train=train)
    directory = runner.folder / "runs" / "lost"

    def start(*overrides):
        if launcher == "run_pretrain.sh":
            return script(runner, recipe, *overrides, processes=2)
        if launcher == "accelerate":
            return runner.start(recipe, *overrides, ranks=2)
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
        command += [str(ROOT / "pipeline" / "pretrain.py"), str(recipe), *overrides]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, **pipes, env=environ, cwd=runner.folder, start_new_session=True)

    process = start()
    while process.poll() is None and not trained(directory, 6):
        time.sleep(0.02)
    ranks = ranks_of(process)
    assert sorted(ranks) == [0, 1], process.communicate()[0][-3000:] if process.poll() is not None else ranks
    ranks[rank].send_signal(signal.SIGKILL)
    psutil.wait_procs([ranks[1 - rank]], timeout=30)
    assert not ranks[1 - rank].is_running()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == (70 if launcher == "run_pretrain.sh" else 1), output[-3000:]
    failure = json.loads((directory / "failure.json").read_text())
    assert failure["status"] == 70
    assert f"rank {rank} (process {ranks[rank].pid} on " in failure["message"]
    assert "Run the same command again" in failure["message"]
    if launcher == "run_pretrain.sh":
        assert f"rank {rank} was lost: killed by SIGKILL" in output
        assert "Traceback" not in output
    checkpoints = by_step(directory / "checkpoints")
    assert checkpoints
    assert not any(map(problems, checkpoints))
    # The horizon is the run's own: stop it again once it has gone on.
    process = start()
    while process.poll() is None and not any(
        r.get("attempt") == 2 and "train/loss" in r for r in read_rows(directory / "metrics.jsonl")
    ):
        time.sleep(0.02)
    # Ended hard: the horizon is far.
    for child in [*psutil.Process(process.pid).children(recursive=True), process]:
        child.kill()
    output, _ = process.communicate(timeout=60)
    assert "going on from checkpoint-" in output
