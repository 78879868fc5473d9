"""Our commands in real processes without the seconds of importing: forked from one interpreter that imported.

As a program it reads a command a line as JSON and answers with how it ended, or with the processes of one that was only started.
Of a run's report only the Markdown is written, by the run itself; with $WHOLE_REPORT all of it, by the process that users' runs start.
"""

import gc
import importlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT_S = 600.0
WALL_LIMITS = 4  # times limit_s, which is of CPU time: on a busy machine a command waits for its turn
GRACE_S = 30.0  # for the other ranks of one that failed, as torchrun gives them
FILE_BYTES = 4 << 30  # longest file that a command may write: one that copies without end must not fill the disk
STAGES = ("pretrain", "sft")
PROGRAMS = ("data", "preflight", "tokenizer", "evals", "chat", "hub", "report")
MODULES = {name: f"pipeline.{name}" for name in STAGES} | {name: f"pipeline.{name}.__main__" for name in PROGRAMS}
MODULES["serve"] = "tests.hostile.serve_once"
# Everything else that an entry imports, so that no child has to.
ALSO = ("train", "run.finish", "run.open_rows", "report.page", "report.single", "training.build",
        "evals.texts", "evals.bpb", "chat.conversation", "hub.pull", "contrib.export", "data.preview", "data.prepare", "data.preparation",
        "tokenizer.load", "tokenizer.train", "run.checks", "run.start_process")  # fmt: skip


@dataclass
class Ended:
    """How a command ended. statuses: of every rank, -9 for one that was killed. peak_mib: of the largest rank and what it started."""

    statuses: list[int]
    output: str
    seconds: float = 0.0
    cpu_s: float = 0.0  # of all ranks and what they started
    peak_mib: int = 0
    over: str = ""  # the limit that it was killed for

    @property
    def status(self) -> int:
        return self.statuses[0]


class Started:
    """A command that goes on by itself, as subprocess.Popen looks; its ranks have the process ids `pids`."""

    def __init__(self, warm: "WarmCommands", pids: list[int], output: Path):
        self.warm, self.pids, self.output = warm, pids, output
        self.statuses: dict[int, int] = {}

    def poll(self) -> int | None:
        """Return the first status that is not 0, once all ranks have ended."""
        if left := [pid for pid in self.pids if pid not in self.statuses]:
            found = self.warm.ask(poll=left)["statuses"]
            self.statuses |= {pid: status for pid, status in zip(left, found, strict=True) if status is not None}
        if len(self.statuses) < len(self.pids):
            return None
        return next((status for status in self.statuses.values() if status), 0)

    def kill(self) -> None:
        """`kill -9` all ranks, and return once they are gone."""
        for pid in set(self.pids) - set(self.statuses):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while self.poll() is None:
            time.sleep(0.01)

    def communicate(self) -> tuple[str, None]:
        while self.poll() is None:
            time.sleep(0.01)
        return self.output.read_text(errors="replace"), None


