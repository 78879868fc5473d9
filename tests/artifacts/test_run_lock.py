"""One process a run: a living owner keeps others out, a dead one does not, on this machine and on others."""

import json
import signal
import subprocess
import sys
import time

import pytest

from pipeline.process import storage
from pipeline.process.errors import CannotWriteError
from pipeline.process.storage import file_lock
from pipeline.run_dir.run_directory import RunDirectory

HOLD = "import sys; from pipeline.run_dir.run_directory import RunDirectory; RunDirectory(sys.argv[1]).hold(); print('held', flush=True); sys.stdin.read()"
# A machine of its own: no lock of another one is seen, or there are none on the shared disk.
ON_ANOTHER_MACHINE = """
import errno, fcntl, sys, tempfile, time
from pipeline.process import storage
from pipeline.run_dir.failures import exit_with_status
from pipeline.run_dir.run_directory import RunDirectory

_, folder, name, flock, hours = sys.argv
storage.HEARTBEAT_S, storage.LEASE_S, storage.LOOK_S = 0.2, 3.0, 0.1
here, now = storage.machine, time.time
storage.machine = lambda path: name + here(path)
time.time = lambda: now() + 3600 * float(hours)

def lacking(file, operation):
    if flock == "missing" and file.name.startswith(folder):
        raise OSError(errno.ENOSYS, "Function not implemented")

fcntl.flock = lacking

def main(argv):
    run = RunDirectory(folder)
    print("ready", flush=True)
    sys.stdin.readline()
    run.hold()
    print("held", flush=True)
    while line := sys.stdin.readline():
        storage.write_text(run.path / "a", line)
        print("wrote", flush=True)

exit_with_status(main)
"""


class Machine:
    """A process that holds a run as one on another machine would."""

    def __init__(self, run, name: str, *, flock: str = "local", hours: float = 0.0):
        command = [sys.executable, "-c", ON_ANOTHER_MACHINE, str(run), name, flock, str(hours)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout.readline() == "ready\n"

    def say(self, line: str = "") -> None:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        return self.process.stdout.readline().strip()

    def hold(self) -> str:
        self.say()
        return self.answer()

    def end(self) -> tuple[int, str]:
        """Its status and what it said on stderr."""
        _, said = self.process.communicate(timeout=60)
        return self.process.returncode, said


@pytest.fixture
def machine(tmp_path):
    machines = []

    def start(name: str, **how) -> Machine:
        machines.append(Machine(tmp_path / "run", name, **how))
        return machines[-1]

    yield start
    for one in machines:
        one.process.kill()
        one.process.communicate()


def test_a_run_in_use_is_refused_by_name_and_free_again_when_its_owner_dies(tmp_path):
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert owner.stdout.readline() == b"held\n"
    with pytest.raises(CannotWriteError, match=f"process {owner.pid}"):
        RunDirectory(tmp_path / "run").hold()
    owner.kill()
    owner.wait()
    assert (tmp_path / "run" / ".lock.owner").exists()
    begun = time.monotonic()
    RunDirectory(tmp_path / "run").hold()
    assert time.monotonic() - begun < storage.LOOK_S


@pytest.mark.parametrize("flock", ["local", "missing"])
@pytest.mark.parametrize("hours", [-30, 30])
def test_a_run_on_another_machine_is_refused_by_name_whatever_its_clock_and_flock_say(machine, flock, hours):
    owner, second = machine("a", flock=flock, hours=hours), machine("b", flock=flock)
    assert owner.hold() == "held"
    assert second.hold() == ""
    status, said = second.end()
    assert status == 73
    assert f"the run is in use by process {owner.process.pid} on " in said
    owner.say("still its own")
    assert owner.answer() == "wrote"


def test_a_run_whose_owner_on_another_machine_was_killed_is_free_after_a_while_without_a_heartbeat(machine):
    owner, second = machine("a", hours=30), machine("b")
    assert owner.hold() == "held"
    owner.process.kill()
    begun = time.monotonic()
    assert second.hold() == "held"
    assert 3 < time.monotonic() - begun < 8
    status, said = second.end()
    assert status == 0
    assert f"process {owner.process.pid} on " in said
    assert "then it is free after 3 s without a heartbeat" in said


def test_of_machines_that_start_a_run_in_the_same_moment_one_has_it(machine, tmp_path):
    for _ in range(3):
        machines = [machine(name) for name in "abc"]
        for one in machines:
            one.say()
        assert sorted(one.answer() for one in machines) == ["", "", "held"]
        for one in machines:
            assert one.end()[0] in (0, 73)


def test_a_machine_that_takes_over_in_the_same_moment_as_another_leaves_the_run_to_the_later_one(tmp_path, monkeypatch):
    owner, heartbeats, sleep = tmp_path / ".lock.owner", [], time.sleep

    def while_another_takes_over(seconds: float) -> None:
        if heartbeats or "gone" not in owner.read_text():
            heartbeats.append(seconds)
            owner.write_text(json.dumps({"process": "later", "heartbeat": len(heartbeats)}))
        sleep(seconds)

    owner.write_text('{"process": "gone"}')
    monkeypatch.setattr(storage, "LEASE_S", 0.1)
    monkeypatch.setattr(storage, "LOOK_S", 0.01)
    monkeypatch.setattr(storage.time, "sleep", while_another_takes_over)
    with file_lock(tmp_path / ".lock", wait_s=0.0, lease=True) as held:
        assert not held
    assert "later" in owner.read_text()


def test_an_owner_that_stood_still_while_another_machine_took_over_writes_nothing_more(machine, tmp_path):
    owner, second = machine("a"), machine("b")
    owner.hold()
    owner.process.send_signal(signal.SIGSTOP)
    assert second.hold() == "held"
    owner.process.send_signal(signal.SIGCONT)
    time.sleep(1)
    owner.say("no longer its own")
    status, said = owner.end()
    assert status == 73
    assert f"process {second.process.pid} on " in said
    assert "has taken it over" in said
    assert not (tmp_path / "run" / "a").exists()
    second.say("its own now")
    assert second.answer() == "wrote"


def test_an_owner_that_ends_leaves_a_run_that_another_machine_can_take_at_once(machine, tmp_path):
    owner, second = machine("a"), machine("b")
    owner.hold()
    assert owner.end()[0] == 0
    assert not (tmp_path / "run" / ".lock.owner").exists()
    begun = time.monotonic()
    assert second.hold() == "held"
    assert time.monotonic() - begun < 1


def test_what_waits_for_a_lease_has_it_when_the_other_machine_gives_it_back(machine, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "LOOK_S", 0.1)
    owner = machine("a")
    owner.hold()
    with file_lock(tmp_path / "run" / ".lock", wait_s=0.0, lease=True) as held:
        assert not held
    owner.process.stdin.close()
    owner.process.stdin = None
    with file_lock(tmp_path / "run" / ".lock", lease=True):
        assert owner.process.wait(timeout=30) == 0
    assert not (tmp_path / "run" / ".lock.owner").exists()
