"""One process a run: a living owner keeps others out, a dead one does not."""

import subprocess
import sys

import pytest

from pipeline.process.errors import CannotWriteError
from pipeline.process.storage import is_locked, lock
from pipeline.run_dir.run_directory import RunDirectory

HOLD = "import sys; from pipeline.run_dir.run_directory import RunDirectory; RunDirectory(sys.argv[1]).hold(); print('held', flush=True); sys.stdin.read()"


def test_a_run_in_use_is_refused_by_name_until_its_owner_dies(tmp_path):
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert owner.stdout.readline() == b"held\n"
    with pytest.raises(CannotWriteError, match=f"process {owner.pid}"):
        RunDirectory(tmp_path / "run").hold()
    owner.kill()
    owner.wait()
    RunDirectory(tmp_path / "run").hold()


def test_a_read_only_run_is_known_to_be_in_use(tmp_path):
    path = tmp_path / "lock"
    path.touch()
    assert not is_locked(path)
    held = lock(path)
    assert held is not None
    assert is_locked(path)
    held.release()
    assert not is_locked(path)
