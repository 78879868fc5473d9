"""The end of a process comes, with its status, whatever terminal and disk are like."""

import os
import resource
import subprocess
import sys

import pytest

from tests.conftest import ROOT

ENTRY = """
import sys, threading
from pipeline.process.errors import DataError
from pipeline.run_dir.failures import exit_with_status, leave, record_failures_in
from pipeline.run_dir.run_directory import RunDirectory


def main(argv):
    print("on its way", flush=True)
    record_failures_in(RunDirectory("/dev/null/no such folder"))
    error = DataError("rows.jsonl:3: it is no JSON.")
    if argv[0] == "thread":
        threading.Thread(target=leave, args=[error]).start()
        threading.Event().wait(60)
    raise error


exit_with_status(main)
"""


@pytest.mark.parametrize("thread", ["main", "thread"])
@pytest.mark.parametrize("nobody_reads", [False, True])
def test_a_process_keeps_its_exit_status_without_terminal_or_run_directory(tmp_path, thread, nobody_reads):
    reader, writer = os.pipe()
    command = [sys.executable, "-c", ENTRY, thread]
    environment = {**os.environ, "TANDEM_STATUS": str(tmp_path / "status"), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdout=writer, stderr=writer, env=environment, cwd=tmp_path)
    os.close(writer)
    if nobody_reads:
        os.close(reader)
    assert process.wait(60) == 65
    assert (tmp_path / "status").read_text() == "65\nrows.jsonl:3: it is no JSON.\n"
    if not nobody_reads:
        said = os.fdopen(reader).read()
        assert "on its way" in said
        assert "error: rows.jsonl:3: it is no JSON." in said


def test_a_file_this_user_may_not_read_has_its_own_status(tmp_path):
    program = ENTRY.replace(
        "raise error", 'raise PermissionError(13, "Permission denied", "runs/a/optimizer.safetensors")'
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, "main"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert ended.returncode == 73
    assert (
        "error: runs/a/optimizer.safetensors: this user may not read or write it (Permission denied)" in ended.stderr
    )
    assert "Traceback" not in ended.stderr


def test_a_file_over_its_size_limit_is_reported_by_name(tmp_path):
    program = ENTRY.replace("raise error", 'write_bytes("runs/a/samples.jsonl", b"0" * 5000)')
    program = "from pipeline.process.storage import write_bytes\n" + program
    limited = subprocess.run(
        [sys.executable, "-c", program, "main"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        cwd=tmp_path,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)),
    )
    assert limited.returncode == 73
    assert "error: runs/a/samples.jsonl: the file became larger than this process (ulimit -f)" in limited.stderr
    assert "Traceback" not in limited.stderr
