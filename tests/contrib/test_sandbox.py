"""Programs of a model: hostile ones do no harm, seen from outside; good ones pass, wrong ones fail; refused where walls are missing."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from pipeline.contrib import sandbox
from pipeline.contrib.sandbox import Isolation, available_isolation, choose_isolation, run_program
from tests.contrib.hostile_programs import QUICK, SLOW

ROOT = Path(__file__).parents[2]
SECRET = "s3cr3t-of-the-user"
MEMORY_BYTES = 256 << 20
TIMEOUT_S = 1.0
UNSAFE = Isolation(False)

HERE = available_isolation()
needs_walls = pytest.mark.skipif(not HERE.safe, reason=f"not granted here: {HERE.missing}")


class World:
    """What hostile programs are after: a folder, a secret, listening sockets, a process, disk, memory. `harm` looks what they got."""

    def __init__(self, folder: Path, mark: str):
        self.mark = mark  # stands in the command line of every process of the sandbox
        self.folder = folder / "folder"
        self.folder.mkdir()
        self.sentinel = self.folder / "sentinel"
        self.sentinel.write_text("still here")
        self.secret = folder / "secret"
        self.secret.write_text(SECRET)
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.abstract_name = f"tandem-{uuid.uuid4().hex}"
        self.abstract = socket.socket(socket.AF_UNIX)
        if sys.platform == "linux":
            self.abstract.bind(f"\0{self.abstract_name}")
            self.abstract.listen()
        self.victim = subprocess.Popen(["sleep", "1000"])
        self.library = Path(os.__file__).stat()
        self.before = self.traces()

    def program(self, source: str) -> str:
        places = {
            "SECRET_FILE": self.secret,
            "SENTINEL": self.sentinel,
            "FOLDER": self.folder,
            "PORT": self.tcp.getsockname()[1],
            "ABSTRACT": self.abstract_name,
            "PARENT": os.getpid(),
            "VICTIM": self.victim.pid,
        }
        for name, value in places.items():
            source = source.replace(name, str(value))
        return source

    def traces(self) -> set[str]:
        """Files in the folders that a program could fill, and what is in the watched one."""
        shared = [folder for folder in ("/tmp", "/var/tmp", "/dev/shm", "/") if os.path.isdir(folder)]
        fillers = {os.path.join(folder, "hostile-filler") for folder in shared}
        return {name for name in fillers if os.path.exists(name)} | set(os.listdir(self.folder))

    def survivors(self) -> list[psutil.Process]:
        """Processes of the sandbox that still live, after a moment in which the kernel may end killed ones."""
        for _ in range(100):
            found = [
                one
                for one in psutil.process_iter(["cmdline", "status"])
                if any(self.mark in word for word in one.info["cmdline"] or [])
            ]
            if not found:
                break
            time.sleep(0.05)
        return found

    def harm(self) -> list[str]:
        """Everything that is no longer as it was."""
        found = []
        if self.survivors():
            found.append(f"survivors: {self.survivors()}")
        if not self.sentinel.exists() or self.sentinel.read_text() != "still here":
            found.append("the sentinel was changed")
        elif self.sentinel.stat().st_nlink != 1 or self.sentinel.stat().st_mode & 0o777 == 0:
            found.append("the sentinel was linked or locked")
        if self.traces() != self.before:
            found.append(f"files appeared: {self.traces() ^ self.before}")
        if (
            after := Path(os.__file__).stat()
        ).st_mtime_ns != self.library.st_mtime_ns or after.st_size != self.library.st_size:
            found.append("Python's library was changed")
        for listener in (self.tcp, self.abstract):
            listener.setblocking(False)
            try:
                listener.accept()[0].close()
                found.append("a connection came")
            except OSError:
                pass
        if self.victim.poll() is not None:
            found.append("the victim died")
        return found

    def close(self) -> None:
        self.victim.kill()
        self.victim.wait()
        self.tcp.close()
        self.abstract.close()


@pytest.fixture
def world(tmp_path, monkeypatch):
    mark = f"sandbox-of-{uuid.uuid4().hex}"
    monkeypatch.setattr(sandbox, "START", f"{sandbox.START}  # {mark}")
    monkeypatch.setenv("HOSTILE_SECRET", SECRET)
    world = World(tmp_path, mark)
    yield world
    world.close()


def contained(world: World, source: str, isolation: Isolation, *, timeout_s: float) -> sandbox.Execution:
    execution = run_program(world.program(source), timeout_s=timeout_s, memory_bytes=MEMORY_BYTES, isolation=isolation)
    assert world.harm() == []
    assert not execution.passed
    assert execution.reason.isprintable()
    assert len(execution.reason) <= 300
    assert SECRET not in execution.reason
    return execution


@pytest.mark.full
@needs_walls
@pytest.mark.parametrize("name", QUICK)
def test_a_hostile_program_is_contained(world, name):
    source, pattern = QUICK[name]
    execution = contained(world, source, HERE, timeout_s=20.0)
    assert re.match(pattern, execution.reason), execution


@pytest.mark.full
@needs_walls
@pytest.mark.parametrize("name", SLOW)
def test_a_program_without_end_is_ended(world, name):
    began = time.monotonic()
    execution = contained(world, SLOW[name], HERE, timeout_s=TIMEOUT_S)
    assert execution.reason == "time: more than 1 s"
    assert TIMEOUT_S <= execution.seconds < TIMEOUT_S + 2
    assert time.monotonic() - began < 15  # with the start of the child on a busy machine


@pytest.mark.full
@needs_walls
def test_what_this_machine_grants_holds():
    assert choose_isolation(False, where="evals") == HERE


@pytest.mark.full
@needs_walls
def test_hostile_programs_take_no_more_memory_than_their_limit(world):
    # In a process of its own: the largest size of all children is what the kernel remembers.
    script = f"""
