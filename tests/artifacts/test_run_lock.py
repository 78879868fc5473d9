"""One process a run: a living owner keeps others out, a dead one does not."""

import subprocess
import sys

import pytest

from pipeline.process.errors import CannotWriteError
from pipeline.run_dir.run_directory import RunDirectory

HOLD = "import sys; from pipeline.run_dir.run_directory import RunDirectory; RunDirectory(sys.argv[1]).hold(); print('held', flush=True); sys.stdin.read()"


def test_a_run_in_use_is_refused_by_name_and_free_again_when_its_owner_dies(tmp_path):
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert owner.stdout.readline() == b"held\n"
    with pytest.raises(CannotWriteError, match=f"process {owner.pid}"):
        RunDirectory(tmp_path / "run").hold()
    owner.kill()
    owner.wait()
    RunDirectory(tmp_path / "run").hold()


def test_where_a_disk_has_no_locks_those_of_this_machine_keep_a_second_start_out(tmp_path):
    lacking = """
import errno, fcntl, sys
from pipeline.run_dir.run_directory import RunDirectory
flock = fcntl.flock
def without(file, operation):
    if file.name.startswith(sys.argv[1]):
        raise OSError(errno.ENOSYS, "Function not implemented")
    flock(file, operation)
fcntl.flock = without
RunDirectory(sys.argv[1]).hold()
print("held", flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", lacking, str(tmp_path / "run")]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert owner.stdout.readline() == b"held\n"
    second = subprocess.run(command, input=b"", capture_output=True, timeout=60)
    assert b"CannotWriteError" in second.stderr
    assert f"the run is in use by process {owner.pid}".encode() in second.stderr
    owner.kill()
    _, noted = owner.communicate()
    assert b"has no locks" in noted
    assert b"start no second job of a run on another one" in noted