class WarmCommands:
    """Starts the interpreter, and commands in it as a shell or `accelerate launch` would."""

    def __init__(self, folder: Path):
        self.folder, self.num_started = folder, 0
        self.server = subprocess.Popen(
            [sys.executable, "-m", "tests.warm_commands"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_XET": "1"}
            | os.environ
            | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        )

    def run(
        self,
        *command: str,
        folder: Path = ROOT,
        ranks: int = 1,
        limit_s: float = LIMIT_S,
        limit_mib: int = 8192,
        watch: dict | None = None,
        **environment: str,
    ) -> Ended:
        """Run one command, which finds `y` on its stdin as often as it asks. watch: arguments of tests.hostile.watch.watch."""
        output = self.folder / "output.txt"
        limits = {"limit_s": limit_s, "limit_mib": limit_mib, "watch": watch}
        ended = self.ask(**self._asked(command, folder, ranks, output, environment), **limits)
        return Ended(output=output.read_text(errors="replace"), **ended)

    def start(self, *command: str, folder: Path = ROOT, ranks: int = 1, **environment: str) -> Started:
        """Start one command and leave it running."""
        self.num_started += 1
        output = self.folder / f"started-{self.num_started}.txt"
        asked = self._asked(command, folder, ranks, output, environment)
        return Started(self, self.ask(**asked, watch=None, start=True)["pids"], output)

    @staticmethod
    def _asked(command, folder: Path, ranks: int, output: Path, environment: dict[str, str]) -> dict:
        words = [str(word) for word in command]
        where = {"folder": str(folder), "output": str(output)}
        return {"command": words, "ranks": ranks, "environment": environment, **where}

    def ask(self, **asked) -> dict:
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(json.dumps(asked) + "\n")
        self.server.stdin.flush()
        return json.loads(self.server.stdout.readline())

    def close(self) -> None:
        self.server.communicate(timeout=30)  # it ends with its input


def serve() -> None:
    libraries = (
        "transformers.models.auto.tokenization_auto",
        "transformers.convert_slow_tokenizer",
        "transformers.models.auto.modeling_auto",
    )
    for module in [*libraries, *(f"pipeline.{name}" for name in ALSO), *MODULES.values()]:
        importlib.import_module(module)
    gc.freeze()  # what a child's collections need not look through
    for line in sys.stdin:
        asked = json.loads(line)
        if "poll" in asked:
            print(json.dumps({"statuses": [status_of(pid) for pid in asked["poll"]]}), flush=True)
            continue
        world = {}
        if asked["command"][0] in STAGES:
            # Of one rank it means that it shares the machine: two threads that wait for each other on a busy one are slow.
            world = {"LOCAL_WORLD_SIZE": "2"}
        if asked["ranks"] > 1:
            world |= {"WORLD_SIZE": str(asked["ranks"]), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        started = time.monotonic()
        ranks = [rank_process(rank, asked, world) for rank in range(asked["ranks"])]
        if asked.get("start"):
            print(json.dumps({"pids": ranks}), flush=True)
            continue
        ended = wait(ranks, asked)
        print(json.dumps(ended | {"seconds": round(time.monotonic() - started, 2)}), flush=True)


def status_of(pid: int) -> int | None:
    """Return the exit status of a started rank, or None while it lives."""
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def rank_process(rank: int, asked: dict, world: dict[str, str]) -> int:
    """The process id of a fork that is one rank of the command."""
    if child := os.fork():
        return child
    os.setpgid(0, 0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    answers, writing = os.pipe()
    os.write(writing, b"y\n" * 50)
    os.close(writing)
    os.dup2(answers, 0)
    sys.stdin = open(0)  # noqa: SIM115
    output = os.open(asked["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if rank == 0 else 0))
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(asked["environment"])
    tempfile.tempdir = None  # that of the process which imported everything
    os.environ.update(world)
    if asked["ranks"] > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    sys.path[:0] = asked["environment"].get("INSTALLED", "").split()  # stands for site-packages
    os.chdir(asked["folder"])
    name, *sys.argv[1:] = asked["command"]
    sys.argv[0] = f"{name}.py"
    point_at_hub(asked["environment"])
    exec(asked["environment"].get("BEFORE", ""))  # what a test replaces
    if asked["watch"]:
        from tests.hostile.watch import watch

        watch(**asked["watch"])
    elif "WHOLE_REPORT" not in asked["environment"]:
        from pipeline.run import finish
        from pipeline.run_dir import failures

        failures.write_report = finish.write_report = write_markdown

    from pipeline.run_dir.failures import exit_with_status

    exit_with_status(importlib.import_module(MODULES[name]).main)
    os._exit(99)  # never: an entry leaves the process itself


def write_markdown(run, *, limit_s: float | None = None) -> str | None:
    """Write report.md as failures.write_report has it written: in this process, and without the seconds of its page and picture."""
    from pipeline.process.storage import write_text
    from pipeline.report.run_data import read_runs
    from pipeline.report.single import report

    try:
        write_text(run.report / "report.md", report(read_runs([str(run.path.resolve())])[0]))
    except Exception:
        return traceback.format_exc()
    return None


def point_at_hub(environment: dict[str, str]) -> None:
    """Make the imported library's constants those that the environment would have made them."""
    from huggingface_hub import constants

    if home := environment.get("HF_HOME"):
        constants.HF_HOME, constants.HF_HUB_CACHE = home, f"{home}/hub"
        constants.HF_TOKEN_PATH, constants.HF_STORED_TOKENS_PATH = f"{home}/token", f"{home}/stored_tokens"
    if endpoint := environment.get("HF_ENDPOINT"):
        constants.ENDPOINT = endpoint
        constants.HF_HUB_OFFLINE = False
        constants.HUGGINGFACE_CO_URL_TEMPLATE = endpoint + "/{repo_id}/resolve/{revision}/{filename}"


def wait(ranks: list[int], asked: dict) -> dict:
    """Wait for all ranks; as a launcher does, what is left after a failure is ended soon. What takes too much is killed."""
    ended: dict[int, int] = {}
    peak, cpu, over = 0, 0.0, ""
    ends = time.monotonic() + WALL_LIMITS * asked["limit_s"]
    last_chance = float("inf")
    while len(ended) < len(ranks):
        for rank in set(ranks) - set(ended):
            pid, status, used = os.wait4(rank, os.WNOHANG)
            if pid:
                ended[rank] = os.waitstatus_to_exitcode(status)
                peak = max(peak, used.ru_maxrss >> 10)
                cpu += used.ru_utime + used.ru_stime
                last_chance = time.monotonic() + GRACE_S if ended[rank] else last_chance
            elif time.monotonic() > last_chance:
                os.kill(rank, signal.SIGKILL)
            elif found := over_limit(rank, ends, asked):
                over = found
                os.killpg(rank, signal.SIGKILL)
        time.sleep(0.01)
    for rank in ranks if asked["watch"] else []:  # what a hostile thing made a command leave behind
        with suppress(ProcessLookupError):
            os.killpg(rank, signal.SIGKILL)
    return {"statuses": [ended[rank] for rank in ranks], "peak_mib": peak, "cpu_s": round(cpu, 2), "over": over}


def over_limit(pid: int, ends: float, asked: dict) -> str:
    """Return what a process has taken too much of, or ""."""
    if time.monotonic() > ends or cpu_s(pid) > asked["limit_s"]:
        return "time"
    return "memory" if resident_mib(pid) > asked["limit_mib"] else ""


def cpu_s(pid: int) -> float:
    with suppress(OSError):
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return 0.0


def resident_mib(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() >> 20
    return 0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


if __name__ == "__main__":
    serve()