import resource, sys
from pipeline.contrib.sandbox import available_isolation
from pipeline.contrib.sandbox import run_program
from tests.contrib.hostile_programs import QUICK, SLOW
hogs = [QUICK[n][0] for n in ("memory_hog", "memory_hog_to_the_last_byte", "shared_memory_of_mmap", "message_of_a_hundred_megabytes")]
hogs += [SLOW[n] for n in ("memory_hog_that_swallows_its_errors", "print_gigabytes")]
for hog in hogs:
    assert not run_program(hog, timeout_s=1.0, memory_bytes={MEMORY_BYTES}, isolation=available_isolation()).passed
# Not ru_maxrss, which a process inherits from the one that started it.
own = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10, own)
"""
    output = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    children, own = map(int, output.split())
    assert MEMORY_BYTES / 2 < children <= MEMORY_BYTES
    assert own < 100 << 20


@pytest.mark.full
def test_the_traps_catch_programs_that_are_not_locked_in(world):
    """The programs above do harm where nothing stops them, and this file's checks see it."""
    harmful = {
        "delete_files": "the sentinel was changed",
        "connect": "a connection came",
        "shell": "files appeared",
        "abstract_socket": "a connection came",
    }
    if sys.platform != "linux":
        del harmful["abstract_socket"]
    for name, harm in harmful.items():
        run_program(world.program(QUICK[name][0]), timeout_s=20.0, isolation=UNSAFE)
        assert harm in " ".join(world.harm()), name
        world.sentinel.write_text("still here")
        shutil.rmtree(world.folder / "shell", ignore_errors=True)
        world.before = world.traces()
    for name in ("read_a_secret_file", "list_a_folder"):
        outcome = run_program(world.program(QUICK[name][0]), timeout_s=20.0, isolation=UNSAFE).reason
        assert SECRET in outcome or "sentinel" in outcome


@pytest.mark.full
def test_without_walls_the_environment_is_scrubbed_and_the_process_group_ends(world):
    for name in ("read_the_environment", "read_its_first_environment"):
        assert SECRET not in run_program(QUICK[name][0], timeout_s=20.0, isolation=UNSAFE).reason
    tree = """
import os, time
os.setpriority(os.PRIO_PROCESS, 0, 5)
for _ in range(3):
    try:
        if os.fork() == 0:
            if os.fork() == 0:
                time.sleep(1000)
            os._exit(0)
    except OSError:
        pass
while True: pass
"""
    assert run_program(tree, timeout_s=TIMEOUT_S, isolation=UNSAFE).reason == "time: more than 1 s"
    assert world.survivors() == []


@pytest.mark.full
def test_files_written_without_walls_go_to_a_scratch_folder_that_is_removed(world):
    written = run_program("import os\nopen('a', 'w').write('b')\nraise KeyError(os.getcwd())", isolation=UNSAFE)
    folder = re.fullmatch("wrong: KeyError: '(.*)'", written.reason).group(1)
    assert "tandem-program-" in folder
    assert not os.path.exists(folder)


