"""The process that writes a checkpoint: it survives the training, keeps the next start waiting, and says how it failed."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from safetensors.torch import load_file

from pipeline.process.errors import CannotWriteError, DiskFullError, HangError
from pipeline.run_dir import checkpoints
from pipeline.run_dir.checkpoints import by_step, problems
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.training.checkpoint import CheckpointSaver
from tests.conftest import ROOT

WEIGHTS = {"weight": torch.arange(1_000_000, dtype=torch.float32)}


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.checkpoints.mkdir(parents=True)
    return directory


def saver_of(run, **settings):
    return CheckpointSaver(run, **{"keep": 2, "every": None, "best": False, **settings})


def small_files(folder):
    (folder / "config.json").write_text("{}")
    return {"model.safetensors": (WEIGHTS, {"format": "pt"})}


def names(run):
    return sorted(os.listdir(run.checkpoints))


def test_a_written_checkpoint_is_whole_and_what_was_copied(run):
    saver = saver_of(run)
    saver.save(5, write_small=small_files, tokens=10)
    WEIGHTS["weight"].add_(1)  # training goes on
    try:
        assert saver.wait() > 0
    finally:
        WEIGHTS["weight"].sub_(1)
    assert problems(run.checkpoint(5)) == []
    assert torch.equal(load_file(run.checkpoint(5) / "model.safetensors")["weight"], WEIGHTS["weight"])
    assert saver.check() is None


def test_rotation_keeps_the_newest_the_every_nth_and_the_best(run):
    saver = saver_of(run, keep=1, every=40, best=True)
    for step, bpb in {10: 3.0, 20: 1.0, 30: 2.0, 40: 1.5, 50: 1.7, 60: float("nan")}.items():
        saver.save(step, write_small=small_files)
        saver.add_score(step, {"val/loss": 9.0 - step, "val/bpb": bpb})
    saver.wait()
    assert [folder.name for folder in by_step(run.checkpoints)] == [f"checkpoint-{step}" for step in (20, 40, 60)]


def test_a_writer_outlives_training_and_the_next_start_waits_for_it(run, tmp_path):
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(tmp_path)!r})
import torch
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.training.checkpoint import CheckpointSaver
run = RunDirectory({str(run.path)!r})
run.hold()
saver = CheckpointSaver(run, keep=2, every=None, best=False)
saver.save(7, write_small=lambda folder: {{"model.safetensors": ({{"weight": torch.zeros(60_000_000)}}, None)}})
os.killpg(0, signal.SIGKILL)
"""
    trainer = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    assert trainer.wait() == -signal.SIGKILL
    assert not run.checkpoint(7).exists(), "240 MB were written before the training was dead: nothing was tested"
    RunDirectory(run.path).hold()
    assert problems(run.checkpoint(7)) == []
    assert names(run) == [".writing", "checkpoint-7"]


def test_a_killed_writer_is_started_again_with_what_was_copied(run):
    saver = saver_of(run)
    saver.save(5, write_small=small_files)
    os.kill(saver.process.pid, signal.SIGKILL)
    saver.wait()
    assert problems(run.checkpoint(5)) == []


def test_a_writer_killed_twice_ends_the_run_with_a_restartable_status(run):
    saver = saver_of(run)
    saver.save(5, write_small=small_files)
    first = saver.process.pid
    os.kill(first, signal.SIGKILL)

    def kill_the_second():
        while saver.process.pid == first:
            time.sleep(0.001)
        os.kill(saver.process.pid, signal.SIGKILL)

    killing = threading.Thread(target=kill_the_second)
    killing.start()
    with pytest.raises(HangError, match="status -9"):
        saver.wait()
    killing.join()
    assert names(run) == [".writing"]


def test_a_refusing_disk_is_reported_by_file_and_the_older_checkpoint_stays(run, monkeypatch):
    saver = saver_of(run)
    saver.save(5, write_small=small_files)
    saver.wait()
    # Files that are larger than this are refused to the writer, as a full disk would: EFBIG.
    import resource

    monkeypatch.setattr(
        checkpoints.subprocess, "Popen", with_limit(subprocess.Popen, resource.RLIMIT_FSIZE, 1_000_000)
    )
    saver.save(10, write_small=small_files)
    with pytest.raises(CannotWriteError, match=r"model.safetensors: File too large, so checkpoint-10 was not written"):
        saver.wait()
    assert names(run) == [".writing", "checkpoint-5"]


def with_limit(popen, what, limit):
    import resource

    def limited(*args, **settings):
        return popen(*args, **settings, preexec_fn=lambda: resource.setrlimit(what, (limit, limit)))

    return limited


def test_a_full_disk_while_the_small_files_are_written_leaves_nothing_behind(run):
    def full(folder):
        (folder / "config.json").write_text("{}")
        raise OSError(28, "No space left on device", str(folder / "config.json"))

    with pytest.raises(DiskFullError, match="checkpoint-5 was not written; the checkpoints before it are whole"):
        saver_of(run).save(5, write_small=full)
    assert names(run) == []


def test_a_start_gives_up_on_a_writer_that_never_ends(run, monkeypatch):
    monkeypatch.setattr("pipeline.run_dir.run_directory.WRITER_WAIT_S", 0.2)
    lock = checkpoints.take_lock(run.checkpoints)
    started = time.monotonic()
    with pytest.raises(CannotWriteError, match="another process has been writing a checkpoint"):
        RunDirectory(run.path).hold()
    assert time.monotonic() - started < 60
    lock.release()


FAILING = """
import errno, sys
sys.path.insert(0, sys.argv[1])
from pipeline.run_dir import checkpoints

real = checkpoints.{function}

def failing(*args, **kwargs):
    real(*args, **kwargs)
    raise OSError(errno.EIO, "Input/output error", "the folder")

checkpoints.{function} = failing
sys.exit(checkpoints.main())
"""


@pytest.mark.parametrize("function", ["rotate", "publish_folder"])
def test_undeleted_old_checkpoints_are_reported_and_an_unsafe_name_ends_the_run(run, function, monkeypatch, capfd):
    """The writer is the real one, with a function of it that fails at its end, as one on a failing disk."""
    command, popen = [sys.executable, "-c", FAILING.format(function=function), str(ROOT)], subprocess.Popen
    monkeypatch.setattr(checkpoints.subprocess, "Popen", lambda _, **how: popen(command, **how))
    saver = saver_of(run)
    saver.save(5, write_small=small_files)
    if function == "rotate":
        saver.wait()
        assert "older checkpoints could not be deleted: the folder: Input/output error" in capfd.readouterr().out
    else:
        with pytest.raises(CannotWriteError, match="a power cut may still take it"):
            saver.wait()
    assert problems(run.checkpoint(5)) == []
