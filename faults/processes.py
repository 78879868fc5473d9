"""A run as a process: by the cold, real command, or forked from this warm interpreter, which has imported all it needs."""

import os
import signal
import socket
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from faults import injector

MARK = "FAULTS_TRIAL"  # in the environment of every process of a trial that was started by exec
ENTRIES = ("pretrain.py", "sft.py")


def import_everything() -> None:
    """What an entry imports, so that a fork begins at once. No tensor may be computed here: threads do not survive forks."""
    import pipeline.pretrain
    import pipeline.report.single
    import pipeline.run.finish
    import pipeline.run.inputs
    import pipeline.run.open_rows
    import pipeline.run.open_run
    import pipeline.sft
    import pipeline.sources.open
    import pipeline.tokenizer
    import pipeline.train
    import pipeline.training.build  # noqa: F401


class Run:
    """All processes of one started command. Subclasses say how it was started."""

    def __init__(self, log: Path):
        self.log, self.mark = log, uuid.uuid4().hex
        self.started = time.monotonic()

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def poll(self) -> int | None:
        raise NotImplementedError

    def ranks(self) -> list[int]:
        """Process ids of the training ranks that live, in rank order."""
        raise NotImplementedError

    def own(self) -> list[int]:
        """What this command was started as: the launcher or the forked ranks."""
        raise NotImplementedError

    def everything(self) -> list[int]:
        """Every living process of the trial, also those in sessions of their own."""
        marked = [pid for pid, environ, _ in _processes() if f"{MARK}={self.mark}".encode() in environ]
        return sorted({*marked, *self.own()})

    def writers(self) -> list[int]:
        """The processes that write a checkpoint, one of each rank of a sharded model."""
        return [
            pid
            for pid, environ, words in _processes()
            if f"{MARK}={self.mark}".encode() in environ and any("run_dir/checkpoints.py" in word for word in words)
        ]

    def send(self, number: int, pids: list[int]) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self, pids: list[int]) -> None:
        self.send(signal.SIGKILL, pids)

    def kill_everything(self) -> None:
        self.kill(self.everything())
        self.kill(self.everything())  # children that were started in between
        self.wait(30)

    def wait(self, timeout: float) -> int | None:
        """The exit status, or None when it has not ended by then."""
        ends = time.monotonic() + timeout
        while (status := self.poll()) is None and time.monotonic() < ends:
            time.sleep(0.01)
        return status


class ColdRun(Run):
    """The command a user types."""

    def __init__(self, command: list[str], *, environment: dict[str, str], folder: Path, log: Path):
        super().__init__(log)
        self.num_ranks = int(environment.get("NPROC", 1))
        with open(log, "ab") as out:
            self.process = subprocess.Popen(
                command,
                stdout=out,
                stderr=out,
                cwd=folder,
                env={**os.environ, **environment, MARK: self.mark},
                start_new_session=True,
            )

    def poll(self) -> int | None:
        return self.process.poll()

    def own(self) -> list[int]:
        return [self.process.pid] if self.process.poll() is None else []

    def ranks(self) -> list[int]:
        ranks = {}
        for pid, environ, words in _processes():
            script = next((word for word in words[1:] if not word.startswith("-")), "")  # of `python -u pretrain.py`
            if Path(script).name in ENTRIES and f"{MARK}={self.mark}".encode() in environ:
                numbers = [v.split(b"=")[1] for v in environ if v.startswith(b"RANK=")]
                ranks[pid] = int(numbers[0]) if numbers else 0
        return sorted(ranks, key=lambda pid: ranks[pid])


class ForkedRun(Run):
    """The ranks as forks of this process, in one process group; without a launcher."""

    def __init__(
        self, arguments: list[str], *, stage: str, ranks: int, environment: dict[str, str], folder: Path, log: Path
    ):
        super().__init__(log)
        self.pids: dict[int, int] = {}  # of the ranks that live: process id -> rank
        self.statuses: dict[int, int] = {}
        environment = {**environment, MARK: self.mark}
        if ranks > 1:
            environment |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
            environment |= {"MASTER_PORT": str(_free_port()), "ACCELERATE_USE_CPU": "true"}
        sys.stdout.flush()
        sys.stderr.flush()
        group = 0
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                if ranks > 1:
                    environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                _become_rank(arguments, stage, environment, folder, log, group)
            group = group or pid
            with suppress(OSError):  # the child does it too: whoever comes first
                os.setpgid(pid, group)
            self.pids[pid] = rank

    def poll(self) -> int | None:
        for pid in list(self.pids):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self.statuses[self.pids.pop(pid)] = os.waitstatus_to_exitcode(status)
        if self.pids:
            return None
        return next((s for s in self.statuses.values() if s != 0), 0)

    def own(self) -> list[int]:
        self.poll()
        return list(self.pids)

    def ranks(self) -> list[int]:
        return self.own()


def _become_rank(arguments, stage, environment, folder, log, group) -> None:
    try:
        os.setpgid(0, group)
        os.environ.update(environment)
        injector.reload()
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(folder)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        from pipeline.run import finish
        from pipeline.run_dir import failures

        entry = __import__(f"pipeline.{stage}", fromlist=["main"])
        sys.argv = [str(Path(entry.__file__)), *arguments]
        if rows := os.environ.get("FAULTS_ROWS"):
            from faults.rows_read import record_rows

            record_rows(Path(rows))
        if os.environ.get("FAULTS_NO_REPORT"):
            finish.write_report = failures.write_report = lambda *run, **limit: None  # type: ignore[assignment]
        failures.exit_with_status(entry.main)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _processes() -> Iterator[tuple[int, list[bytes], list[str]]]:
    """(process id, environment, command line) of all processes that can be read."""
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        yield pid, environ, words