GOOD = {
    "library": """
import bisect, collections, copy, dataclasses, datetime, decimal, enum, fractions, functools, hashlib, heapq, itertools
import json, math, operator, random, re, statistics, string, sys, typing, unicodedata
assert hashlib.md5(b'Hello world').hexdigest() == '3e25960a79dbc69b674cd4ec67a72c62'
assert hashlib.sha256(b'').hexdigest()[:4] == 'e3b0' and math.isclose(math.sqrt(2) ** 2, 2)
assert 0 <= random.random() < 1 and re.sub('a+', 'b', 'caat') == 'cbt'
""",
    "main_module": """
import dataclasses, pickle, sys, typing
@dataclasses.dataclass
class Point:
    x: 'int' = 1
assert __name__ == '__main__' and sys.modules['__main__'].Point is Point
assert typing.get_type_hints(Point) == {'x': int} and pickle.loads(pickle.dumps(Point(2))) == Point(2)
""",
    "human_eval": """
from typing import List


def has_close_elements(numbers: List[float], threshold: float) -> bool:
    return any(abs(a - b) < threshold for i, a in enumerate(numbers) for b in numbers[i + 1:])


METADATA = {'author': 'jt'}

def check(candidate):
    assert candidate([1.0, 2.0, 3.9, 4.0, 5.0, 2.2], 0.3) == True
    assert candidate([1.0, 2.0, 3.9, 4.0, 5.0, 2.2], 0.05) == False

check(has_close_elements)
""",
    "prints_and_its_own_errors": """
import sys
print('caf\u00e9 \u2603' * 1000, file=sys.stderr)
try:
    open('/etc/passwd-that-is-not-there')
except OSError:
    print('no')
""",
    "deep_but_finite": "def depth(n): return n and 1 + depth(n - 1)\nassert depth(900) == 900",
    "nothing": "",
}


@pytest.mark.full
@pytest.mark.parametrize("isolation", [HERE, UNSAFE], ids=lambda isolation: isolation.name)
def test_good_programs_pass(isolation):
    results = [run_program(program, timeout_s=20.0, isolation=isolation) for program in GOOD.values()]
    assert [result.reason for result in results] == ["passed"] * len(GOOD)


@pytest.mark.full
@needs_walls
def test_wrong_programs_fail_with_the_last_line_of_their_traceback():
    programs = {
        "assert 1 == 2, 'one is not two'": "wrong: AssertionError: one is not two",
        "def f(x) return x": "wrong: SyntaxError: expected ':' (<program>, line 1)",
        "import numpy": "wrong: ModuleNotFoundError: No module named 'numpy'",
        "import pipeline": "wrong: ModuleNotFoundError: No module named 'pipeline'",
        "def f(): return f()\nf()": "wrong: RecursionError: maximum recursion depth exceeded",
        "while True: pass": "time: more than 1 s",
        "x = 1": "passed",
        "undefined": "wrong: NameError: name 'undefined' is not defined",
    }
    results = [run_program(program, timeout_s=1.0, isolation=HERE) for program in programs]
    assert [result.reason for result in results] == list(programs.values())
    assert [result.passed for result in results] == [reason == "passed" for reason in programs.values()]


@pytest.mark.full
@needs_walls
def test_a_program_that_passes_does_so_every_time_whatever_its_hashes():
    order = "assert ''.join({'a', 'b', 'c', 'd', 'e', 'f'}) == ORDER"
    outcome = run_program("raise KeyError(''.join({'a', 'b', 'c', 'd', 'e', 'f'}))", isolation=HERE)
    again = order.replace("ORDER", outcome.reason.removeprefix("wrong: KeyError: "))
    assert run_program(again, isolation=HERE).passed


@pytest.mark.full
@needs_walls
def test_of_the_environment_only_what_python_needs_is_handed_on(monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/nowhere")
    monkeypatch.setenv("HOSTILE_SECRET", SECRET)
    outcome = run_program("import os\nraise KeyError(sorted(os.environ))", isolation=HERE).reason
    names = set(eval(outcome.removeprefix("wrong: KeyError: "))) - {"LC_CTYPE"}
    assert names == {"LD_LIBRARY_PATH", "PYTHONHASHSEED", "PYTHONUTF8", "TZ"}


@needs_walls
def test_nothing_survives_when_the_evaluation_is_killed(world):
    script = (
        "import sys; from pipeline.contrib import sandbox as run\n"
        f"isolation = run.available_isolation(); run.START += '  # {world.mark}'; print('ready', flush=True)\n"
        "run.run_program('while True: pass', timeout_s=100, isolation=isolation)"
    )
    evaluation = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE)
    assert evaluation.stdout.readline() == b"ready\n"
    ends = time.monotonic() + 60
    while time.monotonic() < ends:  # this one and its program
        marked = [one for one in psutil.process_iter(["cmdline"]) if world.mark in " ".join(one.info["cmdline"] or [])]
        if len(marked) == 2:
            break
        time.sleep(0.05)
    assert len(marked) == 2
    evaluation.send_signal(signal.SIGKILL)
    evaluation.communicate()
    assert world.survivors() == []


