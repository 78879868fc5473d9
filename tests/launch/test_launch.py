"""launch.py: the config for a machine, and signals and statuses through a real `accelerate launch`."""

import fcntl
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import psutil
import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_simple_launcher_cmd_env

from pipeline.process.errors import RecipeError

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "pipeline" / "launch" / "launch.py"


def loaded(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


launch, launcher = loaded(LAUNCH), loaded(LAUNCH.with_name("launcher.py"))

# A rank that waits for a signal, or for its launcher's death, then saves for a while.
RANK = """
import os, signal, sys, time
from pathlib import Path

got = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, lambda number, frame: got.append(signal.Signals(number).name))
rank, folder, launcher = os.environ.get("RANK", "0"), Path(sys.argv[1]), os.getppid()
(folder / f"started-{rank}").write_text(str(os.getpid()))
while not got:
    time.sleep(0.02)
    if os.getppid() != launcher:
        got.append("orphaned")
time.sleep(0.5)
(folder / f"saved-{rank}").write_text(got[0])
if rank == "0":
    Path(os.environ["TANDEM_STATUS"]).write_text("75\\nstopped after a whole checkpoint\\n")
os._exit(75)
"""


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


def launched(tmp_path, rank, processes=1, *arguments, **popen):
    (tmp_path / "rank.py").write_text(rank)
    command = [sys.executable, LAUNCH, tmp_path / "rank.py", "default.yaml", *arguments]
    environ = {**os.environ, "NPROC": str(processes), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **popen)


def start(tmp_path, processes, **popen):
    process = launched(tmp_path, RANK, processes, tmp_path, **popen)
    wait_for(
        lambda: (
            len(list(tmp_path.glob("started-*"))) == processes
            and all(p.read_text() for p in tmp_path.glob("started-*"))
        )
    )
    return process


@pytest.mark.full
@pytest.mark.parametrize(("processes", "number"), [(1, signal.SIGTERM), (1, signal.SIGINT), (2, signal.SIGHUP)])
def test_a_signal_reaches_every_rank_and_their_status_comes_back(tmp_path, processes, number):
    process = start(tmp_path, processes)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in range(processes)] == [number.name] * processes
    # One rank prints its message itself; after several it is said once more, below the launcher's own report.
    assert errors.count("stopped after a whole checkpoint") == (processes > 1)
    if processes == 1:
        assert "Traceback" not in errors


@pytest.mark.full
def test_ctrl_c_in_a_terminal_reaches_ranks_once_and_spares_the_launcher(tmp_path):
    process = start(tmp_path, 1, start_new_session=True)
    os.killpg(process.pid, signal.SIGINT)  # a terminal signals its whole foreground group
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75
    assert (tmp_path / "saved-0").read_text() == "SIGINT"
    assert "KeyboardInterrupt" not in errors


@pytest.mark.full
def test_closing_the_terminal_under_two_ranks_leaves_the_runs_own_status(tmp_path):
    import pty

    ours, theirs = pty.openpty()
    (tmp_path / "rank.py").write_text(RANK)
    process = subprocess.Popen(
        [sys.executable, LAUNCH, tmp_path / "rank.py", "default.yaml", tmp_path],
        env={**os.environ, "NPROC": "2", "CUDA_VISIBLE_DEVICES": ""},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        preexec_fn=lambda: (os.setsid(), fcntl.ioctl(0, termios.TIOCSCTTY, 0)),
    )
    os.close(theirs)
    wait_for(lambda: len([p for p in tmp_path.glob("started-*") if p.read_text()]) == 2)
    os.close(ours)  # the kernel sends SIGHUP, and every further word to the terminal is an error
    assert process.wait(timeout=60) == 75
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in range(2)] == ["SIGHUP"] * 2


