"""Ctrl-C and SIGTERM while a command is still being imported, and SIGTERM while one that is no training works."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT

WORKS = """
import time
from pipeline.run_dir.failures import exit_with_status


def main(argv):
    while True:
        try:
            print("ready", flush=True)
            time.sleep(60)
        except Exception as error:
            print(f"passed over {error}")


exit_with_status(main)
"""


def as_from_a_terminal() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def start(*command: str, **environment: str) -> subprocess.Popen:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "preexec_fn": as_from_a_terminal}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment, **pipes)


def command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has ended
        return []


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
@pytest.mark.parametrize(
    "command",
    [["pipeline/pretrain.py", "r.yaml"], ["-m", "pipeline.report", "r"], ["-m", "pipeline.data", "r.yaml"]],
    ids=["pretrain", "report", "data"],
)
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)], ids=["SIGINT", "SIGTERM"])
def test_a_signal_during_the_imports_ends_a_command_with_a_sentence(command, number, status):
    process = start(*command, PYTHONPROFILEIMPORTTIME="1")  # prints the name of each module that was imported
    for line in process.stdout:
        if line.split("|")[-1].strip() == "pipeline":
            break
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)

    assert process.returncode == status, output
    said = [line for line in output.splitlines() if not line.startswith("import time:")]
    assert said == [f"{signal.Signals(number).name} came before anything had begun; nothing is lost."]


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_ends_a_working_command_with_75_and_a_sentence(number, tmp_path: Path):
    (tmp_path / "works.py").write_text(WORKS)
    process = start(str(tmp_path / "works.py"))
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)

    name = signal.Signals(number).name
    assert (process.returncode, output) == (
        75,
        f"{name} ended it before it was done; what was written is whole. Run the same command again.\n",
    )


@pytest.mark.skipif(os.name == "nt", reason="a script of POSIX shells")
def test_ctrl_c_while_a_script_checks_its_environment_ends_with_a_sentence():
    script = subprocess.Popen(
        ["bash", "run_pretrain.sh", "r.yaml"],
        cwd=ROOT,
        env={**os.environ, "VIRTUAL_ENV": sys.prefix},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=as_from_a_terminal,
    )
    of_script, interpreter = psutil.Process(script.pid), f"{sys.prefix}/bin/python"
    while not any(interpreter in command_of(child) for child in of_script.children(recursive=True)):
        assert script.poll() is None
    os.killpg(script.pid, signal.SIGINT)

    assert script.communicate(timeout=60)[1] == "SIGINT came before anything had begun; nothing is lost.\n"
    assert script.returncode == 130
