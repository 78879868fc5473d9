"""File systems and sandboxes that lack a call: what a run can do without is noted, and the rest is reported in a sentence."""

import errno
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from safetensors.torch import load_file

from faults import refused_calls
from pipeline.process import storage
from pipeline.run_dir import failures
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.training.checkpoint import not_written
from tests.runner import ROOT, WarmRunner

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not refused_calls.is_possible(), reason="no filter of system calls here"),
]


def refused(asked: str, *command: object, **how) -> subprocess.CompletedProcess:
    filtered = [sys.executable, refused_calls.__file__, asked, *map(str, command)]
    return subprocess.run(filtered, cwd=how.pop("cwd", ROOT), capture_output=True, text=True, timeout=300, **how)


def python(asked: str, code: str, *arguments: object, **how) -> subprocess.CompletedProcess:
    return refused(asked, sys.executable, "-c", textwrap.dedent(code), *arguments, **how)


@pytest.fixture
def runner(tmp_path, cache, text_files, chat_files, warm) -> WarmRunner:
    return WarmRunner(tmp_path, cache, text_files, chat_files, warm)


@pytest.mark.parametrize("error", ["EINVAL", "ENOSYS", "ENOTSUP"])
def test_a_file_system_without_fsync_is_noted_once_and_written_to(tmp_path, error):
    done = python(
        f"fsync={error}",
        """
        import sys; from pathlib import Path
        from pipeline.process.storage import write_text
        from pipeline.run_dir.checkpoints import problems, whole_folder
        write_text(Path(sys.argv[1]) / "a", "a")
        with whole_folder(Path(sys.argv[1]) / "folder") as folder:
            write_text(folder / "b", "b")
        print(problems(Path(sys.argv[1]) / "folder"))
        """,
        tmp_path,
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
    assert done.stderr.count("does not know fsync") == 1


def test_an_fsync_that_fails_is_still_an_error(tmp_path):
    done = python(
        "fsync=EIO",
        "from pipeline.process.storage import write_text; import sys; write_text(sys.argv[1] + '/a', 'a')",
        tmp_path,
    )
    assert "Input/output error" in done.stderr


def test_a_refused_look_at_the_cores_counts_them_all():
    done = python(
        "sched_getaffinity=ENOSYS", "from pipeline.hardware.processor import usable_cores; print(usable_cores())"
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 1


def test_a_file_system_without_locks_is_named(tmp_path):
    code = "import sys; from pipeline.run_dir.failures import exit_with_status as e; from pipeline.process.storage import lock; e(lambda argv: lock(argv[0]))"
    done = python("flock=ENOLCK", code, tmp_path / ".lock")
    assert (done.returncode, "Traceback" in done.stderr) == (73, False)
    assert "its file system cannot do what a whole file needs" in done.stderr


def test_without_a_temporary_folder_a_command_ends_in_a_sentence(tmp_path):
    code = "from pipeline.run_dir.failures import exit_with_status as e; import tempfile; e(lambda argv: tempfile.gettempdir())"
    # tempfile leaves a file in each folder that it tries, the working one last.
    done = python("unlink=EBUSY", code, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stderr.count("\n")) == (73, 1), done.stderr
    assert "Set TMPDIR" in done.stderr


def test_a_file_that_is_in_use_stays_and_is_named(tmp_path):
    (tmp_path / "a").touch()
    done = python(
        "unlink=EBUSY",
        "import sys; from pathlib import Path; from pipeline.process.storage import remove_file; remove_file(Path(sys.argv[1]))",
        tmp_path / "a",
    )
    assert done.returncode == 0, done.stderr
    assert "a: is in use and could not be removed" in done.stderr


def test_a_damaged_checkpoint_is_moved_by_copy_where_it_cannot_be_renamed(tmp_path, monkeypatch):
    from pipeline.run_dir.checkpoints import quarantined

    (tmp_path / "checkpoints" / "checkpoint-5").mkdir(parents=True)
    (tmp_path / "checkpoints" / "checkpoint-5" / "a").write_text("a")
    rename = os.rename

    def across(source, target):
        if Path(source).parent != Path(target).parent:
            raise OSError(errno.EXDEV, "Invalid cross-device link", str(source))
        rename(source, target)

    monkeypatch.setattr(os, "rename", across)
    target = quarantined(tmp_path / "checkpoints" / "checkpoint-5", tmp_path / "quarantine")
    assert (target / "a").read_text() == "a"
    assert list((tmp_path / "checkpoints").iterdir()) == []
    assert [path.name for path in (tmp_path / "quarantine").iterdir()] == ["checkpoint-5"]


def test_a_run_without_fsync_and_with_files_in_memory_trains_the_same(runner):
    recipe = runner.recipe("plain", "gpt2", train={"max_steps": 6, "save_steps": 3})
    runner.train(recipe)
    done = refused(
        "fsync=EINVAL,memfd_create=EPERM",
        *runner.command(recipe, "run.name=lacking"),
        cwd=runner.folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2"},  # the threads of a warm run
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "refuses files in memory (memfd_create)" in done.stdout
    plain, lacking = (
        load_file(runner.folder / "runs" / name / "model" / "model.safetensors") for name in ("plain", "lacking")
    )
    assert all(plain[name].equal(lacking[name]) for name in plain)


def test_a_run_unable_to_rename_ends_before_step_1_with_status_73(runner):
    recipe = runner.recipe("across", "gpt2")
    done = refused("rename=EXDEV", *runner.command(recipe), cwd=runner.folder)
    assert done.returncode == 73, done.stderr[-2000:]
    assert "its file system cannot do what a whole file needs" in done.stderr
    assert "Traceback" not in done.stderr


MOVING = """
import glob, os, shutil, time
from transformers import TrainerCallback

class Moving(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 7:
            run = os.environ["MOVED"]
            while glob.glob(run + "/checkpoints/.tmp-*"):  # being written beside the training
                time.sleep(0.05)
            shutil.rmtree(run) if os.environ["HOW"] == "removed" else os.rename(run, run + "-renamed")
"""


@pytest.mark.parametrize("how", ["renamed", "removed"])
def test_a_run_whose_directory_is_moved_or_removed_ends_with_status_73(runner, how):
    (runner.folder / "moving.py").write_text(MOVING)
    recipe = runner.recipe(
        "moved", "gpt2", run={"callbacks": ["moving:Moving"]}, monitor={"trackers": ["tensorboard"]}
    )
    run = runner.folder / "runs" / "moved"
    done = runner.train(recipe, status=73, MOVED=str(run), HOW=how)
    assert "the run directory was renamed or removed while the run was training" in done.output
    assert "Traceback" not in done.output
    assert not run.exists()
    if how == "renamed":
        run.with_name("moved-renamed").rename(run)
        (runner.folder / "moving.py").write_text(MOVING.replace("== 7", "== -1"))
        assert "going on from checkpoint-5" in runner.train(recipe, MOVED="", HOW="").output


@pytest.mark.parametrize("meets_it", ["a thread", "a save"])
def test_removing_the_run_directory_is_named_though_its_manifest_goes_last(meets_it, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "_kept_in_place", {})
    run = RunDirectory(tmp_path / "run")
    run.update_manifest(name="run")
    storage.keep_in_place(run.path, mark=run.manifest)
    monkeypatch.setattr(failures, "_current_run", run)
    printed = []
    monkeypatch.setattr(threading, "__excepthook__", printed.append)
    gone = FileNotFoundError(errno.ENOENT, "No such file or directory", str(run.path / "tensorboard" / "events"))
    removal = threading.Timer(0.2, run.manifest.unlink)
    removal.start()
    if meets_it == "a thread":
        failures._thread_failed(threading.ExceptHookArgs((type(gone), gone, None, None)))
        assert not printed
    else:
        error = not_written(run.path / "checkpoints" / "checkpoint-5", gone)
        assert "the run directory was renamed or removed while the run was training" in str(error)
    removal.join()