@pytest.mark.full
def test_sighup_stays_ignored_under_nohup(tmp_path):
    process = start(tmp_path, 1, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert (tmp_path / "saved-0").read_text() == "SIGTERM"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
def test_ranks_save_and_end_when_the_script_itself_is_killed(tmp_path):
    process = start(tmp_path, 1)
    process.kill()
    process.wait(timeout=60)
    wait_for((tmp_path / "saved-0").exists)
    assert (tmp_path / "saved-0").read_text() == "orphaned"


@pytest.mark.full
def test_the_ranks_are_waited_for_when_the_launcher_alone_is_killed(tmp_path):
    process = start(tmp_path, 1)
    time.sleep(1)  # the script looks for ranks ten times a second
    psutil.Process(int((tmp_path / "started-0").read_text())).parent().kill()
    _, errors = process.communicate(timeout=60)
    assert (tmp_path / "saved-0").read_text() == "orphaned"
    assert process.returncode == 75, errors


@pytest.mark.full
@pytest.mark.parametrize("processes", ["1", "2"])  # one rank does not listen yet; of two none exists
def test_a_signal_before_any_rank_listens_ends_the_start(tmp_path, processes):
    with launched(tmp_path, "import time\ntime.sleep(60)\n", processes) as process:
        assert "(accelerate_configs/cpu" in process.stdout.readline()
        time.sleep(0.3)  # that of two is importing torch
        process.terminate()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "SIGTERM came before training could answer it; nothing is lost." in errors


@pytest.mark.full
def test_a_process_that_was_killed_is_reported_as_lost(tmp_path):
    process = launched(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 70
    assert "rank 0 was lost: killed by SIGKILL" in errors


@pytest.mark.full
def test_one_process_is_started_without_importing_torch_first(tmp_path):
    process = launched(tmp_path, "import os, psutil\nprint(psutil.Process(os.getppid()).memory_maps())\n")
    maps, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "python" in maps
    assert "libtorch" not in maps


@pytest.mark.full
@pytest.mark.parametrize("name", ["cpu", "single_gpu"])
def test_one_process_gets_the_variables_that_accelerate_would_give_it(name, monkeypatch):
    for variable in [name for name in os.environ if name.startswith(("ACCELERATE_", "OMP_", "KMP_"))]:
        monkeypatch.delenv(variable)
    command = launch.launch_command(name, 1, "pipeline/pretrain.py", ["RECIPE"], meeting=None)[2:]
    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(command))
    program, environ = prepare_simple_launcher_cmd_env(arguments)
    assert program == [sys.executable, "pipeline/pretrain.py", "RECIPE"]
    variables = launcher.alone(yaml.safe_load((ROOT / "accelerate_configs" / f"{name}.yaml").read_text()), "1")
    assert variables == {name: value for name, value in environ.items() if os.environ.get(name) != value}


@pytest.mark.full
def test_a_config_with_a_line_of_its_own_is_left_to_accelerate():
    config = yaml.safe_load((ROOT / "accelerate_configs" / "single_gpu.yaml").read_text())
    assert launcher.alone(config, "1")["ACCELERATE_USE_CPU"] == "False"
    assert launcher.alone({**config, "gpu_ids": "1"}, "1") is None
    assert launcher.alone({**config, "mixed_precision": "bf16"}, "1") is None


@pytest.mark.full
def test_an_entry_that_fails_without_a_word_fails_the_script(tmp_path):
    process = launched(tmp_path, "raise ValueError('our bug')\n")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "ValueError: our bug" in errors


@pytest.mark.full
@pytest.mark.parametrize(
    ("nproc", "gpus", "chosen"),
    [
        (None, 0, ("cpu", 1)),
        ("2", 0, ("cpu_2", 2)),
        ("3", 0, ("cpu_2", 3)),
        (None, 1, ("single_gpu", 1)),
        (None, 8, ("ddp", 8)),
        ("4", 8, ("ddp", 4)),
        ("1", 8, ("single_gpu", 1)),
    ],
)
def test_the_config_follows_the_hardware_and_nproc(nproc, gpus, chosen):
    assert launch.choose({"NPROC": nproc} if nproc else {}, gpus) == chosen


@pytest.mark.full
@pytest.mark.parametrize(("nproc", "gpus"), [("two", 0), ("0", 0), ("-1", 8), ("1.5", 8), ("", 1), ("9", 8)])
def test_an_impossible_nproc_is_refused_in_a_sentence(nproc, gpus):
    with pytest.raises(RecipeError, match="NPROC is"):
        launch.choose({"NPROC": nproc}, gpus)


@pytest.mark.full
def test_a_clone_starts_its_own_modules_and_not_those_that_are_installed(tmp_path):
    for folder in ("pipeline", "accelerate_configs"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    errors = tmp_path / "pipeline" / "process" / "errors.py"
    errors.write_text(f'{errors.read_text()}\nprint("of the clone")\n')
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"NPROC": "none"}
    script = tmp_path / "pipeline" / "launch" / "launch.py"
    done = subprocess.run([sys.executable, script, "entry.py", "recipe"], env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (64, "of the clone\n")


@pytest.mark.full
def test_the_default_recipe_is_used_when_only_overrides_are_given():
    assert launch.with_recipe([], "d.yaml") == ["d.yaml"]
    assert launch.with_recipe(["train.max_steps=3"], "d.yaml") == ["d.yaml", "train.max_steps=3"]
    assert launch.with_recipe(["my.yaml", "run.name=x"], "d.yaml") == ["my.yaml", "run.name=x"]


@pytest.mark.full
def test_a_status_file_left_empty_by_a_full_disk_is_ignored(tmp_path, monkeypatch):
    status_file = tmp_path / "status"
    status_file.write_text("")
    assert launch.final_status(status_file, 74, []) == (74, "")
    monkeypatch.setenv("TANDEM_STATUS", str(status_file))
    launcher.report(1, signal.SIGKILL)
    assert launch.final_status(status_file, 1, [])[0] == 70
