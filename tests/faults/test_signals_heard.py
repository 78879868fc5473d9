"""Signals in a process of its own: heard while the main thread sits in a long call, once, and only by whom they are for."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# hashlib releases the interpreter and returns to no bytecode for minutes, as a tokenizer's training does.
LONG_CALL = "import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)"
HEAD = """
import os, signal, sys, time
from pathlib import Path
from pipeline.run_dir import failures as module
from pipeline.run_dir.failures import Signals
signals = Signals()
def ready():
    Path(sys.argv[1], "ready").write_text(str(os.getpid()))
"""


def launched_environment(launched: bool) -> dict[str, str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "TORCHELASTIC_"))}
    return environ | {"PYTHONPATH": str(ROOT)} | ({"TORCHELASTIC_RUN_ID": "x"} if launched else {})


def start(folder: Path, body: str, *, launched: bool = False, prefix: tuple[str, ...] = ()) -> subprocess.Popen:
    (folder / "process.py").write_text(HEAD + body)
    command = [*prefix, sys.executable, str(folder / "process.py"), str(folder)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, env=launched_environment(launched), **pipes)
    wait_for(folder / "ready")
    return process


def wait_for(path: Path) -> str:
    ends = time.monotonic() + 60
    while not path.exists() or not path.read_text():
        assert time.monotonic() < ends, f"{path.name} did not appear"
        time.sleep(0.02)
    return path.read_text()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 75), (signal.SIGHUP, 75), (signal.SIGINT, 130)])
def test_a_signal_ends_a_long_call_before_the_first_step(tmp_path, number, status):
    process = start(tmp_path, f"ready()\n{LONG_CALL}\n")
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == status
    assert (
        output
        == f"{number.name} before the first step of this start; nothing is lost. Run the same command again to go on.\n"
    )


def test_in_training_the_first_signal_is_kept_and_the_second_leaves(tmp_path):
    body = f"signals.training = True\nready()\nwhile not signals.received: time.sleep(0.02)\nPath(sys.argv[1], 'kept').write_text(str(signals.received))\n{LONG_CALL}\n"
    process = start(tmp_path, body)
    process.terminate()
    assert wait_for(tmp_path / "kept") == str(int(signal.SIGTERM))
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM


def test_a_signal_ends_what_is_waited_for_after_a_stop(tmp_path):
    body = (
        f"def drain():\n    ready()\n    {LONG_CALL}\n"
        "signals.training = signals.stopping = True\nsignals.raise_if_stopped(step=5, first=drain)\n"
    )
    process = start(tmp_path, body)
    process.terminate()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75
    assert output == "SIGTERM at step 5; checkpoint-5 is whole. Run the same command again to go on.\n"


def test_what_a_launcher_hands_on_again_is_not_a_second_signal(tmp_path):
    body = "module.SAME_SIGNAL_S = 5.0\nsignals.training = True\nready()\nwhile not signals.received: time.sleep(0.02)\nPath(sys.argv[1], 'kept').write_text('x')\ntime.sleep(1)\nos._exit(9)\n"
    process = start(tmp_path, body, launched=True)
    process.terminate()
    wait_for(tmp_path / "kept")
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 9


def test_a_signal_for_a_forked_child_is_the_childs_alone(tmp_path):
    body = (
        "signals.training = True\nchild = os.fork()\nif child == 0:\n    time.sleep(60)\n    os._exit(1)\n"
        "os.kill(child, signal.SIGTERM)\n_, status = os.waitpid(child, 0)\ntime.sleep(0.5)\n"
        "print(os.WTERMSIG(status), signals.received)\nready()\n"
    )
    output, _ = start(tmp_path, body).communicate(timeout=60)
    assert output == f"{int(signal.SIGTERM)} 0\n"


def test_sighup_stays_ignored_under_nohup(tmp_path):
    process = start(tmp_path, "ready()\ntime.sleep(1)\nprint('went on', signals.received)\n", prefix=("nohup",))
    process.send_signal(signal.SIGHUP)
    output, _ = process.communicate(timeout=60)
    assert output.endswith("went on 0\n")


def test_the_death_of_the_launcher_ends_a_long_call(tmp_path):
    launcher = "import subprocess, sys, time; subprocess.Popen(sys.argv[1:]); time.sleep(600)"
    process = start(tmp_path, f"ready()\n{LONG_CALL}\n", launched=True, prefix=(sys.executable, "-c", launcher))
    process.kill()
    output, _ = process.communicate(timeout=60)  # the child holds the pipe until it ends
    assert output.startswith("the end of the launcher before the first step of this start")


def test_in_training_a_stop_leaves_at_once_only_while_compiling(tmp_path):
    body = """
import torch
from pipeline.callbacks.stop_signals import StopSignals
module.COMPILATION_S = 0.5
StopSignals(signals)
signals.training = True
torch.compile(torch.sin, backend="eager")(torch.ones(2))
ready()
while not signals.received: time.sleep(0.02)
time.sleep(1.5)
print("still here", flush=True)
torch.compile(torch.cos, backend=lambda graph, inputs: time.sleep(600))(torch.ones(2))
"""
    process = start(tmp_path, body)
    process.terminate()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75
    assert output.startswith("still here\nSIGTERM while a step was being compiled; it continues from the newest whole")