@pytest.mark.full
@needs_walls
def test_no_file_of_the_evaluation_is_open_in_the_program(tmp_path):
    with open(tmp_path / "open", "w") as file:
        os.set_inheritable(file.fileno(), True)
        listing = """
import os
found = []
for descriptor in range(64):
    try:
        found.append((descriptor, os.fstat(descriptor).st_mode >> 12))
    except OSError:
        pass
raise KeyError(found)
"""
        outcome = run_program(listing, isolation=HERE).reason
    modes = [mode for _, mode in eval(outcome.removeprefix("wrong: KeyError: "))]
    assert modes == [2, 2, 2, 1]  # three times /dev/null, the pipe of the answer


# What a machine that grants less answers, by a filter that refuses these calls to the process and its children.
FORBIDDING = """
import ctypes, errno, platform, sys
from pipeline.process.errors import RecipeError
from pipeline.contrib import sandbox_child as walls
from pipeline.contrib.sandbox import available_isolation, choose_isolation
from pipeline.contrib.sandbox_child import call
from pipeline.contrib.sandbox import run_program

PRCTL = {"x86_64": 157, "aarch64": 167}[platform.machine()]
step, give = walls.instruction, lambda number: step(walls.RETURN, walls.ERRNO | number)
rules = {
    "landlock": step(walls.EQUAL, walls.LANDLOCK_CREATE_RULESET, if_false=1) + give(errno.ENOSYS),
    "seccomp": step(walls.EQUAL, PRCTL, if_false=4) + step(walls.LOAD, 16)
    + step(walls.EQUAL, walls.PR_SET_SECCOMP, if_false=1) + give(errno.EINVAL) + step(walls.RETURN, walls.ALLOW),
}
code = step(walls.LOAD, walls.NUMBER) + b"".join(rules[name] for name in sys.argv[1:]) + step(walls.RETURN, walls.ALLOW)
call("prctl", walls.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
walls.install(code)

print(available_isolation().name)
try:
    isolation = choose_isolation(False, where="recipe.yaml:3: evals.chat")
except RecipeError as error:
    print(error)
    isolation = choose_isolation(True, where="recipe.yaml:3: evals.chat")
for program in ("assert 1", "assert 0", "while True: pass"):
    print(run_program(program, timeout_s=1.0, isolation=isolation).reason)
"""


def forbidding(*mechanisms: str, **how) -> list[str]:
    """Lines: the isolation that is found, the refusal if any, and the reasons of three programs."""
    command = [sys.executable, "-c", FORBIDDING, *mechanisms]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **how)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


REASONS = ["passed", "wrong: AssertionError", "time: more than 1 s"]


@needs_walls
@pytest.mark.parametrize("withheld", ["landlock", "seccomp"])
def test_without_a_lock_execution_is_refused_unless_unsafe_exec(withheld):
    found, refusal, *reasons = forbidding(withheld)
    assert found == "unsafe: child process only"
    assert refusal.startswith("recipe.yaml:3: evals.chat: ")
    assert "are not executed" in refusal
    assert "evals.unsafe_exec: true" in refusal
    assert "([Errno " in refusal
    assert reasons == REASONS


@needs_walls
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user; others are unprivileged anyway")
def test_a_user_without_privileges_gets_the_same_walls(tmp_path):
    nobody = {"user": 65534, "group": 65534, "extra_groups": []}
    for python in (sys.executable, "/usr/bin/python3"):
        try:
            can = subprocess.run([python, "-c", f"import sys, os; os.listdir({str(ROOT)!r}); assert sys.version_info >= (3, 11)"], **nobody)  # fmt: skip
        except OSError:
            continue
        if can.returncode == 0:
            break
    else:
        pytest.skip("no Python that another user may start")
    command = [python, "-c", FORBIDDING]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={"PYTHONDONTWRITEBYTECODE": "1"}, **nobody)  # fmt: skip
    assert ended.stdout.splitlines() == [HERE.name, *REASONS], ended.stderr


@pytest.mark.full
@needs_walls
def test_walls_that_do_not_hold_are_not_taken_for_safe(monkeypatch):
    # A filter that is installed without an error and lets every call through.
    hollow = "; import pipeline.contrib.sandbox_child as c; c.compute_only = lambda: c.instruction(c.RETURN, c.ALLOW); main()"
    monkeypatch.setattr(sandbox, "START", sandbox.START.replace("; main()", hollow))
    found = sandbox.available_isolation.__wrapped__()
    assert not found.safe
    assert re.search(r"seccomp do not hold: wrong: AssertionError: \w+ is not refused", found.missing)
