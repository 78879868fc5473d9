"""The instruments of the fault campaign themselves: the injector of file faults, the evidence, the page."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from faults import evidence, injector, results

pytestmark = pytest.mark.skipif(injector.compiler() is None, reason="no C compiler: file faults cannot be injected")

# Eight calls below the folder: mkdir, then in a child open, write, fsync, rename; then open, write, unlink.
WRITER = """
import os, subprocess, sys
folder = sys.argv[1]
os.mkdir(folder + "/new")
child = "import os,sys; f=open(sys.argv[1]+'/a','wb',0); f.write(b'x'); os.fsync(f.fileno()); os.rename(sys.argv[1]+'/a', sys.argv[1]+'/b')"
status = subprocess.run([sys.executable, "-c", child, folder], capture_output=True).returncode
with open(folder + "/c", "wb", 0) as file:
    file.write(b"y")
os.unlink(folder + "/c")
open(folder + "/../outside", "w").close()
sys.exit(status)
"""
KINDS = ["mkdir", "open", "write", "fsync", "rename", "open", "write", "unlink"]


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    return injector.build(tmp_path_factory.mktemp("library"))


@pytest.fixture
def write(library, tmp_path):
    """Runs the eight calls with rules; gives status, stderr and the calls that were logged."""
    folder = tmp_path / "under"
    folder.mkdir()

    def run(rules: str = ""):
        asked = injector.faults(folder, rules=rules, counter=tmp_path / "counter", log=tmp_path / "log")
        environment = {**os.environ, **asked, "LD_PRELOAD": str(library), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-c", WRITER, str(folder)]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, start_new_session=True)
        return ended.returncode, ended.stderr, injector.logged_calls(tmp_path / "log")

    run.folder = folder  # type: ignore[attr-defined]
    return run


def test_calls_are_counted_over_both_processes_and_only_below_the_folder(write):
    status, _, calls = write()
    assert status == 0
    assert [kind for _, kind, _ in calls] == KINDS
    assert [number for number, _, _ in calls] == list(range(1, 9))


@pytest.mark.parametrize(("rules", "said"), [("at=6:ENOSPC", "No space left"), ("match=unlink:EIO", "Input/output")])
def test_a_call_fails_as_asked(write, rules, said):
    status, output, calls = write(rules)
    assert status == 1
    assert said in output
    assert len(calls) == (6 if "6" in rules else 8)


def test_a_full_disk_still_lets_files_be_removed(write):
    status, _, calls = write("from=8:ENOSPC")
    assert (status, len(calls)) == (0, 8)


def test_a_kill_hits_the_calling_process_and_kill_all_its_parents_too(write):
    status, _, calls = write("at=4:kill")
    assert status != 0
    assert (write.folder / "a").exists()
    assert not (write.folder / "b").exists()
    assert len(calls) == 7  # the parent went on, and its three calls were counted
    (write.folder / "new").rmdir()
    Path(write.folder.parent / "log").unlink()
    status, _, calls = write("at=4:kill-all")
    assert (status, len(calls)) == (-9, 4)


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    folder = tmp_path / "checkpoints" / "checkpoint-4"
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"abc")
    listed = {"weights": {"bytes": 3, "sha256": evidence.sha256(folder / "weights")}}
    (folder / "MANIFEST.json").write_text(json.dumps({"files": listed}))
    return folder


def test_a_checkpoint_is_whole_only_with_every_hash_and_no_extra_file(checkpoint):
    run = checkpoint.parents[1]
    assert evidence.whole_steps(run) == [4]
    (checkpoint / "more").touch()
    assert evidence.whole_steps(run) == []
    (checkpoint / "more").unlink()
    (checkpoint / "weights").write_bytes(b"abd")
    assert evidence.whole_steps(run) == []


def test_lost_steps_are_those_the_earlier_attempt_made_beyond_the_checkpoint(tmp_path):
    attempt = [{"event": "attempt", "step": 0}, {"step": 6, "train/loss": 1.0}]
    again = [{"event": "attempt", "step": 4}, {"step": 5, "train/loss": 1.0}, {"event": "attempt", "step": 4}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, attempt + again)) + '\n{"torn')
    assert evidence.attempts(tmp_path) == [(0, 0), (4, 2), (4, 1)]
    assert evidence.has_trained(tmp_path, 0, 6)
    assert evidence.has_trained(tmp_path, 1, 5)
    assert not evidence.has_trained(tmp_path, 1, 6)
    assert not evidence.has_trained(tmp_path, 2, 0)


def test_a_repeated_trial_replaces_its_result_and_failures_are_named(tmp_path):
    kept = results.Results(tmp_path / "kill.jsonl")
    kept.add({"trial": "0", "ok": True, "date": "2026-01-01"})
    kept.add({"trial": "1", "ok": True, "date": "2026-01-01"})
    kept.add({"trial": "1", "ok": False, "date": "2026-01-02"})
    kept.add({"trial": "2", "ok": False, "date": "2026-01-02"})
    kept.add({"trial": "2", "ok": True, "date": "2026-01-02"})
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- kill: begin -->\nold\n<!-- kill: end -->\nafter\n")
    results.write_to_page("kill", results.summary("Kills", "1 of 2", kept.rows(), "command", kept.made_again()), page)
    text = page.read_text()
    assert "old" not in text
    assert "trials 0..2; 2026-01-01 to 2026-01-02" in text
    assert "Failed: 1." in text
    assert "made again after a change that log.md tells: 2." in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    with pytest.raises(SystemExit, match="markers of disk are missing"):
        results.write_to_page("disk", "", page)
